"""One attention kernel on a GPU: whether it computes the equations there, and its speed.

    python benchmarks/gpu_kernels.py triton          # ours; --help lists the others
    # compiled for a card that is not there
    PYTHONPATH=.:.gpu-compiler python benchmarks/gpu_kernels.py triton --absent=H100
    # small shapes in Pallas's interpreter, on a CPU
    python benchmarks/gpu_kernels.py triton --tiny --any-device

Prints one JSON object: the equation tests, each with its largest error over the largest value, and FLOP/s by
useful work for every shape. Useful are 4 FLOP a head number and visible pair of tokens forward, and 3.5 times
as many forward and backward. So padding, other segments' tokens and repeated heads count nothing. A kernel
that fails a test or cannot run is wrong, however fast.

Every candidate takes (q_BxTxNxH, k_BxKxTxH, v_BxKxTxH, segment_BxT) and returns [B, T, N·H], as in
bapo_jax/models/attention.py.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout, installed or not

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from bapo_jax.cluster.mesh import per_device
from bapo_jax.models import attention, gpu_attention
from bapo_jax.models.gpu_tiles import KernelTile, Tiles
from benchmarks.timing import device, matrix_rate, require_gpu, seconds_a_call

TOLERANCE = 2e-2  # of the largest value, in bfloat16, which keeps 8 bits


class Candidate(NamedTuple):
    """A kernel to compare; one that packs keeps the segments of a row apart, the others are given one a row."""

    kernel: Callable[..., jax.Array]
    packs: bool = True


def ours(forward: tuple[int, ...], dq: tuple[int, ...], dkv: tuple[int, ...]) -> Candidate:
    """Our kernel with other tiles (queries, keys, warps, stages) than the table's."""
    return Candidate(
        functools.partial(
            gpu_attention.attention, tiles=Tiles(KernelTile(*forward), KernelTile(*dq), KernelTile(*dkv))
        )
    )


def pallas_mha(q_BxTxNxH, k_BxKxTxH, v_BxKxTxH, segment_BxT, *, interpret: bool = False):
    """The flash attention that comes with JAX: a key head is repeated for its query heads, and every earlier
    block is read.
    """
    from jax.experimental.pallas.ops.gpu import attention as gpu

    B, T, N, H = q_BxTxNxH.shape
    k_BxTxNxH, v_BxTxNxH = _repeated(N, k_BxKxTxH, v_BxKxTxH)
    forward, backward = (
        attention.largest_divisor(T, (128, 64, 32, 16)),
        attention.largest_divisor(T, (32, 16)),
    )
    sizes = gpu.BlockSizes(forward, forward, backward, backward, backward, backward)
    out_BxTxNxH = gpu.mha(
        q_BxTxNxH,
        k_BxTxNxH,
        v_BxTxNxH,
        segment_BxT,
        sm_scale=H**-0.5,
        causal=True,
        block_sizes=sizes,
        interpret=interpret,
    )
    return out_BxTxNxH.reshape(B, T, N * H)


def cudnn_public(q_BxTxNxH, k_BxKxTxH, v_BxKxTxH, segment_BxT):
    """JAX's public call of cuDNN: one segment a row, with its length."""
    B, T, N, H = q_BxTxNxH.shape
    length_B = jnp.sum(segment_BxT > 0, axis=1, dtype=jnp.int32)
    out_BxTxNxH = jax.nn.dot_product_attention(
        q_BxTxNxH, k_BxKxTxH.swapaxes(1, 2), v_BxKxTxH.swapaxes(1, 2), is_causal=True, implementation='cudnn',
        query_seq_lengths=length_B, key_value_seq_lengths=length_B,
    )  # fmt: skip
    return out_BxTxNxH.reshape(B, T, N * H)


def tokamax(q_BxTxNxH, k_BxKxTxH, v_BxKxTxH, segment_BxT, *, implementation: str = 'mosaic_gpu'):
    """tokamax's kernel with the first key of each query in its mask, which its public function does not take."""
    from tokamax._src.ops.attention import api, base

    B, T, N, H = q_BxTxNxH.shape
    begins_BxT = jnp.pad(segment_BxT[:, 1:] != segment_BxT[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    start_BxT = jax.lax.cummax(jnp.where(begins_BxT, jnp.arange(T, dtype=jnp.int32)[None], 0), axis=1)
    out_BxTxNxH = api.IMPLEMENTATIONS[implementation](
        q_BxTxNxH,
        k_BxKxTxH.swapaxes(1, 2),
        v_BxKxTxH.swapaxes(1, 2),
        mask=base.Mask(k_start=start_BxT[:, None], is_causal=True),
    )
    return out_BxTxNxH.reshape(B, T, N * H)


def _repeated(N: int, *keys_BxKxTxH) -> list[jax.Array]:
    """Each [B, T, N, H]: a key head for every query head."""
    return [jnp.repeat(x.swapaxes(1, 2), N // x.shape[1], axis=2) for x in keys_BxKxTxH]


# In the order in which they are measured; those that come last are settings of ours to try.
CANDIDATES = {
    'triton': Candidate(gpu_attention.attention),
    'pallas mha': Candidate(pallas_mha),
    'cudnn': Candidate(attention.cudnn),
    'cudnn public': Candidate(cudnn_public, packs=False),
    'tokamax': Candidate(tokamax),
    'xla': Candidate(attention.xla),
    'triton wide': ours((128, 128, 8, 2), (128, 128, 8, 2), (64, 128, 8, 2)),
    'triton narrow': ours((64, 64, 4, 3), (64, 64, 4, 3), (32, 64, 4, 3)),
    'triton deep': ours((128, 64, 8, 4), (128, 64, 8, 3), (32, 128, 8, 4)),
}


# ---- the equations


def dense(q_BxTxNxH, k_BxKxTxH, v_BxKxTxH, segment_BxT):
    """The formula in float32 at full precision, all pairs written out; padding sees itself alone."""
    (B, T, N, H), exact = q_BxTxNxH.shape, functools.partial(jnp.einsum, precision='highest')
    q_BxTxNxH, k_BxTxNxH, v_BxTxNxH = (
        x.astype(jnp.float32) for x in (q_BxTxNxH, *_repeated(N, k_BxKxTxH, v_BxKxTxH))
    )
    real_BxTxT = (segment_BxT > 0)[:, None] & attention.segment_mask(segment_BxT)
    seen_BxTxS = real_BxTxT | jnp.eye(T, dtype=bool)[None]
    score_BxNxTxS = jnp.where(
        seen_BxTxS[:, None], exact('btnh,bsnh->bnts', q_BxTxNxH, k_BxTxNxH) * H**-0.5, -jnp.inf
    )
    return exact('bnts,bsnh->btnh', jax.nn.softmax(score_BxNxTxS, axis=-1), v_BxTxNxH).reshape(B, T, N * H)


def inputs(lengths: list[list[int]], T: int, N: int, K: int, H: int) -> tuple[jax.Array, ...]:
    """Random q, k, v and cotangent in bfloat16 and, fourth, the segments of rows of these lengths, padded to
    T.
    """
    segment_BxT = np.stack(
        [np.repeat(np.arange(1, len(row) + 2), [*row, T - sum(row)]) % (len(row) + 1) for row in lengths]
    )
    B, rng = len(lengths), np.random.default_rng(0)
    shapes = (B, T, N, H), (B, K, T, H), (B, K, T, H), (B, T, N * H)
    q, k, v, do = (jnp.asarray(rng.standard_normal(shape, np.float32), jnp.bfloat16) for shape in shapes)
    segment = jnp.asarray(segment_BxT, jnp.int32)
    return q, k, v, segment, jnp.where(segment[..., None] > 0, do, jnp.zeros((), do.dtype))


@functools.partial(jax.jit, static_argnums=0)
def value_and_gradients(kernel, q, k, v, segment, do):
    """(out, dq, dk, dv), out 0 at the padding."""

    def real_tokens(q, k, v):
        out = kernel(q, k, v, segment)
        return jnp.where(segment[..., None] > 0, out, jnp.zeros((), out.dtype))

    out, pullback = jax.vjp(real_tokens, q, k, v)
    return out, *pullback(do.astype(out.dtype))


def equation_tests(
    candidate: Candidate, *, T: int = 512, heads=((12, 2), (16, 8)), H: int = 128
) -> dict[str, Any]:
    """The largest error over the largest value, by test; a message where a test does not run. `ok` says
    whether all pass.
    """
    rows = {'padded tails': [[T - 62], [T // 2 - 3]], 'whole rows': [[T], [T]]}
    if candidate.packs:
        rows['packed'] = [[T // 2 - 9, T // 4 + 5, T // 8], [3, T - 3]]
    tests: dict[str, Callable[[], float]] = {
        f'{name}, {N}/{K} heads': functools.partial(
            _against_dense, candidate.kernel, inputs(lengths, T, N, K, H)
        )
        for N, K in heads
        for name, lengths in rows.items()
    }
    if candidate.packs:
        tests['packed = alone'] = functools.partial(_packed_against_alone, candidate.kernel, T, *heads[0], H)
    errors: dict[str, Any] = {}
    for name, test in tests.items():
        try:
            errors[name] = test()
        except Exception as error:  # whatever a foreign kernel raises is its result
            errors[name] = f'{type(error).__name__}: {error}'[:300]
    return {'ok': all(isinstance(e, float) and e <= TOLERANCE for e in errors.values()), **errors}


def _against_dense(kernel, arrays: tuple[jax.Array, ...]) -> float:
    return _largest_error(value_and_gradients(kernel, *arrays), value_and_gradients(dense, *arrays))


def _packed_against_alone(kernel, T: int, N: int, K: int, H: int) -> float:
    """Two segments of a row against the same two in padded rows of their own."""
    half = T // 2 - 16
    q, k, v, segment, do = inputs([[half, T // 2]], T, N, K, H)

    def rows_of_two(x, axis: int):
        x = jnp.moveaxis(x, axis, 1)
        first, second = x[:, :half], x[:, half : half + T // 2]
        alone = [
            jnp.pad(part, [(0, 0), (0, T - part.shape[1]), *[(0, 0)] * (x.ndim - 2)])
            for part in (first, second)
        ]
        return jnp.moveaxis(jnp.concatenate(alone), 1, axis)

    axes = (1, 2, 2, 1, 1)
    alone = value_and_gradients(
        kernel, *(rows_of_two(x, axis) for x, axis in zip((q, k, v, segment, do), axes, strict=True))
    )
    packed = value_and_gradients(kernel, q, k, v, segment, do)
    return _largest_error([rows_of_two(x, axis) for x, axis in zip(packed, (1, 1, 2, 2), strict=True)], alone)


def _largest_error(got, want) -> float:
    pairs = [(np.asarray(x, np.float32), np.asarray(y, np.float32)) for x, y in zip(got, want, strict=True)]
    if not all(np.isfinite(x).all() for x, _ in pairs):
        raise FloatingPointError('not finite')
    return float(max(np.abs(x - y).max() / np.abs(y).max() for x, y in pairs))


# ---- the speed


def speeds(
    candidate: Candidate, *, B: int = 4, tokens=(8192, 10_240), heads=((12, 2), (16, 8)), H: int = 128
) -> Iterator[dict]:
    """A row a shape: useful FLOP/s forward, and forward and backward."""
    forward = jax.jit(candidate.kernel)
    for T in tokens:
        for N, K in heads:
            for lengths in ([T], [T // 2, T // 4 + T // 16, T // 8 + T // 16])[: 2 if candidate.packs else 1]:
                q, k, v, segment, do = inputs([lengths] * B, T, N, K, H)
                useful = 4 * N * H * B * sum(n * (n + 1) / 2 for n in lengths)
                row = {'tokens': T, 'rows': B, 'heads': f'{N}/{K}', 'segments': len(lengths)}
                try:
                    row['forward_flops_per_s'] = useful / seconds_a_call(forward, q, k, v, segment)
                    both = seconds_a_call(value_and_gradients, candidate.kernel, q, k, v, segment, do)
                    row['both_flops_per_s'] = 3.5 * useful / both
                except Exception as error:  # as above
                    row['error'] = f'{type(error).__name__}: {error}'[:300]
                yield row


def planned(
    candidate: Candidate, card: str, *, B: int = 8, T: int = 10_240, N: int = 12, K: int = 2, H: int = 128
) -> dict[str, Any]:
    """What XLA's compiler makes of forward and backward for a card that is not there: calls of kernels, and
    temporary GB.

    cuDNN makes its own program, and the room that it needs, on a card: neither is in it.
    """
    from jax._src.cudnn import fused_attention_stablehlo as fused

    from bapo_jax.config import default_config
    from bapo_jax.dry_run.targets import find_target, for_absent_devices

    for_absent_devices()
    # JAX asks the card what it can do.
    fused.check_cudnn_version, fused.check_compute_capability = lambda: 92_800, lambda least: True
    fused.is_cuda_compute_capability_equal = lambda capability: False
    mesh, whole = find_target(f'1x{card}', default_config()).mesh, PartitionSpec()
    shapes = {(B, T, N, H): 'bfloat16', (B, K, T, H): 'bfloat16', (B, T): 'int32'}
    q, k, segment = (
        jax.ShapeDtypeStruct(s, dtype, sharding=NamedSharding(mesh, whole)) for s, dtype in shapes.items()
    )
    attend = per_device(candidate.kernel, mesh, (whole,) * 4, whole)
    gradients = jax.grad(
        lambda q, k, v, segment: attend(q, k, v, segment).astype(jnp.float32).sum(), (0, 1, 2)
    )
    compiled = jax.jit(gradients).lower(q, k, k, segment).compile()
    calls = re.findall(r'custom_call_target="([^"]*)"', compiled.as_text())
    return {'card': card, 'calls': calls, 'temporary_gb': compiled.memory_analysis().temp_size_in_bytes / 1e9}


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('candidate', choices=CANDIDATES)
    parser.add_argument(
        '--tiny',
        action='store_true',
        help='small shapes; Pallas kernels in the interpreter where there is no GPU',
    )
    parser.add_argument('--any-device', action='store_true', help='run on a CPU too')
    parser.add_argument(
        '--absent', default='', help='compile for such a card of bapo_jax/dry_run/targets.py, and run nothing'
    )
    asked = parser.parse_args(arguments)
    candidate = CANDIDATES[asked.candidate]
    if asked.absent:
        # Imported here, since it wants more than a card's own measurements do.
        from benchmarks.compiled import absent

        try:
            absent.card(asked.absent)
        except argparse.ArgumentTypeError as e:
            parser.error(f'--absent: {e}')
        absent.require_compiler('gpu')
        print(
            json.dumps(
                {'candidate': asked.candidate, 'jax': jax.__version__, **planned(candidate, asked.absent)}
            )
        )
        return
    require_gpu(asked.any_device)
    if asked.tiny and jax.devices()[0].platform != 'gpu' and asked.candidate.startswith(('triton', 'pallas')):
        candidate = candidate._replace(kernel=functools.partial(candidate.kernel, interpret=True))
    shapes: dict[str, Any] = {'heads': ((4, 2),), 'H': 16} if asked.tiny else {}
    tests = equation_tests(candidate, **shapes, **({'T': 128} if asked.tiny else {}))
    rows = list(speeds(candidate, **shapes, **({'B': 1, 'tokens': (128,)} if asked.tiny else {})))
    rate = matrix_rate('bfloat16', 256 if asked.tiny else 8192)
    print(
        json.dumps(
            {
                'candidate': asked.candidate,
                **device(),
                'equations': tests,
                'speeds': rows,
                'matrix_flops_per_s': rate,
            }
        )
    )


if __name__ == '__main__':
    main(sys.argv[1:])
