"""Loads policies on the server: an extension of vLLM's worker processes (`--worker-extension-cls`)."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bapo_jax.models.parameters import HEAD
from bapo_jax.weights.manifest import (
    OTHER_TRAINER,
    Manifest,
    RefusedPolicy,
    check_architecture,
    check_bytes,
    read_manifest,
    read_tensors,
)

# Bytes loaded before freed memory is returned; returning it after every tensor took half as long again.
_RETURN_AFTER = 64 * 2**20


class PolicyLoader:
    """A mixin of vLLM's worker class. The trainer calls its methods over /collective_rpc, in this order.

    A server has one worker per device. All of them check the policy, and they load it only if none refuses.
    """

    _held = ''  # name of the policy loaded last

    def check_policy(self, path: str) -> dict[str, Any]:
        """Returns {'version', 'checksum'} of the policy published at `path`, or {'refused': reason}.

        Changes nothing. Every worker compares the manifest with the model, and checks its share of the files.
        """
        try:
            manifest = read_manifest(path)
            check_architecture(manifest, self.model_config.hf_config)
            if manifest.files:
                self._check_adapter()
            else:
                check_tensors(manifest, self.model_config.model)
            check_bytes(path, manifest, self.rank, self.parallel_config.world_size)
        except RefusedPolicy as e:
            return {'refused': str(e)}
        return {'version': manifest.version, 'checksum': manifest.checksum}

    def _check_adapter(self) -> None:
        """Raises RefusedPolicy if this server cannot add an adapter to the weights of its start."""
        if not getattr(self, 'lora_config', None):
            raise RefusedPolicy('it takes no adapters; serve with --enable-lora --max-lora-rank=RANK')
        if self._held:
            raise RefusedPolicy(f'it holds the weights of {self._held} in place of its base; restart it')

    def load_policy(self, path: str) -> dict[str, Any]:
        """Loads the checked policy, tensor by tensor; returns {'version', 'checksum'} or {'broken': reason}.

        A partial load cannot be undone. So a worker that fails drops its model, and the server ends before it
        samples from it.
        """
        self._held = ''
        try:
            manifest = read_manifest(path)
            if any('.experts.' in tensor.name for tensor in manifest.tensors):
                forget_kernels(self.get_model())
            self.reload_weights(weights_iterator=streamed(path, manifest))
            if manifest.model['tie_word_embeddings']:
                tie_head(self.get_model())
        except Exception as e:  # after any error, some weights may be new and others old
            self.model_runner = None  # the next token requested of this worker ends vLLM's engine
            return {'broken': f'{type(e).__name__}: {e}'}
        self._held = manifest.name
        return {'version': manifest.version, 'checksum': manifest.checksum}

    def confirm_policy(self, path: str) -> dict[str, Any]:
        """Returns {'version', 'checksum'} if this worker still holds the policy, else {'refused': reason}.

        Called once the server has the policy's name. Without this, two trainers that load together could
        give one's name to the other's weights.
        """
        try:
            manifest = read_manifest(path)
        except RefusedPolicy as e:
            return {'refused': str(e)}
        if self._held != manifest.name:
            return {'refused': f'it now holds {self._held}. {OTHER_TRAINER}'}
        return {'version': manifest.version, 'checksum': manifest.checksum}


def streamed(path: str, manifest: Manifest) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, tensor), with one tensor in memory at a time.

    vLLM frees copies of every layer that it loads. Without malloc_trim, glibc keeps that memory, in the end a
    fifth of a policy.
    """
    libc, loaded = ctypes.CDLL(None), 0
    for name, array in read_tensors(path, manifest):
        yield name, as_torch(array)
        loaded += array.nbytes
        if loaded >= _RETURN_AFTER:
            libc.malloc_trim(0)
            loaded = 0


def check_tensors(manifest: Manifest, model: str) -> None:
    """Raises RefusedPolicy if names or shapes differ from the checkpoint that the server was started with."""
    expected = checkpoint_shapes(Path(model))
    if manifest.model['tie_word_embeddings']:
        expected.pop(HEAD.name, None)  # some checkpoints repeat the embedding under this name
    offered = {t.name: t.shape for t in manifest.tensors}
    if expected.keys() != offered.keys():
        missing, unknown = sorted(expected.keys() - offered.keys()), sorted(offered.keys() - expected.keys())
        raise RefusedPolicy(
            f'policy {manifest.version} has other tensors than {model} (missing {missing[:3]}, unknown '
            f'{unknown[:3]}); serve the model directory that the run trains'
        )
    for name, shape in offered.items():
        if shape != expected[name]:
            raise RefusedPolicy(
                f'policy {manifest.version}: {name} has shape {shape}, but {expected[name]} in {model}; '
                'serve the model directory that the run trains'
            )


def checkpoint_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor in a directory's safetensors files, from their headers."""
    shapes = {}
    for path in sorted(directory.glob('*.safetensors')):
        with path.open('rb') as f:
            header = json.loads(f.read(int.from_bytes(f.read(8), 'little')))
        shapes |= {name: tuple(entry['shape']) for name, entry in header.items() if name != '__metadata__'}
    return shapes


def forget_kernels(model: torch.nn.Module) -> None:
    """Makes vLLM pack the weights of experts again, on a CPU, when they have been loaded.

    It (0.32) packs them where it sets up their kernel, which it does at the first load alone. The kernel
    would then read unpacked weights as packed ones.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():  # elsewhere a load keeps the kernel, whose addresses graphs have
        return
    for module in model.modules():
        method = getattr(module, 'quant_method', None)
        if getattr(method, 'moe_kernel', None) is not None:
            method.moe_kernel = None


def tie_head(model: torch.nn.Module) -> None:
    """Gives the LM head the embedding's new weights.

    vLLM (0.32) reloads layer by layer and finds no tensor for a tied head. On CPU the head keeps a packed
    copy of the old embedding.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    modules = list(model.modules())
    [head] = [m for m in modules if isinstance(m, ParallelLMHead)]
    [embedding] = [
        m for m in modules if isinstance(m, VocabParallelEmbedding) and not isinstance(m, ParallelLMHead)
    ]
    head.tie_weights(embedding)
    head.quant_method.process_weights_after_loading(head)


def as_torch(array: np.ndarray) -> torch.Tensor:
    """A tensor with the array's memory; torch cannot convert numpy's bfloat16."""
    if array.dtype.name == 'bfloat16':
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
