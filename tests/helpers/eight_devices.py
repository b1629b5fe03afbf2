"""The environment of a process with eight fake CPU devices, for tests that run their own file as a script."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def eight_devices() -> dict[str, str]:
    """What such a process shows is how XLA splits a program over a mesh; LLVM's optimisation comes later and takes half the time."""
    return os.environ | {
        'PYTHONPATH': f'{ROOT}:{ROOT}/tests/helpers', 'JAX_PLATFORMS': 'cpu', 'JAX_NUM_CPU_DEVICES': '8',
        'XLA_FLAGS': '--xla_backend_optimization_level=0',
    }  # fmt: skip
