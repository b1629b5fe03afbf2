"""Compares the server's policy with the trainer's, by the log-probs that each gives to the server's samples.

The two programs differ in their order of summation and perhaps in precision. Small differences are noise that the importance ratio
π_θ / α carries; learner.anchor=decoupled cuts them at learner.importance_cap. Large differences mean a wrong policy.
"""

from __future__ import annotations

import numpy as np

from bapo_jax.rollout.engine import RolloutError


class PolicyMismatch(RolloutError):
    """The server's log-probs are not those of the policy it was given."""


def mismatch(served: np.ndarray, trained: np.ndarray) -> dict[str, float]:
    """Compares log-probs [tokens] of tokens that the server sampled: its own, s, with the trainer's, t.

    mismatch/logprob_abs_mean, _max   of |s - t|
    mismatch/kl    KL(server ‖ trainer), estimated by the mean of r - 1 - log r, r = exp(t - s); never negative (Schulman's k3)
    mismatch/ess   effective sample size (Σ r)² / (n Σ r²) of the tokens as samples of the trainer's policy; 1 where the two agree
    """
    log_ratio = trained.astype(np.float64) - served
    ratio = np.exp(log_ratio)
    return {
        'mismatch/logprob_abs_mean': float(np.abs(log_ratio).mean()),
        'mismatch/logprob_abs_max': float(np.abs(log_ratio).max()),
        'mismatch/kl': float((ratio - 1 - log_ratio).mean()),
        'mismatch/ess': float(ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum())),
    }


def check_probe(served: np.ndarray, trained: np.ndarray, tolerance: float, version: int) -> None:
    """Raises PolicyMismatch where a log-prob of the probe differs by more than `tolerance`, or is not a number (nan)."""
    worst = float(np.abs(served - trained).max())
    if not worst <= tolerance:
        raise PolicyMismatch(
            f"policy {version}: a log-prob of the server differs by {worst:.2g} from the trainer's, where "
            f'rollout.probe_tolerance={tolerance:g}; the server has other weights, another dtype (rollout.dtype) or a truncated '
            'distribution'
        )
