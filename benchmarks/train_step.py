"""Tokens a second of the optimizer step on one device: random parameters, ragged responses packed into rows,
no files.

    python benchmarks/train_step.py --model=qwen2.5-1.5b --tokens=8192 --rows=4
    python benchmarks/train_step.py --model=tiny --tokens=256 --any-device        # on a CPU, as a rehearsal

Prints one JSON object. `utilisation` is useful work over the rate of a matrix product that is measured in the
same run. Useful work is 6 FLOP a matrix parameter and token that is no padding, and 12 FLOP a layer, head
number and visible pair of tokens: nothing that is recomputed or masked counts. Needs jax, flax and optax
alone.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout, installed or not

import jax
import numpy as np
from flax import nnx

from bapo_jax.cluster.devices import capability
from bapo_jax.cluster.mesh import make_mesh, row_sharding, spread, with_sharding
from bapo_jax.learner.head import Tile
from bapo_jax.learner.logprobs import Compute
from bapo_jax.learner.mini_batch import Rows, blank_rows
from bapo_jax.learner.objective import numbers_of, objective_of
from bapo_jax.learner.optimizer import clipped_adamw
from bapo_jax.learner.policy import policy_loss
from bapo_jax.learner.update import Program, initial_state, state_shapes, update
from bapo_jax.models import kernels
from bapo_jax.models.decoder import Decoder, ModelConfig, abstract_params
from bapo_jax.models.remat import REMAT
from bapo_jax.models.rotary import Rotation
from bapo_jax.models.sharding import parameter_sharding
from benchmarks.timing import device, matrix_rate, require_gpu

_QWEN2, _QWEN3 = functools.partial(ModelConfig, 'qwen2'), functools.partial(ModelConfig, 'qwen3')
# vocabulary, width, MLP width, layers, query heads, key heads, head size, rope theta, eps, tied embeddings
MODELS = {
    'tiny': _QWEN2(512, 64, 128, 2, 4, 2, 16, Rotation(1e4), 1e-6, True),
    'qwen2.5-1.5b': _QWEN2(151_936, 1536, 8960, 28, 12, 2, 128, Rotation(1e6), 1e-6, True, dtype='bfloat16'),
    'qwen3-0.6b': _QWEN3(151_936, 1024, 3072, 28, 16, 8, 128, Rotation(1e6), 1e-6, True, dtype='bfloat16'),
}
# The learner's part of the default config that the step is compiled for: BAPO, eq. 3.
LEARNER = SimpleNamespace(
    anchor='behaviour', clip_centre='one', importance_cap=2.0, ratio_level='token', surrogate='clip', clip_low=0.2, clip_high=0.2,
    dual_clip=3.0, kl_target='behaviour', kl_coef=0.001, entropy_coef=0.001, switch_step=0, grad_clip=1.0, weight_decay=0.01,
    adam=SimpleNamespace(b1=0.9, b2=0.999, eps=1e-8, first_moment_dtype='float32'),
    traces=SimpleNamespace(loss='none', gamma=0.1), trust=SimpleNamespace(kind='fixed'), importance_rule='truncate',
    balance_coef=0.0,
)  # fmt: skip


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('--model', choices=MODELS, default='tiny')
    parser.add_argument('--tokens', type=int, default=256, help='in a row')
    parser.add_argument('--rows', type=int, default=4, help='in a micro-batch')
    parser.add_argument('--micro_batches', type=int, default=2, help='in an optimizer step')
    parser.add_argument('--attention', choices=('auto', *kernels.KERNELS), default='auto')
    parser.add_argument('--remat', choices=REMAT, default='full', help='what the backward pass recomputes')
    parser.add_argument('--head_tokens', type=int, default=Tile().tokens, help='of a tile of logits')
    parser.add_argument('--steps', type=int, default=5)
    parser.add_argument('--any-device', action='store_true', help='run on a CPU too')
    asked = parser.parse_args(arguments)
    for flag in ('tokens', 'rows', 'micro_batches', 'head_tokens', 'steps'):
        if getattr(asked, flag) < 1:
            parser.error(f'--{flag}={getattr(asked, flag)}: give 1 or more')
    require_gpu(asked.any_device)
    try:
        choose_kernel(asked, MODELS[asked.model])
    except ValueError as e:
        parser.error(f'--attention: {e}')
    print(json.dumps(measure(asked)))


def choose_kernel(asked: argparse.Namespace, model: ModelConfig) -> str:
    """The attention kernel for the first device. Raises as kernels.kernel_for."""
    mesh = make_mesh(1, 1, 1, jax.devices()[:1])
    return kernels.kernel_for(
        asked.attention, mesh.devices.flat[0].platform, model, row_tokens=asked.tokens, rows=asked.rows, tensor=1,
        capability=capability(mesh),
    )  # fmt: skip


def measure(asked: argparse.Namespace) -> dict[str, Any]:
    """What `main` prints."""
    model = MODELS[asked.model]
    on_gpu = jax.devices()[0].platform == 'gpu'
    rows = ragged_rows(
        np.random.default_rng(0), (asked.micro_batches, asked.rows, asked.tokens), model.vocab_size
    )
    step, state, rows_on_device, compile_s = compiled_step(asked, model, rows)
    seconds, norm = [], np.nan
    for _ in range(asked.steps + 1):  # the first one warms up
        started = time.perf_counter()
        state, metrics = step(state, rows_on_device)
        norm = float(metrics.grad_norm)  # waits
        seconds.append(time.perf_counter() - started)
    if not np.isfinite(norm):
        raise FloatingPointError(f'the gradient is not finite after {asked.steps} steps: a kernel is wrong')
    del state
    median, rate = float(np.median(seconds[1:])), matrix_rate(model.dtype, 8192 if on_gpu else 512)
    tokens = int((rows.sequences.segment > 0).sum())
    return {
        **vars(asked),
        **device(),
        'tokens_a_step': tokens,
        'filled': tokens / rows.sequences.segment.size,
        'seconds': median,
        'slowest_s': max(seconds[1:]),
        'tokens_per_s': tokens / median,
        'model_flops_per_s': useful_flops(model, rows) / median,
        'matrix_flops_per_s': rate,
        'utilisation': useful_flops(model, rows) / median / rate,
        'peak_bytes': (jax.devices()[0].memory_stats() or {}).get('peak_bytes_in_use'),  # a CPU does not say
        'compile_s': compile_s,
        'grad_norm': norm,
    }


def compiled_step(asked: argparse.Namespace, model: ModelConfig, rows: Rows):
    """(step, state, rows on the device, seconds to compile), with step(state, rows) -> (state, metrics).

    What knows how the learner is put together stands here.
    """
    mesh = make_mesh(1, 1, 1, jax.devices()[:1])
    kernel = choose_kernel(asked, model)
    graph, shapes = abstract_params(model)
    optimizer, objective = clipped_adamw(1e-6, LEARNER), objective_of(LEARNER)
    compute = Compute(kernels.packed(kernel), asked.remat, tile=Tile(asked.head_tokens))
    program = Program(graph, policy_loss(objective, compute), optimizer, mesh, compute)
    shapes = with_sharding(shapes, parameter_sharding(mesh, shapes))
    numbers, count = numbers_of(LEARNER, 1.0, 1), np.int32(asked.micro_batches)
    rows = spread(rows, row_sharding(mesh, 1))

    started = time.perf_counter()
    traced = jax.jit(functools.partial(update, program=program), donate_argnames='state')
    compiled = traced.lower(state_shapes(optimizer, shapes, mesh), rows, count, numbers).compile()
    compile_s = time.perf_counter() - started

    @functools.partial(jax.jit, out_shardings=jax.tree.map(lambda x: x.sharding, shapes))
    def random_params():
        return nnx.to_pure_dict(nnx.state(Decoder(model, rngs=nnx.Rngs(0)), nnx.Param))

    state = initial_state(optimizer, random_params(), state_shapes(optimizer, shapes, mesh))
    return lambda state, rows: compiled(state, rows, count, numbers), state, rows, compile_s


def ragged_rows(rng: np.random.Generator, shape: tuple[int, int, int], vocabulary: int) -> Rows:
    """Rows [M, R, T] of prompts with responses, greedily packed: each goes into the first row that has room.

    Lengths are spread as those of a reasoning model are: about 3/8 of a row at the mean, a row at most.
    Sequences are drawn until twenty in succession find no room.
    """
    T, rows = shape[2], blank_rows(shape)
    flat = jax.tree.map(lambda x: x.reshape(-1, T), rows)  # views of the same memory
    used, count, refused = np.zeros(len(flat.origin), int), np.zeros(len(flat.origin), int), 0
    while refused < 20:
        prompt = int(rng.integers(T // 64, T // 16)) + 1
        n = prompt + min(int(rng.lognormal(np.log(T / 3.5), 0.7)) + 1, T - prompt)
        row = int(np.argmax(T - used >= n))
        if T - used[row] < n:
            refused += 1
            continue
        at, of_response = slice(used[row], used[row] + n), slice(used[row] + prompt, used[row] + n)
        used[row], count[row], refused = used[row] + n, count[row] + 1, 0
        flat.sequences.tokens[row, at] = rng.integers(0, vocabulary, n)
        flat.sequences.segment[row, at] = count[row]
        flat.sequences.position[row, at] = np.arange(n)
        flat.sequences.response[row, of_response] = count[row]
        flat.origin[row, of_response] = 1
        flat.behaviour[row, of_response] = -np.log(vocabulary)
        flat.advantage[row, of_response] = rng.standard_normal()
    rows.weight['rl'][...] = (rows.origin > 0) / max(1, (rows.origin > 0).sum())
    return rows


def useful_flops(model: ModelConfig, rows: Rows) -> float:
    """Of one step, forward and backward: the products with weights of tokens that are no padding, and
    attention's visible pairs.
    """
    matrices = sum(x.size for name, x in _flat(abstract_params(model)[1]) if name.endswith('kernel'))
    if not model.untied_head:
        matrices += model.vocab_size * model.hidden_size
    segment = rows.sequences.segment
    position = rows.sequences.position[segment > 0].astype(np.float64)
    pairs = (position + 1).sum()  # a token sees itself and those before it
    return 6.0 * matrices * len(position) + 12.0 * model.num_layers * model.num_heads * model.head_dim * pairs


def _flat(tree: Any) -> list[tuple[str, Any]]:
    return [
        ('/'.join(key.key for key in path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]


if __name__ == '__main__':
    main(sys.argv[1:])
