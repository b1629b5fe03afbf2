"""Compares the server's policy with the trainer's after a sync, by the log-probs that each gives to the server's samples.

The two programs differ in their order of summation and perhaps in precision. Small differences are noise that the importance ratio
π_θ / α carries; learner.anchor=decoupled cuts them at learner.importance_cap. Large differences mean a wrong policy. During training
the first mini-batch says how large they are (learner/update.py, `mismatch`).

bfloat16 moves the log-prob of a rare token far and that of most tokens little. So the mean and a high quantile decide. The largest
difference is logged alone: as a gate, it would stop sound runs or let a wrong policy pass.
"""

from __future__ import annotations

import numpy as np
from absl import logging

from bapo_jax.rollout.engine import RolloutError

_QUANTILE, _TIMES = 0.95, 4.0  # the quantile may be so many times the mean's tolerance; of an exponential |Δ| it is 3 means


class PolicyMismatch(RolloutError):
    """The server's log-probs are not those of the policy it was given."""


def check_probe(served: np.ndarray, trained: np.ndarray, tolerance: float, version: int) -> None:
    """Checks one server's answer to the probe, by |Δ|, the difference of a token's log-probs. Logs its mean, quantile and maximum.

    Raises PolicyMismatch where its mean is above `tolerance`, its 95 % quantile above 4 times that, or one is not a number (nan).
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
