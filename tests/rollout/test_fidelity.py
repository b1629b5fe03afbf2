"""What the probe lets through."""

import numpy as np
import pytest

from bapo_jax.rollout.fidelity import PolicyMismatch, check_probe


def probe(*differences):
    served = np.linspace(-9, 0, 200, dtype=np.float32)
    return served, served + np.float32(np.resize(differences, 200))


def test_the_probe_stops_at_the_mean_and_names_policy_and_field():
    check_probe(*probe(0.0009, -0.0009), 1e-3, 3)
    with pytest.raises(PolicyMismatch, match=r'policy 3: .*mean 0\.0011.*of 200 tokens.* rollout\.probe_tolerance=0\.001'):
        check_probe(*probe(0.0011, -0.0011), 1e-3, 3)


def test_one_rare_token_passes_and_a_tenth_of_the_tokens_does_not():
    """One token of 200 that is .6 apart; one of ten that is .3 apart, which leaves the mean at .03."""
    check_probe(*probe(0.6, *[0.001] * 199), 0.05, 3)
    with pytest.raises(PolicyMismatch, match=r'mean 0\.03, 95 % quantile 0\.3, maximum 0\.3'):
        check_probe(*probe(0.3, *[0.0] * 9), 0.05, 3)


@pytest.mark.parametrize('missing', [np.nan, np.inf])
def test_the_probe_does_not_let_a_missing_number_through(missing):
    with pytest.raises(PolicyMismatch, match=str(missing)):
        check_probe(*probe(missing, *[0.0] * 199), 1e-3, 3)
