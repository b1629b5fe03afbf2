"""Compares the server's policy with the trainer's after a sync, by the log-probs that each gives to the server's samples.

The two programs differ in their order of summation and perhaps in precision. Small differences are noise that the importance ratio
π_θ / α carries; learner.anchor=decoupled cuts them at learner.importance_cap. Large differences mean a wrong policy. During training
the first mini-batch says how large they are (learner/update.py, `mismatch`).

bfloat16 moves the log-prob of a rare token far and that of most tokens little. So the mean and a high quantile decide. The largest
difference is logged alone: as a gate, it would stop sound runs or let a wrong policy pass.

A few steps change a policy less than rounding does, so these bounds cannot see that a server still has the policy before. The
direction can: on the way from that policy's log-probs to this one's, the server's stand at the beginning or at the end.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from absl import logging

from bapo_jax.rollout.engine import RolloutError

# The most mean |Δ| of a sound server, by what the trainer multiplies with: bfloat16 of either side; float32 on its own devices, where JAX
# rounds operands to 10 bits on a GPU (TF32) and to 7 on a TPU unless it is told otherwise. Figures: docs/vllm.md#the-probe.
_BFLOAT16, _FLOAT32 = 0.05, {'cpu': 1e-3, 'gpu': 6e-3, 'tpu': 0.05}
_QUANTILE, _TIMES = 0.95, 4.0  # the quantile may be so many times the mean's tolerance; of an exponential |Δ| it is 3 means
_OFF = 1.0  # a tolerance above this lets a server answer with another policy on purpose
_HALF_WAY, _ERRORS = 0.5, 5.0  # a server is refused below half the way, if it is so many standard errors from the end: 3 in 10^7


class PolicyMismatch(RolloutError):
    """The server's log-probs are not those of the policy it was given."""


def tolerance_of(stated: float, dtypes: Collection[str], platform: str) -> float:
    """rollout.probe_tolerance, or where that is 0, what trainer and server in these dtypes want; `platform` is the trainer's."""
    return stated or (_BFLOAT16 if 'bfloat16' in dtypes else _FLOAT32.get(platform, 1e-3))


def check_probe(served: np.ndarray, trained: np.ndarray, tolerance: float, version: int, before: np.ndarray | None = None) -> None:
    """Checks one server's answer to the probe, by |Δ|, the difference of a token's log-probs. Logs its mean, quantile and maximum.

    `trained` are those under the policy, `before` those under the one that the server had before it, if any. Raises PolicyMismatch if
    the mean is above `tolerance`, the 95 % quantile above 4 times that, or one is not a number (nan). Unless the tolerance is above 1,
    raises it too if the server is below half the `way` from the policy before to this one, and 5 standard errors from its end.
    """
    apart = np.abs(served - trained)
    mean, high, most = float(apart.mean()), float(np.quantile(apart, _QUANTILE)), float(apart.max())
    of_probe = f'mean {mean:.2g}, {100 * _QUANTILE:.0f} % quantile {high:.2g}, maximum {most:.2g} of {apart.size} tokens'
    logging.info("policy %d: |the server's log-prob - the trainer's|: %s", version, of_probe)
    if not (mean <= tolerance and high <= _TIMES * tolerance):
        raise PolicyMismatch(
            f"policy {version}: the server's log-probs differ from the trainer's ({of_probe}), where rollout.probe_tolerance="
            f'{tolerance:g} bounds the mean, and {_TIMES:g} times that the quantile; the server has other weights, another dtype '
            '(rollout.dtype) or a truncated distribution'
        )
    if before is None or tolerance > _OFF or not np.any(trained != before):
        return
    share, error = way(served, trained, before)
    logging.info('policy %d: %.2f ± %.2f of the way from the policy before it', version, share, error)
    if share < _HALF_WAY and 1 - share > _ERRORS * error:
        raise PolicyMismatch(
            f'policy {version}: the server still answers with the policy before it: its log-probs are {share:.2f} ± {error:.2f} of the '
            "way from that one's to this one's; it did not load what it was handed"
        )


def way(served: np.ndarray, trained: np.ndarray, before: np.ndarray) -> tuple[float, float]:
    """How far the server's log-probs are from those under the policy before, 0, to those under this one, 1, and the standard error.

    With m = trained - before:  share = Σ (served - before) m / Σ m²,  error = √Σ m² r² / Σ m²,  of the residuals r
    (White 1980: a rare token is far off in both).
    """
    moved = (trained - before).astype(np.float64)
    total = np.sum(moved**2)
    share = np.sum((served - before) * moved) / total
    left = served - before - share * moved
    return float(share), float(np.sqrt(np.sum(moved**2 * left**2)) / total)
