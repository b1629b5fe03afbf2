"""How the cost of an update grows, one axis at a time: a table and a plot.

    python -m benchmarks.compiled.scaling    # two cores: response length, vocabulary, groups
    # the compiled program on 1 to 32 chips, modelled
    PYTHONPATH=.:.tpu-compiler python -m benchmarks.compiled.scaling --axes=chips
    python -m benchmarks.compiled.scaling --axes= --plot=docs/scaling.svg            # draws what --out holds

A point on cores is `Learner.update` on GRPO groups of peers_data.py, host work included: 4 layers of width
128, else as in `AXES`. "without attention" is the same update with a kernel that passes the queries on. A
point on chips is benchmarks/compiled/step.py's model of the 1.5B step: a row of 10,240 tokens a chip, so that
as many chips do as many times the work; seconds of a micro-batch.

The exponent is log(seconds ratio) / log(axis ratio) between a point and the one before: 1 is linear, 0 is
free. Points are added to
--out, a JSON file, in place of the older ones of the same axis.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault('JAX_PLATFORMS', 'cpu')

import jax
import numpy as np
from benchmarks.compiled.absent import require_compiler
from absl import app, flags
from flax import nnx
from benchmarks.host.load import cpu_name
from ml_collections import ConfigDict
from benchmarks.peers.data import W, Workload, draw, timed
from benchmarks.peers.ours import DEVICES, SHARED, groups_of, responses_of

from bapo_jax import config as config_lib
from bapo_jax.cluster.mesh import make_mesh
from bapo_jax.groups import X1, Prompt, make_batch
from bapo_jax.learner.learner import Learner
from bapo_jax.models import kernels
from bapo_jax.models.decoder import Decoder, ModelConfig
from bapo_jax.models.rotary import Rotation

ONE = dataclasses.replace(W, prompts=1, optimizer_steps=1)
# axis: its points, each a workload. A mini-batch has 8 groups at most, so that more groups are more optimizer
# steps.
AXES: dict[str, dict[int, Workload]] = {
    'response tokens': {
        n: dataclasses.replace(ONE, response_tokens=n) for n in (512, 1024, 2048, 4096, 8192)
    },
    'vocabulary': {
        n: dataclasses.replace(ONE, response_tokens=256, vocabulary=n)
        for n in (32_768, 65_536, 98_304, 151_936)
    },
    'groups': {n: dataclasses.replace(W, prompts=n, optimizer_steps=n // 8) for n in (8, 16, 32, 64)},
}
CHIPS = {1: 'v5p:1x1x1', 4: 'v5p:2x2x1', 8: 'v5p:2x2x2', 16: 'v5p:2x2x4', 32: 'v5p:2x4x4'}
ROWS = 2 * DEVICES  # of a micro-batch, each a sequence


def main(_) -> None:
    if unknown := [axis for axis in FLAGS.axes if axis not in (*AXES, 'chips', '')]:
        sys.exit(f'error: --axes: no axis {unknown[0]!r}; there are {", ".join(AXES)}, chips')
    if 'chips' in FLAGS.axes:
        require_compiler('tpu')
    points = json.loads(Path(FLAGS.out).read_text()) if Path(FLAGS.out).exists() else {}
    for axis in filter(None, FLAGS.axes):
        points[axis] = list(on_chips() if axis == 'chips' else on_cores(AXES[axis]))
        Path(FLAGS.out).parent.mkdir(parents=True, exist_ok=True)
        Path(FLAGS.out).write_text(json.dumps(points, indent=1) + '\n')
        print_table(axis, points[axis])
    if FLAGS.plot:
        plot(points, Path(FLAGS.plot))


def on_cores(workloads: dict[int, Workload]):
    """Yields a dict for each point of an axis: seconds of an update, with and without attention, and
    temporary bytes.
    """
    jax.config.update('jax_num_cpu_devices', DEVICES)
    for at, w in workloads.items():
        seconds, learner = measure(w)
        temporary = learner.compile_update().memory_analysis().temp_size_in_bytes
        with mock.patch.object(kernels, 'packed', lambda *_: pass_on):
            without, _ = measure(w)
        print(f'{at}: {seconds:.3g} s, {without:.3g} s without attention', file=sys.stderr, flush=True)
        yield {
            'at': at,
            's': seconds,
            'without attention s': without,
            'temporary GB': temporary / 1e9,
            **stamp(),
        }


def pass_on(q_BxTxNxH, k_BxKxTxH, v_BxKxTxH, segment_BxT):
    """In place of attention: the queries, and something of keys and values, so that their gradients are
    computed.
    """
    B, T, N, H = q_BxTxNxH.shape
    rest_BxTxKxH = (k_BxKxTxH + v_BxKxTxH).swapaxes(1, 2)
    return (q_BxTxNxH + jax.numpy.repeat(rest_BxTxKxH, N // rest_BxTxKxH.shape[2], axis=2)).reshape(
        B, T, N * H
    )


def measure(w: Workload) -> tuple[float, Learner]:
    """Median seconds of an update, after one that does not count, and who did it."""
    config, data = make_config(w), draw(w)
    model = ModelConfig(
        'qwen2',
        w.vocabulary,
        w.hidden,
        w.mlp,
        w.layers,
        w.heads,
        w.kv_heads,
        w.head_dim,
        Rotation(1e4),
        1e-6,
        tie_embeddings=True,
    )
    learner = Learner(config, model, make_mesh(DEVICES, 1, 1), 'xla')
    params = nnx.to_pure_dict(nnx.state(Decoder(model, rngs=nnx.Rngs(0)), nnx.Param))
    state = learner.init(jax.device_put(params, jax.tree.map(lambda x: x.sharding, learner.parameters)))
    prompts = [Prompt(i, 'countdown', tokens, {}) for i, tokens in enumerate(data.prompts)]
    groups = groups_of(
        prompts, responses_of(data, data.behaviour - np.float32(math.log(w.vocabulary))), data.rewards
    )
    batch, seconds = make_batch(groups, [X1] * len(groups)), []
    for _ in range(1 + FLAGS.repeats):
        seconds_of_update, (state, _) = timed(
            lambda: jax.block_until_ready(learner.update(state, batch, np.random.default_rng(0)))
        )
        seconds.append(seconds_of_update)
    return float(np.median(seconds[1:])), learner


def make_config(w: Workload) -> ConfigDict:
    config = config_lib.default_config()
    config.update_from_flattened_dict({
        **SHARED, 'model.path': 'shapes alone', 'rollout.max_prompt_tokens': w.prompt_tokens,
        'rollout.max_response_tokens': w.response_tokens,
        'rollout.group_size': w.group_size, 'learner.batch_groups': w.prompts,
        'learner.mini_batch_groups': w.prompts // w.optimizer_steps,
        'learner.row_tokens': w.prompt_tokens + w.response_tokens, 'learner.micro_batch_rows': ROWS,
    })  # fmt: skip
    return config_lib.resolve(config)


def on_chips():
    """Yields a dict for each number of chips. A TPU slice's compiler and no TPU is needed."""
    # Only this axis needs the TPU compiler.
    from compiled import WAITING, step_of

    from configs.math import get_config

    for chips, topology in CHIPS.items():
        config = get_config()
        config.mesh.data, config.mesh.fsdp, config.mesh.tensor = 1, -1, 1
        step = step_of('1.5B', topology, config, None, '')
        yield {
            'at': chips,
            's': step.micro_batch.total(),
            'waiting s': step.micro_batch[WAITING],
            'moved GB': step.moved_bytes(in_loop=True) / 1e9,
            'peak GB': step.peak_bytes / 1e9,
            'utilisation': step.utilisation,
            'date': str(datetime.date.today()),
            'jax': jax.__version__,
        }


def stamp() -> dict[str, Any]:
    return {
        'date': str(datetime.date.today()),
        'jax': jax.__version__,
        'cpu': cpu_name(),
        'load': round(os.getloadavg()[0], 1),
    }


def exponents(points: list[dict[str, Any]], column: str) -> list[float | None]:
    """Of each point against the one before it."""
    return [None] + [
        math.log(b[column] / a[column]) / math.log(b['at'] / a['at'])
        for a, b in zip(points, points[1:], strict=False)
    ]


def print_table(axis: str, points: list[dict[str, Any]]) -> None:
    """Markdown."""
    columns = [name for name, value in points[0].items() if isinstance(value, float) and name != 'load']
    grows = [name for name in columns if name in ('s', 'without attention s')]
    header = [axis, *(c for name in columns for c in ((name, 'exponent') if name in grows else (name,)))]
    print(f'\n| {" | ".join(header)} |\n|{"---|" * len(header)}')
    powers = {name: exponents(points, name) for name in grows}
    for i, point in enumerate(points):
        cells = [f'{point["at"]:,}']
        for name in columns:
            cells.append(f'{point[name]:.3g}')
            if name in grows:
                cells.append('' if powers[name][i] is None else f'{powers[name][i]:.2f}')
        print(f'| {" | ".join(cells)} |')
    told = ', '.join(
        f'{name} {points[-1][name]}' for name in ('cpu', 'jax', 'date', 'load') if name in points[-1]
    )
    print(f'\n{told}', flush=True)


def plot(points: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """One panel an axis. On chips, where rows grow with them, level is ideal; elsewhere scales are
    logarithmic.
    """
    import matplotlib

    matplotlib.use('Agg')
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(
        1, len(points), figsize=(3.6 * len(points), 3.2), constrained_layout=True, squeeze=False
    )
    for panel, (axis, of_axis) in zip(panels[0], points.items(), strict=True):
        at, seconds = [p['at'] for p in of_axis], [p['s'] for p in of_axis]
        panel.plot(at, seconds, 'o-', label='an update' if axis != 'chips' else 'a micro-batch, modelled')
        if axis != 'chips':
            panel.plot(at, [p['without attention s'] for p in of_axis], 's-', label='without attention')
        linear = [seconds[0] * (1 if axis == 'chips' else n / at[0]) for n in at]
        panel.plot(at, linear, 'k:', label='linear' if axis != 'chips' else 'as one chip')
        panel.set(xscale='log', xlabel=axis, xticks=at, xticklabels=[f'{n:,}' for n in at])
        if axis == 'chips':
            panel.set(ylim=(0, 2 * max(seconds)))
        else:
            panel.set(yscale='log', yticks=seconds, yticklabels=[f'{s:.2g}' for s in seconds])
        panel.minorticks_off()
        panel.legend(fontsize=8, loc='upper left')
    panels[0][0].set_ylabel('seconds')
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)


if __name__ == '__main__':
    FLAGS = flags.FLAGS
    flags.DEFINE_list('axes', list(AXES), f'Of {", ".join(AXES)}, chips.')
    flags.DEFINE_integer('repeats', 3, 'Updates timed at a point.', lower_bound=1)
    flags.DEFINE_string('out', 'benchmarks/results/scaling.json', 'Where points are kept.')
    flags.DEFINE_string('plot', '', 'Draws all points of --out into this file.')
    app.run(main)
