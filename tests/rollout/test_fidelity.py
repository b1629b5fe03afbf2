"""What the probe lets through."""

import numpy as np
import pytest

from bapo_jax.rollout.fidelity import PolicyMismatch, check_probe, tolerance_of, way


def probe(*differences):
    served = np.linspace(-9, 0, 200, dtype=np.float32)
    return served, served + np.float32(np.resize(differences, 200))


@pytest.mark.parametrize('platform, in_float32', [('cpu', 1e-3), ('gpu', 6e-3), ('tpu', 0.05)])
def test_the_tolerance_is_that_of_the_dtypes_and_in_float32_of_the_trainers_products(platform, in_float32):
    assert tolerance_of(0.0, ('float32', 'float32'), platform) == in_float32
    assert tolerance_of(0.0, ('bfloat16', 'float32'), platform) == tolerance_of(0.0, ('float32', 'bfloat16'), platform) == 0.05
    assert tolerance_of(2.0, ('float32', 'bfloat16'), platform) == 2.0


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


@pytest.fixture
def steps():
    """Log-probs of 256 tokens under two policies, a few steps apart, and the noise of bfloat16: of the same size, and larger at rare ones."""
    rng = np.random.default_rng(0)
    before = -rng.exponential(1.5, 256)
    moved, noise = (0.008 * rng.standard_normal(256) * -before for _ in range(2))
    return before, moved, noise


def test_a_server_that_has_the_policy_before_is_found_though_rounding_moves_as_much(steps):
    before, moved, noise = steps
    new = before + moved
    check_probe(new + noise, new, 0.03, 3, before)
    check_probe(before + noise, new, 0.03, 3)  # the differences alone do not say it
    with pytest.raises(PolicyMismatch, match=r'policy 3: the server still answers with the previous policy: .* -?0\.\d\d ± 0\.\d\d of the way'):
        check_probe(before + noise, new, 0.03, 3, before)


def test_nothing_is_said_of_policies_that_rounding_does_not_tell_apart(steps):
    before, moved, noise = steps
    for draw in range(100):
        sign = np.random.default_rng(draw).choice([-1, 1], 256)
        check_probe(before + sign * noise, before + moved / 10, 0.03, 3, before)
    check_probe(before + noise, before, 0.03, 3, before)
    check_probe(before + noise, before + moved, 2.0, 3, before)  # or where another policy may answer


@pytest.mark.parametrize('tokens_moved', [1, 3, 30, 256])
def test_a_policy_that_moved_by_a_unit_in_the_last_place_is_no_sign_of_another(tokens_moved):
    """The new policy's server may have any value between the two; there were runs that learned next to nothing, and were stopped."""
    before = np.full(256, -5.5645, np.float32)
    new = before.copy()
    new[:tokens_moved] = np.nextafter(before[:tokens_moved], np.float32(0))
    for served in (before, new):
        check_probe(served, new, 1e-3, 3, before)
    further = (before + 100 * (new - before)).astype(np.float32)
    check_probe(further, further, 1e-3, 3, before)
    if tokens_moved > 1:
        with pytest.raises(PolicyMismatch, match='the server still answers with the previous policy'):
            check_probe(before, further, 1e-3, 3, before)


def test_the_way_is_the_regression_on_what_moved_and_its_error_is_robust(steps):
    """At a tenth of the way, without noise; and of many draws of the noise the spread is the error that is stated."""
    before, moved, noise = steps
    assert way(before + 0.1 * moved, before + moved, before) == pytest.approx((0.1, 0), abs=1e-5)
    signs = np.random.default_rng(1).choice([-1, 1], (400, 256))
    found = np.array([way(before + moved + sign * noise, before + moved, before) for sign in signs])
    assert found[:, 0].mean() == pytest.approx(1, abs=0.01) and found[:, 0].std() == pytest.approx(found[:, 1].mean(), rel=0.15)
