"""How far rounding moves log-probs, and what attention loses where queries are scaled in bfloat16: two
tables.

    python -m benchmarks.engine.rounding    # the quickstart's policy, 8 prompts
    # SmolLM2-135M-Instruct; `make real` fetches it
    python -m benchmarks.engine.rounding --config=arithmetic --prompts=2

The in-process engine answers prompts in float32, 8 responses each, and the learner's own program scores them
in several ways, as the probe of a server does (bapo_jax/rollout/fidelity.py). Printed are the smallest and
the largest figure of a prompt.

    float32         as a CPU multiplies
    TF32            operands of float32 products with 10 bits, to nearest: JAX's default on GPUs since Ampere
    TF32, cut       the same, cut off: what hardware may do at worst
    7 bits          operands with 7 bits: JAX's default for float32 on TPUs
    bfloat16        model.dtype=bfloat16
    and q rounded   the same, and attention's queries rounded twice more: what scaling them by no power of two
    rounds once

The second table is of the result of attention to 256 keys, of random queries, keys and values in bfloat16,
against float64: the root of the mean square over that of the result. Kernels run in Pallas's interpreter.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core.primitives import dot_general_p
from ml_collections import ConfigDict

from bapo_jax.groups import X1, Group, Verdict, make_batch
from bapo_jax.inputs import Inputs, read_inputs
from bapo_jax.learner.build import build_learner
from bapo_jax.learner.learner import Learner
from bapo_jax.learner.objective import PROXIMAL
from bapo_jax.models import attention, kernels
from bapo_jax.rollout.engine import PROBE, Draw, Sampling
from bapo_jax.rollout.start import start_engine
from benchmarks.host.load import cpu_name

SIZE = 8  # responses to a prompt
Rounding = Callable[[jax.Array], jax.Array]


def to_bits(x: jax.Array, bits: int) -> jax.Array:
    """float32 with so many bits of its mantissa, to nearest."""
    return jax.lax.reduce_precision(x, 8, bits)


def cut_to_tf32(x: jax.Array) -> jax.Array:
    """float32 with the first 10 bits of its mantissa."""
    kept = jax.lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0xFFFFE000)
    return jax.lax.bitcast_convert_type(kept, jnp.float32)


@contextlib.contextmanager
def rounded_products(rounding: Rounding | None) -> Iterator[None]:
    """What is traced in here rounds both operands of every product of float32 numbers."""
    bind = dot_general_p.bind

    def rounded(*operands, **how):
        return bind(*(rounding(x) if x.dtype == jnp.float32 else x for x in operands), **how)

    jax.clear_caches()
    if rounding:
        dot_general_p.bind = rounded
    try:
        yield
    finally:
        vars(dot_general_p).pop('bind', None)
        jax.clear_caches()


def _queries_rounded(q_BxTxNxH, *arrays):
    for factor in (math.sqrt(2), math.sqrt(0.5)):
        q_BxTxNxH = to_bits(q_BxTxNxH.astype(jnp.float32) * factor, 7).astype(q_BxTxNxH.dtype)
    return attention.xla(q_BxTxNxH, *arrays)


WAYS: dict[str, tuple[Rounding | None, str, str]] = {  # rounding of products, model.dtype, kernel
    'float32': (None, 'float32', 'xla'),
    'TF32': (functools.partial(to_bits, bits=10), 'float32', 'xla'),
    'TF32, cut': (cut_to_tf32, 'float32', 'xla'),
    '7 bits': (functools.partial(to_bits, bits=7), 'float32', 'xla'),
    'bfloat16': (None, 'bfloat16', 'xla'),
    'and q rounded': (None, 'bfloat16', 'q rounded'),
}


def config_of(name: str, prompts: int) -> ConfigDict:
    """A config of configs/ with that many prompts a batch, sequences end to end and no evaluation."""
    c = import_module(f'configs.{name}').get_config()
    c.rollout.group_size, c.rollout.rows, c.mesh.data = SIZE, prompts * SIZE, 1
    c.replay.use_x2, c.log.failed_again.prompts = False, 0
    c.learner.batch_groups = c.learner.mini_batch_groups = prompts
    c.learner.slot_tokens, c.learner.row_tokens, c.learner.micro_batch_rows = 0, 0, 4
    c.evaluate.benchmarks = ()
    return c


def log_probs(read: Inputs, prompts: int) -> Iterator[tuple[str, list[np.ndarray]]]:
    """Of each of WAYS: |the learner's log-prob - the engine's| of the tokens of each prompt's responses."""
    c, asked = read.config, read.prompts[:prompts]
    learner = build_learner(c)
    params = learner.init(learner.read_initial()).params
    with tempfile.TemporaryDirectory() as folder:
        engine = start_engine(c, learner.model, learner.graph, read.stop_tokens, learner.mesh, Path(folder))
        engine.load(params, 0)
        answers = engine.generate(
            asked, SIZE, Sampling(1.0, c.rollout.max_response_tokens), [Draw(0, 0, PROBE)] * prompts
        )
        engine.close()
    groups = [
        Group(p, a, (Verdict(0),) * SIZE, np.zeros(SIZE, np.float32), 0)
        for p, a in zip(asked, answers, strict=True)
    ]
    batch = make_batch(groups, [X1] * prompts)
    for way, (rounding, dtype, kernel) in WAYS.items():
        with rounded_products(rounding):
            c.model.dtype = dtype
            of_dtype = build_learner(c)
            scored = Learner(c, of_dtype.model, of_dtype.mesh, kernel).score_batch(PROXIMAL, params, batch)
        yield (
            way,
            [
                np.abs(np.concatenate(of_group) - np.concatenate([r.logp for r in group.responses]))
                for of_group, group in zip(scored, groups, strict=True)
            ],
        )


def kernel_errors(H: int, spread: float) -> dict[str, float]:
    """By kernel; `spread` is the standard deviation of the scores."""
    B, T, N, K = 1, 256, 4, 2
    rng, segment_BxT = np.random.default_rng(0), jnp.ones((B, T), jnp.int32)
    q, k, v = (
        jnp.asarray(x * rng.standard_normal(s), jnp.bfloat16)
        for x, s in ((spread, (B, T, N, H)), *[(1, (B, K, T, H))] * 2)
    )
    exact_q, exact_k, exact_v = (np.asarray(x, np.float64) for x in (q, k, v))
    score = np.einsum('btkgh,bksh->bkgts', exact_q.reshape(B, T, K, N // K, H), exact_k) / np.sqrt(H)
    weight = np.exp(np.where(np.tril(np.ones((T, T), bool)), score - score.max(-1, keepdims=True), -np.inf))
    want = np.einsum('bkgts,bksh->btkgh', weight / weight.sum(-1, keepdims=True), exact_v).reshape(
        B, T, N * H
    )
    kernels = {
        'xla': attention.xla,
        **{k: functools.partial(getattr(attention, k), interpret=True) for k in ('splash', 'triton')},
    }
    errors = {
        name: np.asarray(kernel(q, k, v, segment_BxT), np.float64) - want for name, kernel in kernels.items()
    }
    return {name: float(np.sqrt(np.mean(error**2) / np.mean(want**2))) for name, error in errors.items()}


def between(figures: Sequence[float]) -> str:
    return f'{min(figures):.2g} to {max(figures):.2g}'


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--config', default='quickstart', choices=('quickstart', 'arithmetic'))
    parser.add_argument('--prompts', type=int, default=8)
    given = parser.parse_args()
    if given.prompts < 1:
        parser.error(f'--prompts={given.prompts}: give 1 or more')
    try:
        read = read_inputs(config_of(given.config, given.prompts))
    except (ValueError, OSError) as e:  # the model may not have been fetched
        raise SystemExit(f'error: {e}') from e
    print(
        f'{datetime.date.today()}, {cpu_name()}, jax {version("jax")}; configs/{given.config}.py, '
        f'{given.prompts} prompts\n'
    )
    kernels.KERNELS['q rounded'] = kernels.Kernel(_queries_rounded)
    print('| products | mean | 95 % quantile | maximum | of all |\n|---|---|---|---|---|')
    for way, apart in log_probs(read, given.prompts):
        figures = ([x.mean() for x in apart], [np.quantile(x, 0.95) for x in apart], [x.max() for x in apart])
        whole = np.concatenate(apart)
        print(
            f'| {way} | {" | ".join(map(between, figures))} | {whole.mean():.3g}, {len(whole)} tokens |',
            flush=True,
        )
    print('\n| head size, spread of scores | xla | splash | triton |\n|---|---|---|---|')
    for H in (64, 128):
        for spread in (1.0, 3.0):
            print(
                f'| {H}, {spread:g} | '
                f'{" | ".join(f"{error:.4f}" for error in kernel_errors(H, spread).values())} |'
            )


if __name__ == '__main__':
    main()
