"""The server's side of a policy hand-over: a worker extension, loaded by vLLM in its worker process (`--worker-extension-cls`).

vLLM turns an exception in a worker into the end of the engine, so a policy that must not be served is refused in the reply.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bapo_jax.rollout.published import Manifest, RefusedPolicy, check_model, read_manifest, read_tensors


class PolicyLoader:
    """Methods that vLLM adds to its worker class, to be called over /collective_rpc."""

    def load_policy(self, path: str) -> dict[str, Any]:
        """Serves the policy published at `path` from now on; {'version', 'fingerprint'}, or {'refused': why} with nothing changed.

        Everything is read and checked before the first weight is touched, since half a load cannot be undone.
        """
        try:
            manifest = read_manifest(path)
            check_model(manifest, self.model_config.hf_config)
            check_tensors(manifest, self.model_config.model)
            tensors = read_tensors(path, manifest)
        except RefusedPolicy as e:
            return {'refused': str(e)}
        self.reload_weights(weights_iterator=((name, as_torch(array)) for name, array in tensors))
        if manifest.model['tie_word_embeddings']:
            tie_head(self.get_model())
        self.policy_loaded = {'version': manifest.version, 'fingerprint': manifest.fingerprint}
        return self.policy_loaded

    def policy_info(self) -> dict[str, Any]:
        """Version and fingerprint of the policy served; empty before the first `load_policy`."""
        return getattr(self, 'policy_loaded', {})


def check_tensors(manifest: Manifest, model: str) -> None:
    """Names and shapes against the checkpoint that the server was started with. Raises RefusedPolicy."""
    expected = checkpoint_shapes(Path(model))
    if manifest.model.get('tie_word_embeddings'):
        expected.pop('lm_head.weight', None)  # some checkpoints repeat the embedding there
    offered = {t.name: t.shape for t in manifest.tensors}
    if expected.keys() != offered.keys():
        missing, unknown = sorted(expected.keys() - offered.keys()), sorted(offered.keys() - expected.keys())
        raise RefusedPolicy(f'policy {manifest.version} has other tensors than {model}: missing {missing[:3]}, unknown {unknown[:3]}')
    for name, shape in offered.items():
        if shape != expected[name]:
            raise RefusedPolicy(f'policy {manifest.version}: {name} is {shape}, in {model} it is {expected[name]}')


def checkpoint_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor in the safetensors files of a directory, from their headers alone."""
    shapes = {}
    for path in sorted(directory.glob('*.safetensors')):
        with path.open('rb') as f:
            header = json.loads(f.read(int.from_bytes(f.read(8), 'little')))
        shapes |= {name: tuple(entry['shape']) for name, entry in header.items() if name != '__metadata__'}
    return shapes


def tie_head(model: torch.nn.Module) -> None:
    """Gives the LM head the embedding's new weights.

    vLLM (0.32) reloads layer by layer and finds no tensor for a tied head; on CPU that keeps a packed copy of the old embedding.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    modules = list(model.modules())
    [head] = [m for m in modules if isinstance(m, ParallelLMHead)]
    [embedding] = [m for m in modules if isinstance(m, VocabParallelEmbedding) and not isinstance(m, ParallelLMHead)]
    head.tie_weights(embedding)
    head.quant_method.process_weights_after_loading(head)


def as_torch(array: np.ndarray) -> torch.Tensor:
    """The same bytes; torch knows no numpy bfloat16."""
    if array.dtype.name == 'bfloat16':
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
