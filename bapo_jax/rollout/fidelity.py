"""Does the server compute the policy that the trainer has? Log-probs of the server's own samples, as it gave them and as the trainer does.

Two programs, two orders of summation, perhaps two precisions: small differences are noise that the importance ratio
π_θ / α carries (with learner.anchor=decoupled they are cut at learner.importance_cap). Large ones are a wrong policy.
"""

from __future__ import annotations

import numpy as np

from bapo_jax.rollout.engine import RolloutError


class PolicyMismatch(RolloutError):
    """The server's log-probs are not those of the policy it was given."""


def mismatch(served: np.ndarray, trained: np.ndarray) -> dict[str, float]:
    """Of log-probs [tokens] of tokens drawn from the server's policy s, with the trainer's t of the same tokens.

    mismatch/logprob_abs_mean, _max   of |s - t|
    mismatch/kl    KL(s ‖ t), estimated by E_s[r - 1 - log r], r = exp(t - s): never negative (Schulman's k3)
    mismatch/ess   effective sample size (Σ r)² / (n Σ r²) of the tokens as samples of the trainer's policy: 1 where the two agree
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
    """Raises PolicyMismatch where a log-prob of the probe differs by more than `tolerance`, or is not a number."""
    worst = float(np.abs(served - trained).max())
    if not worst <= tolerance:
        raise PolicyMismatch(
            f'policy {version}: a log-prob of the server is {worst:.2g} from the trainer\'s, where rollout.probe_tolerance={tolerance:g}; '
            'the server serves other weights, another dtype (rollout.dtype) or a cut distribution'
        )
