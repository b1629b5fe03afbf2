"""What the benchmarks of an accelerator measure with: seconds a call, and the rate of a matrix product on the
same device.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def seconds_a_call(function: Callable[..., Any], *arguments: Any, calls: int = 5, trials: int = 5) -> float:
    """The median of `trials`, each `calls` calls that are queued together, so that starting them costs
    nothing. Compiles first.
    """
    jax.block_until_ready(function(*arguments))
    seconds = []
    for _ in range(trials):
        started = time.perf_counter()
        jax.block_until_ready([function(*arguments) for _ in range(calls)])
        seconds.append((time.perf_counter() - started) / calls)
    return float(np.median(seconds))


def matrix_rate(dtype: str, size: int) -> float:
    """FLOP/s of a size³ product of random matrices on the first device. Products of equal numbers would draw
    less power.
    """
    left, right = jax.random.normal(jax.random.key(0), (2, size, size), jnp.float32).astype(dtype)
    return 2 * size**3 / seconds_a_call(jax.jit(jnp.matmul), left, right, calls=20)


def device() -> dict[str, Any]:
    """What stands beside every number: the device, and JAX's version."""
    d = jax.devices()[0]
    return {'device': d.device_kind, 'platform': d.platform, 'jax': jax.__version__}


def require_gpu(any_device: bool) -> None:
    """Exits with a reason where the first device is no GPU, unless any device will do."""
    if not any_device and jax.devices()[0].platform != 'gpu':
        raise SystemExit(
            f'error: the first device is a {jax.devices()[0].device_kind}; install JAX for CUDA, or give '
            '--any-device'
        )
