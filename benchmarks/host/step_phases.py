"""Where a training step's time goes, and how far the update is from what XLA's matrix product reaches on the
same machine.

    JAX_NUM_CPU_DEVICES=2 python -m benchmarks.host.step_phases
    python -m benchmarks.host.step_phases --config=configs/countdown.py:grpo --steps=20 \\
        --config.model.path=DIR

Trains in a temporary directory without evaluations. Steps count once every phase has run, since the ones
before compile. Of the --steps after them it prints one table: phase, seconds, share of the step, tokens a
second. Below it stand the rate of a 2048³ matrix product in the policy's dtype and the fraction of it that
the update reaches. All else goes to stderr. A phase's largest time far above its median means that a step met
a new shape and compiled again.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags, logging
from ml_collections import ConfigDict, config_flags
from rich.table import Table

from bapo_jax.cluster.mesh import make_mesh, replicated, row_sharding
from bapo_jax.machine import terminal
from bapo_jax.run.log.metrics import read_metrics
from bapo_jax.train import build, train
from benchmarks.host.load import cpu_name

# In the order of the loop; a phase that is not due has no time in its row.
PHASES = ('weight_sync', 'gen', 'reward', 'reevaluate', 'compose', 'pack', 'old_log_prob', 'update_actor')
AFTER_THE_STEP = 'save_checkpoint'


def main(_) -> None:
    logging.set_verbosity(logging.WARNING)
    config = FLAGS.config
    warm_up = max(config.rollout.sync_every, config.replay.reevaluate_every if config.replay.use_x2 else 1)
    config.steps = warm_up + FLAGS.steps
    config.evaluate.update({'every': 0, 'benchmarks': (), 'track_prompts': 0})
    config.log.rollouts_every = 0

    with tempfile.TemporaryDirectory() as directory, contextlib.redirect_stdout(sys.stderr):
        try:
            setup = build(config, Path(directory))
        except (ValueError, FileNotFoundError) as e:
            sys.exit(f'error: {e}')
        train(setup)
        rows = [row for row in read_metrics(Path(directory)) if row['step'] > warm_up]
    if not rows:
        sys.exit(f'stopped before the {warm_up} steps that compile were over: nothing to report')
    terminal.console().print(phase_table(rows, setup.run.config))
    print_limit(rows, setup.run.config, sum(x.size for x in jax.tree.leaves(setup.learner.parameters)))


def phase_table(rows: Sequence[dict], c: ConfigDict) -> Table:
    title = (
        f'{c.method}, {len(rows)} steps of {c.learner.batch_groups} × {c.rollout.group_size} responses, '
        f'{c.model.path}'
    )
    title += f'\n{describe_device()}, jax {version("jax")}, {datetime.date.today()}'
    table = Table(
        'phase', 'in steps', 'median s', 'largest s', 'share of all steps', 'tokens/s (median)',
        title=title,
        caption_justify='left',
        caption='gen: response tokens sampled. update_actor: prompt and response tokens trained. '
        'other: the buffer, and what lies between.',
    )  # fmt: skip
    all_steps = sum(row['timing_s/step'] for row in rows)
    for row in rows:
        row['timing_s/other'] = row['timing_s/step'] - sum(
            row.get(f'timing_s/{phase}', 0.0) for phase in PHASES
        )

    def add(phase: str, tokens: Callable | None = None, **style) -> None:
        ran = [row for row in rows if f'timing_s/{phase}' in row]
        if not ran:
            return
        seconds = [row[f'timing_s/{phase}'] for row in ran]
        rate = f'{rate_of(ran, phase, tokens):,.0f}' if tokens else ''
        share = '' if phase == AFTER_THE_STEP else f'{100 * sum(seconds) / all_steps:.1f}%'
        table.add_row(
            phase, str(len(ran)), f'{np.median(seconds):.3f}', f'{max(seconds):.3f}', share, rate, **style
        )

    counts = {'gen': lambda row: sampled_tokens(row, c), 'update_actor': lambda row: trained_tokens(row, c)}
    for phase in PHASES:
        add(phase, counts.get(phase))
    add('other', end_section=True)
    add('step', end_section=True)
    add(AFTER_THE_STEP)
    return table


def print_limit(rows: Sequence[dict], c: ConfigDict, parameters: int) -> None:
    """6 · parameters · tokens counts the matrix products with weights, forward and backward, and nothing
    else.
    """
    tokens_per_s = rate_of(rows, 'update_actor', lambda row: trained_tokens(row, c))
    reached = 6 * parameters * tokens_per_s
    limit = matmul_rate(c.model.dtype)
    trained = [trained_tokens(row, c) for row in rows]
    print(
        f'limit: a 2048³ {c.model.dtype} product runs at {limit / 1e9:,.0f} GFLOP/s on the '
        f'{jax.device_count()} device(s); the update reaches {100 * reached / limit:.1f}% of it:\n6 × '
        f'{parameters:,} parameters × {tokens_per_s:,.0f} tokens/s = {reached / 1e9:,.1f} GFLOP/s, without '
        f'attention and recomputation. Tokens trained a step: {np.median(trained):,.0f}.'
    )


def rate_of(rows: Sequence[dict], phase: str, tokens: Callable[[dict], float]) -> float:
    """Tokens a second: the median over the steps."""
    return float(np.median([tokens(row) / row[f'timing_s/{phase}'] for row in rows]))


def sampled_tokens(row: dict, c: ConfigDict) -> float:
    """Of the fresh responses of a step."""
    return row['response_length/mean'] * c.learner.batch_groups * c.rollout.group_size


def trained_tokens(row: dict, c: ConfigDict) -> float:
    """Prompts and responses, as often as the update saw them."""
    return row['perf/throughput'] * row['timing_s/step'] * c.learner.passes_per_batch


def matmul_rate(dtype: str, size: int = 2048, calls: int = 5, trials: int = 3) -> float:
    """FLOP/s of all devices together, one product each: the best of `trials`. Calls are queued, so starting
    them costs nothing.
    """
    mesh = make_mesh(-1, 1, 1)
    left = jax.device_put(jnp.ones((jax.device_count() * size, size), dtype), row_sharding(mesh))
    right = jax.device_put(jnp.ones((size, size), dtype), replicated(mesh))
    product = jax.jit(jnp.matmul)
    product(left, right).block_until_ready()
    seconds = []
    for _ in range(trials):
        started = time.perf_counter()
        jax.block_until_ready([product(left, right) for _ in range(calls)])
        seconds.append(time.perf_counter() - started)
    return 2 * jax.device_count() * size**3 * calls / min(seconds)


def describe_device() -> str:
    device = jax.devices()[0]
    return (
        f'{cpu_name()}, {os.cpu_count()} cores'
        if device.platform == 'cpu'
        else f'{jax.device_count()} × {device.device_kind}'
    )


if __name__ == '__main__':
    FLAGS = flags.FLAGS
    flags.DEFINE_integer(
        'steps', 10, 'Steps measured; multiples of v and m count every phase fairly.', lower_bound=1
    )
    config_flags.DEFINE_config_file(
        'config', 'configs/quickstart.py', 'FILE or FILE:METHOD.', lock_config=True
    )
    app.run(main)
