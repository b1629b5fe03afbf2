"""Mismatch metrics against explicit distributions; and what the probe lets through."""

import numpy as np
import pytest

from bapo_jax.rollout.fidelity import PolicyMismatch, check_probe, mismatch


def test_equal_log_probs_have_no_mismatch():
    logp = np.log(np.array([0.2, 0.5, 1.0], np.float32))
    assert mismatch(logp, logp) == {
        'mismatch/logprob_abs_mean': 0.0, 'mismatch/logprob_abs_max': 0.0, 'mismatch/kl': 0.0, 'mismatch/ess': 1.0,
    }  # fmt: skip


def test_kl_and_effective_sample_size_are_those_of_two_explicit_distributions():
    served, trained = np.array([0.5, 0.25, 0.25]), np.array([0.25, 0.5, 0.25])
    # Tokens in exactly the proportions that the server draws them in: sample means are then expectations.
    tokens = np.repeat([0, 1, 2], [2, 1, 1])
    m = mismatch(np.log(served)[tokens], np.log(trained)[tokens])
    np.testing.assert_allclose(m['mismatch/kl'], np.sum(served * np.log(served / trained)), rtol=1e-12)
    np.testing.assert_allclose(m['mismatch/ess'], 1 / np.sum(served * (trained / served) ** 2), rtol=1e-12)
    np.testing.assert_allclose(m['mismatch/logprob_abs_mean'], 0.75 * np.log(2), rtol=1e-12)
    np.testing.assert_allclose(m['mismatch/logprob_abs_max'], np.log(2), rtol=1e-12)


def test_the_probe_stops_at_the_tolerance_and_names_policy_and_field():
    served = np.array([-1.0, -2.0], np.float32)
    check_probe(served, served + np.float32(0.0009), 1e-3, 3)
    with pytest.raises(PolicyMismatch, match=r'policy 3: .* 0\.06 .* rollout\.probe_tolerance=0\.001'):
        check_probe(served, served + np.float32([0, 0.06]), 1e-3, 3)


def test_the_probe_does_not_let_a_missing_number_through():
    with pytest.raises(PolicyMismatch, match='nan'):
        check_probe(np.array([-1.0]), np.array([np.nan]), 1e-3, 3)
