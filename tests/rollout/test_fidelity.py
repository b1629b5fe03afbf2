"""What the probe lets through."""

import numpy as np
import pytest

from bapo_jax.rollout.fidelity import PolicyMismatch, check_probe


def test_the_probe_stops_at_the_tolerance_and_names_policy_and_field():
    served = np.array([-1.0, -2.0], np.float32)
    check_probe(served, served + np.float32(0.0009), 1e-3, 3)
    with pytest.raises(PolicyMismatch, match=r'policy 3: .* 0\.06 .* rollout\.probe_tolerance=0\.001'):
        check_probe(served, served + np.float32([0, 0.06]), 1e-3, 3)


def test_the_probe_does_not_let_a_missing_number_through():
    with pytest.raises(PolicyMismatch, match='nan'):
        check_probe(np.array([-1.0]), np.array([np.nan]), 1e-3, 3)
