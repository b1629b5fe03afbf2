"""Compares the server's policy with the trainer's after a sync, by the log-probs that each gives to the server's samples.

The two programs differ in their order of summation and perhaps in precision. Small differences are noise that the importance ratio
π_θ / α carries; learner.anchor=decoupled cuts them at learner.importance_cap. Large differences mean a wrong policy. During training
the first mini-batch says how large they are (learner/update.py, `mismatch`).
"""

from __future__ import annotations

import numpy as np

from bapo_jax.rollout.engine import RolloutError


class PolicyMismatch(RolloutError):
    """The server's log-probs are not those of the policy it was given."""


def check_probe(served: np.ndarray, trained: np.ndarray, tolerance: float, version: int) -> None:
    """Raises PolicyMismatch where a log-prob of the probe differs by more than `tolerance`, or is not a number (nan)."""
    worst = float(np.abs(served - trained).max())
    if not worst <= tolerance:
        raise PolicyMismatch(
            f"policy {version}: a log-prob of the server differs by {worst:.2g} from the trainer's, where "
            f'rollout.probe_tolerance={tolerance:g}; the server has other weights, another dtype (rollout.dtype) or a truncated '
            'distribution'
        )
