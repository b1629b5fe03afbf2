"""The workloads of peers.py: sizes, data and useful work. NumPy alone, since every framework's environment
imports it.

A workload's directory, which peers_torch.py writes, holds `workload.json`, `data.npz`, and `model/` and
`tokenizer/` as Hugging Face writes them.

Shapes:  P prompts · G responses a prompt · L most response tokens.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

SEED = 0
MATRIX = 2048  # the side of the product whose rate is the yardstick
LEARNING_RATE, WEIGHT_DECAY, GRAD_CLIP, CLIP = 1e-4, 0.01, 1.0, 0.2


@dataclasses.dataclass(frozen=True)
class Workload:
    """One iteration of GRPO on a Qwen2 with tied embeddings; responses end at the limit, or earlier where
    `ragged`.
    """

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocabulary: int
    prompts: int  # P
    optimizer_steps: int
    prompt_tokens: int = 32
    group_size: int = 8  # G
    response_tokens: int = 32  # L
    ragged: bool = False  # response lengths uniform in [L / 4, L]

    def hf_config(self) -> dict[str, Any]:
        """The fields of config.json. Weights are wide enough that attention is far from uniform."""
        return {
            'model_type': 'qwen2', 'vocab_size': self.vocabulary, 'hidden_size': self.hidden, 'intermediate_size': self.mlp,
            'num_hidden_layers': self.layers, 'num_attention_heads': self.heads, 'num_key_value_heads': self.kv_heads,
            'tie_word_embeddings': True, 'initializer_range': self.hidden**-0.5, 'bos_token_id': None, 'eos_token_id': None,
            'rope_parameters': {'rope_type': 'default', 'rope_theta': 10_000.0},
        }  # fmt: skip


W = Workload('W', 128, 4, 4, 2, 32, 512, 512, prompts=64, optimizer_steps=4)
W2 = Workload('W2', 512, 8, 8, 2, 64, 1536, 8192, prompts=16, optimizer_steps=1, response_tokens=128)
WORKLOADS = {
    w.name: w
    for full in (W, W2)
    for w in (full, dataclasses.replace(full, name=f'{full.name}-ragged', ragged=True))
}


class Data(NamedTuple):
    """What an update is given."""

    prompts: np.ndarray  # int32 [P, prompt tokens]
    responses: np.ndarray  # int32 [P, G, L]; what stands behind a response's end does not count
    lengths: np.ndarray  # int32 [P, G]
    initial: np.ndarray  # float32 [P, G, L], log-probs under the initial policy
    behaviour: np.ndarray  # float32 [P, G, L], log-probs under a policy near it: the one that answered
    rewards: np.ndarray  # float32 [P, G], 0 or 1, both in every group


def draw(w: Workload) -> Data:
    """Data from the seed. Log-probs are still to come: `initial` is 0, and `behaviour` what it differs from
    it by.
    """
    rng = np.random.default_rng(SEED)
    shape = (w.prompts, w.group_size)
    prompts = rng.integers(0, w.vocabulary, (w.prompts, w.prompt_tokens), dtype=np.int32)
    responses = rng.integers(0, w.vocabulary, (*shape, w.response_tokens), dtype=np.int32)
    lengths = rng.integers(w.response_tokens // 4, w.response_tokens + 1, shape, dtype=np.int32)
    lengths = lengths if w.ragged else np.full_like(lengths, w.response_tokens)
    noise = rng.normal(0, 0.3, responses.shape).astype(np.float32)
    correct = rng.integers(1, w.group_size, w.prompts)
    rewards = (np.arange(w.group_size) < correct[:, None]).astype(np.float32)
    return Data(prompts, responses, lengths, np.zeros_like(noise), noise, rng.permuted(rewards, axis=1))


def save(directory: Path, w: Workload, data: Data) -> None:
    (directory / 'workload.json').write_text(json.dumps(dataclasses.asdict(w)))
    np.savez(directory / 'data.npz', **data._asdict())


def load(directory: Path) -> tuple[Workload, Data]:
    with np.load(directory / 'data.npz') as arrays:
        data = Data(**arrays)
    return Workload(**json.loads((directory / 'workload.json').read_text())), data


def update_flops(w: Workload, data: Data) -> float:
    """6 · matrix parameters · tokens, the head on response tokens alone, and causal attention, forward and
    backward.

    Every sequence is counted whole, its prompt included. Work beyond this (recomputation, padding, entropy)
    is not useful work.
    """
    lengths = w.prompt_tokens + data.lengths.astype(np.float64)
    products = layer_parameters(w) * lengths.sum() + w.vocabulary * w.hidden * float(data.lengths.sum())
    # Two products of [T, T] / 2 scores with heads of H, each 2 FLOP, in every layer.
    attention = 2 * w.layers * w.heads * w.head_dim * (lengths**2).sum()
    return 6 * products + 3 * attention


def generation_flops(w: Workload, data: Data) -> float:
    """2 · matrix parameters · tokens and attention of sampling the responses; each prompt is read once."""
    prompt_tokens, sampled = w.prompts * w.prompt_tokens, float(data.lengths.sum())
    products = layer_parameters(w) * (prompt_tokens + sampled) + w.vocabulary * w.hidden * sampled
    lengths = w.prompt_tokens + data.lengths.astype(np.float64)
    seen = (lengths**2 - w.prompt_tokens**2).sum() + w.prompts * w.prompt_tokens**2
    return 2 * products + 2 * w.layers * w.heads * w.head_dim * seen


def layer_parameters(w: Workload) -> int:
    """Of all matrices but the embedding."""
    attention = 2 * w.hidden * w.head_dim * (w.heads + w.kv_heads)
    return w.layers * (attention + 3 * w.hidden * w.mlp)


def text_of(tokens: Sequence[int]) -> str:
    """A prompt as text, a word a token, for frameworks that take text alone; `write_tokenizer` reads it back."""
    return ' '.join(f't{token}' for token in tokens)


def write_tokenizer(directory: Path, vocabulary: int) -> None:
    """A tokenizer of the words of `text_of`. Its end and padding have an id that the model cannot sample."""
    words = {**{f't{i}': i for i in range(vocabulary)}, '<end>': vocabulary}
    model = {'type': 'WordLevel', 'vocab': words, 'unk_token': '<end>'}
    special = {'id': vocabulary, 'content': '<end>', 'special': True}
    special |= dict.fromkeys(('single_word', 'lstrip', 'rstrip', 'normalized'), False)
    tokenizer = {
        'version': '1.0',
        'added_tokens': [special],
        'pre_tokenizer': {'type': 'WhitespaceSplit'},
        'model': model,
    }
    directory.mkdir(exist_ok=True)
    (directory / 'tokenizer.json').write_text(json.dumps(tokenizer))
    names = {'eos_token': '<end>', 'pad_token': '<end>', 'tokenizer_class': 'PreTrainedTokenizerFast'}
    (directory / 'tokenizer_config.json').write_text(json.dumps(names))


def rate_of_product(product: Callable[[], Any], products: int = 1, calls: int = 5, trials: int = 3) -> float:
    """FLOP/s of `product()`, which multiplies `products` pairs of 2048² matrices and waits for the result;
    best of `trials`.
    """
    product()
    seconds = []
    for _ in range(trials):
        started = time.perf_counter()
        for _ in range(calls):
            product()
        seconds.append((time.perf_counter() - started) / calls)
    return products * 2 * MATRIX**3 / min(seconds)


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds, and what `work()` returned."""
    started = time.perf_counter()
    result = work()
    return time.perf_counter() - started, result


def versions(*packages: str) -> str:
    return ', '.join(f'{name} {version(name)}' for name in packages)


def report(**result: Any) -> None:
    """Prints what peers.py reads: one line of JSON, the last that a worker prints."""
    print(json.dumps(result), flush=True)
