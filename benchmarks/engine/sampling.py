"""How exactly the in-process engine draws a token, and what that costs: a table of vocabularies and
distributions.

    python -m benchmarks.engine.sampling

Total variation is that of the distribution which the draw has over all its random numbers, to the softmax in
float64. Nothing is sampled for it: a uniform number is one of 2^23, and each place is found by as many of
them as lie between two cumulative sums.

A GPU draws by Gumbel noise (gpu_drawing.py). Its total variation is at most the share of draws that float64
decides otherwise, with the same random bits and more behind them. Seconds are those of the process on all
cores, so that a busy machine counts little.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable
from importlib.metadata import version

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from bapo_jax.rollout.inprocess import drawing, gpu_drawing
from benchmarks.host.load import cpu_name

_NUMBERS = 2**23  # uniform float32 numbers in [0, 1), all equally likely
_ROWS, _DRAWS = 32, 20
_DECIDED = 20_000


def softmax(logits: np.ndarray) -> np.ndarray:
    """float64 [V]."""
    p = np.exp(logits.astype(np.float64) - logits.max())
    return p / p.sum()


def looked_up(p_W: np.ndarray) -> np.ndarray:
    """float64 [W]: the probability of each place to be found by `drawing.look_up`."""
    cumulative = np.asarray(jnp.cumsum(jnp.asarray(p_W)[None], axis=-1))[0]
    total = cumulative[-1]
    about = np.floor(cumulative.astype(np.float64) / total * _NUMBERS)
    # How many of the uniform numbers, times the total in float32, stay below each sum; rounding moves it by
    # one or two.
    nearby = about[:, None] + np.arange(-3, 4)
    below = (nearby.astype(np.float32) / np.float32(_NUMBERS)) * total < cumulative[:, None]
    count = np.clip(about - 3 + below.sum(axis=1), 0, _NUMBERS)
    return np.diff(np.concatenate([[0], count])) / _NUMBERS


def one_sum(p_V: np.ndarray) -> np.ndarray:
    """float64 [V]: the distribution of a draw by one cumulative sum over the vocabulary."""
    return looked_up(p_V)


def drawn(p_V: np.ndarray) -> np.ndarray:
    """float64 [V]: the distribution of `drawing.draw`."""
    if len(p_V) <= drawing.VOCABULARY_BLOCK:
        return looked_up(p_V)
    p_NxW = np.pad(p_V, (0, -len(p_V) % drawing.VOCABULARY_BLOCK)).reshape(-1, drawing.VOCABULARY_BLOCK)
    of_blocks = looked_up(np.asarray(jnp.sum(jnp.asarray(p_NxW), axis=-1)))
    within = [
        looked_up(p_W) if share else np.zeros(drawing.VOCABULARY_BLOCK)
        for p_W, share in zip(p_NxW, of_blocks, strict=True)
    ]
    return (of_blocks[:, None] * np.stack(within)).reshape(-1)[: len(p_V)]


def total_variation(logits_V: np.ndarray, distribution: Callable[[np.ndarray], np.ndarray]) -> float:
    """½ Σ |q - softmax| with q the distribution of a draw from the engine's own float32 probabilities."""
    p_V = np.asarray(jnp.exp(jax.nn.log_softmax(jnp.asarray(logits_V))))
    return float(np.abs(distribution(p_V) - softmax(logits_V)).sum() / 2)


def decided_otherwise(logits_V: np.ndarray, draws: int, rows: int = 500) -> int:
    """How many draws on a GPU would give another word in float64, where 52 bits take the place of 32."""
    rng, found, W = np.random.default_rng(0), 0, drawing.VOCABULARY_BLOCK
    score_1xNxW = gpu_drawing.in_blocks(jnp.asarray(logits_V)[None])
    p_NxW = np.pad(softmax(logits_V), (0, -len(logits_V) % W)).reshape(-1, W)
    N = len(p_NxW)

    @jax.jit
    def drawn_with_bits(score_1xNxW, key_B):
        score, sums = (
            jnp.broadcast_to(x, (rows, *x.shape[1:])) for x in (score_1xNxW, gpu_drawing.log_sum(score_1xNxW))
        )
        return gpu_drawing.draw(score, sums, key_B), jax.vmap(lambda key: jax.random.bits(key, N + W))(key_B)

    for i in range(draws // rows):
        word_B, bits_BxM = map(
            np.asarray, drawn_with_bits(score_1xNxW, jax.random.split(jax.random.key(i), rows))
        )
        wait_BxM = -np.log1p(
            -(bits_BxM + rng.random(bits_BxM.shape)) / 2**32
        )  # exp(-noise): the first of p / wait is drawn
        block_B = np.argmax(p_NxW.sum(axis=1) / wait_BxM[:, :N], axis=1)
        found += np.sum(block_B * W + np.argmax(p_NxW[block_B] / wait_BxM[:, N:], axis=1) != word_B)
    return int(found)


def microseconds(draw: Callable[[jax.Array, jax.Array], jax.Array], logits_V: np.ndarray) -> float:
    """Process time of a draw of one row, the softmax apart."""
    p_BxV = jnp.broadcast_to(jnp.exp(jax.nn.log_softmax(jnp.asarray(logits_V))), (_ROWS, len(logits_V)))
    run, keys = jax.jit(draw), [jax.random.split(jax.random.key(i), _ROWS) for i in range(_DRAWS + 1)]
    run(p_BxV, keys[0]).block_until_ready()
    started = time.process_time()
    for key_B in keys[1:]:
        run(p_BxV, key_B).block_until_ready()
    return (time.process_time() - started) / _DRAWS / _ROWS * 1e6


def logits_of(kind: str, V: int) -> np.ndarray:
    """float32 [V]: 'flat' is normal with deviation 1; 'Zipf' has probabilities 1/rank; 'peaked' one word of
    .9 and Zipf behind it.
    """
    rng = np.random.default_rng(0)
    zipf = -np.log(1.0 + rng.permutation(V))
    logits = {'flat': rng.normal(size=V), 'Zipf': zipf, 'peaked': zipf.copy()}[kind]
    if kind == 'peaked':
        logits[V // 2] = np.log(9 * np.exp(logits).sum())
    return logits.astype(np.float32)


def by_one_sum(p_BxV: jax.Array, key_B: jax.Array) -> jax.Array:
    return drawing.look_up(p_BxV, jax.vmap(jax.random.uniform)(key_B))


def by_gumbel(p_BxV: jax.Array, key_B: jax.Array) -> jax.Array:
    return jax.vmap(jax.random.categorical)(key_B, jnp.log(p_BxV))


def run() -> None:
    console = Console(width=140)
    by_gpu = f'decided otherwise, of {_DECIDED:,} on a GPU'
    head = (
        'vocabulary',
        'logits',
        'TV, one sum',
        'TV, engine',
        by_gpu,
        'µs, one sum',
        'µs, engine',
        'µs, Gumbel',
    )
    table = Table(*head, title=f'jax {version("jax")}, {cpu_name()}, {datetime.date.today()}')
    for V in (261, 32_000, 151_936):
        for kind in ('flat', 'Zipf', 'peaked'):
            logits = logits_of(kind, V)
            far = [total_variation(logits, distribution) for distribution in (one_sum, drawn)]
            spent = (
                [microseconds(draw, logits) for draw in (by_one_sum, drawing.draw, by_gumbel)]
                if kind == 'flat'
                else []
            )
            otherwise = str(decided_otherwise(logits, _DECIDED))
            table.add_row(f'{V:,}', kind, *(f'{x:.1e}' for x in far), otherwise, *(f'{x:.0f}' for x in spent))
    console.print(table)


if __name__ == '__main__':
    run()
