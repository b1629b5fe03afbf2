"""Compares the server's policy with the trainer's after a sync, by both log-probs of the server's samples.

The two programs differ in summation order and perhaps in precision. Small differences are noise in the
importance ratio π_θ / α; learner.anchor=decoupled caps them at learner.importance_cap. Large differences
mean a wrong policy. During training, the first mini-batch measures them (learner/policy.py, `mismatch`).

bfloat16 changes the log-probs of rare tokens a lot and those of most tokens little. So the mean and a high
quantile decide. The maximum is only logged: as a gate, it would stop sound runs or let a wrong policy pass.

A few steps change a policy less than rounding does, so these bounds cannot detect a server that still has the
previous policy. The direction can: on the way from the previous policy's log-probs to the new one's, the
server's lie at the beginning or at the end.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from absl import logging

from bapo_jax.rollout.engine import RolloutError

# The highest mean |Δ| of a sound server, by the precision of matrix products: bfloat16 on either side, or
# float32 by the trainer's platform, where JAX by default rounds operands to 10 bits on a GPU (TF32) and to 7
# on a TPU. Figures: docs/vllm.md#the-probe.
_BFLOAT16, _FLOAT32 = 0.05, {'cpu': 1e-3, 'gpu': 6e-3, 'tpu': 0.05}
# The quantile's tolerance is this multiple of the mean's. For an exponential |Δ| the quantile is 3 means.
_QUANTILE, _TIMES = 0.95, 4.0
_OFF = 1.0  # a higher tolerance deliberately lets a server answer with another policy
# A server is refused if it is less than half-way and this many standard errors from the end: 3 in 10^7.
_HALF_WAY, _ERRORS = 0.5, 5.0
# Two programs' log-probs agree to no more than some units in the last place: a policy that moved by less has
# no direction.
_UNITS = 4


class PolicyMismatch(RolloutError):
    """The server's log-probs are not those of the policy that it was given."""


def tolerance_of(stated: float, dtypes: Collection[str], platform: str) -> float:
    """`stated` (rollout.probe_tolerance), or if 0, the default for the dtypes and trainer's platform."""
    return stated or (_BFLOAT16 if 'bfloat16' in dtypes else _FLOAT32.get(platform, 1e-3))


def check_probe(
    served: np.ndarray, trained: np.ndarray, tolerance: float, version: int, before: np.ndarray | None = None
) -> None:
    """Checks one server's answer to the probe, by |Δ|, the difference of a token's log-probs; logs a summary.

    `trained` are the log-probs under the policy, `before` those under the server's previous policy, if any.
    Raises PolicyMismatch if the mean is above `tolerance`, the 95 % quantile is above 4 times that, or one is
    not a number (nan). Unless the tolerance is above 1, also raises it if the server is below half the `way`
    from the previous policy to this one, and 5 standard errors from its end.
    """
    apart = np.abs(served - trained)
    mean, high, most = float(apart.mean()), float(np.quantile(apart, _QUANTILE)), float(apart.max())
    of_probe = (
        f'mean {mean:.2g}, {100 * _QUANTILE:.0f} % quantile {high:.2g}, '
        f'maximum {most:.2g} of {apart.size} tokens'
    )
    logging.info("policy %d: |the server's log-prob - the trainer's|: %s", version, of_probe)
    if not (mean <= tolerance and high <= _TIMES * tolerance):
        raise PolicyMismatch(
            f"policy {version}: the server's log-probs differ too much from the trainer's ({of_probe}); the "
            'limits are '
            f'rollout.probe_tolerance={tolerance:g} for the mean and {_TIMES:g} times that for the quantile. '
            'Check that the server '
            "has this run's model and rollout.dtype, and samples without top-p or top-k (docs/vllm.md)"
        )
    if before is None or tolerance > _OFF or not np.any(trained != before):
        return
    share, error = way(served, trained, before)
    logging.info('policy %d: %.2f ± %.2f of the way from the previous policy', version, share, error)
    if share < _HALF_WAY and 1 - share > _ERRORS * error:
        raise PolicyMismatch(
            f'policy {version}: the server still answers with the previous policy: its log-probs are '
            f'{share:.2f} ± {error:.2f} '
            "of the way from that policy's to this one's. Read the server's log for why it did not load it, "
            'and restart the server'
        )


def way(served: np.ndarray, trained: np.ndarray, before: np.ndarray) -> tuple[float, float]:
    """How far the server's log-probs are from the previous policy (0) to this one (1), and the error of that.

    With m = trained - before:  share = Σ (served - before) m / Σ m²,  error = √Σ m² r² / Σ m²,  of the
    residuals r (White 1980: a rare token is far off in both), each at least what rounding leaves unknown.
    """
    moved = (trained - before).astype(np.float64)
    total = np.sum(moved**2)
    share = np.sum((served - before) * moved) / total
    left = served - before - share * moved
    unknown = _UNITS * np.spacing(np.abs(before, dtype=np.float32))
    return float(share), float(np.sqrt(np.sum(moved**2 * np.maximum(left**2, unknown**2))) / total)
