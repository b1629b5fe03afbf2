"""Surrogates and KL estimators against closed forms worked out by hand. Tolerance 1e-6 relative (float32) unless said otherwise."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bapo_jax.learner.losses import (
    Clip,
    Tokens,
    binary_tv,
    cispo,
    clipped,
    importance_ratio,
    k3,
    sequence_level,
    token_level,
    total_variation,
    masked_weight,
    truncated_weight,
)  # fmt: skip

RTOL = 1e-6


def array(*values):
    return jnp.array([values], jnp.float32)  # one row


def loss_of(logp, anchor, advantage, *, centre=None, low=0.2, high=0.2, dual=None):
    """(loss, held) of each token, with the ratio π/anchor of each."""
    ratio = importance_ratio(token_level(logp - anchor, jnp.ones_like(logp)))
    return clipped(Tokens(logp, ratio, advantage, jnp.ones_like(logp) if centre is None else centre, logp, logp), Clip(low, high, dual))


def at_ratio(ratio, advantage, **kwargs):
    """(loss, d loss / d logp, held) of one token whose ratio to the anchor is `ratio`."""
    anchor = array(-1.3)
    logp = anchor + jnp.log(array(ratio))

    def f(logp):
        loss, held = loss_of(logp, anchor, array(advantage), **kwargs)
        return loss[0, 0], held

    (value, held), gradient = jax.value_and_grad(f, has_aux=True)(logp)
    return float(value), float(gradient[0, 0]), bool(held[0, 0])


def test_on_policy_gradient_is_reinforces():
    """ρ = 1: the gradient is -A ∇ log π, token by token."""
    rng = np.random.default_rng(0)
    logits, tokens = jnp.asarray(rng.standard_normal((16, 5)), jnp.float32), rng.integers(0, 5, 16)
    advantage = jnp.asarray(rng.standard_normal(16), jnp.float32)

    def logp(logits):
        return jax.nn.log_softmax(logits)[np.arange(16), tokens]

    def surrogate(x):
        return loss_of(logp(x), jax.lax.stop_gradient(logp(logits)), advantage, dual=3.0)[0].sum()

    got = jax.grad(surrogate)(logits)
    want = jax.grad(lambda x: -(advantage * logp(x)).sum())(logits)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-6)
    np.testing.assert_allclose(surrogate(logits), -advantage.sum(), rtol=1e-5)


def test_the_log_ratio_of_a_response_is_the_mean_of_its_tokens():
    """GSPO, eq. 7: (π/μ)^(1/|y|). Number 0 belongs to no response, and the same number in another row is another response."""
    log_ratio = jnp.array([[5.0, 0.1, 0.3, -0.6, 0.0, 0.2], [1.0, 2.0, 3.0, 0.0, 0.0, 0.0]], jnp.float32)
    response = jnp.array([[0, 1, 1, 2, 2, 2], [1, 1, 1, 0, 0, 0]])
    got = np.asarray(sequence_level(log_ratio, response))
    np.testing.assert_allclose(got[0, 1:], [0.2, 0.2, -0.4 / 3, -0.4 / 3, -0.4 / 3], rtol=RTOL)
    np.testing.assert_allclose(got[1, :3], 2.0, rtol=RTOL)


# ratio, advantage -> loss, gradient by logp, held; trust region [0.8, 1.3]. d ρ / d logp = ρ.
TABLE = [
    (1.0, 2.0, -2.0, -2.0, False),
    (1.25, 2.0, -2.5, -2.5, False),
    (1.5, 2.0, -2.6, 0.0, True),  # risen far enough
    (0.5, 2.0, -1.0, -1.0, False),  # fallen though good: pulled back
    (1.0, -2.0, 2.0, 2.0, False),
    (0.9, -2.0, 1.8, 1.8, False),
    (0.5, -2.0, 1.6, 0.0, True),  # fallen far enough
    (1.5, -2.0, 3.0, 3.0, False),  # risen though bad: pushed back
    (1.5, 0.0, 0.0, 0.0, False),
    (0.5, 0.0, 0.0, 0.0, False),
]


@pytest.mark.parametrize('ratio, advantage, loss, gradient, held', TABLE)
def test_clip(ratio, advantage, loss, gradient, held):
    got = at_ratio(ratio, advantage, low=0.2, high=0.3)
    np.testing.assert_allclose(got[:2], (loss, gradient), rtol=RTOL, atol=1e-7)
    assert got[2] == held


@pytest.mark.parametrize(
    'ratio, advantage, loss, gradient',
    [
        (2.9, -2.0, 5.8, 5.8),  # below the bound d = 3
        (3.5, -2.0, 6.0, 0.0),  # held there, without gradient
        (1e6, -2.0, 6.0, 0.0),
        (3.5, 2.0, -2.4, 0.0),  # a positive advantage is the clip's business
        (0.5, 2.0, -1.0, -1.0),
        (0.5, -2.0, 1.6, 0.0),
    ],
)
def test_dual_clip_bounds_what_a_negative_advantage_costs(ratio, advantage, loss, gradient):
    np.testing.assert_allclose(at_ratio(ratio, advantage, dual=3.0)[:2], (loss, gradient), rtol=RTOL, atol=1e-7)


def test_without_dual_clip_the_cost_grows_with_the_ratio():
    np.testing.assert_allclose(at_ratio(100.0, -2.0)[:2], (200.0, 200.0), rtol=1e-5)


@pytest.mark.parametrize('ratio, advantage, loss, gradient', [(2.5, 1.0, -2.2, 0.0), (1.9, 1.0, -1.9, -1.9), (1.5, -1.0, 1.8, 0.0)])
def test_the_clip_centre_moves_the_trust_region(ratio, advantage, loss, gradient):
    np.testing.assert_allclose(at_ratio(ratio, advantage, centre=array(2.0))[:2], (loss, gradient), rtol=RTOL, atol=1e-7)


@pytest.mark.parametrize('ratio, weight, held', [(1.0, 1.8, True), (1.9, 1.9, False), (2.5, 2.3, True)])
def test_cispos_weight_is_cut_around_the_clip_centre_and_every_token_has_a_gradient(ratio, weight, held):
    """-w A log π with w = clip(ρ, c - .2, c + .3) and c = 2; the gradient is -w A."""
    tokens = Tokens(array(-1.5), array(ratio), array(0.5), array(2.0), array(0.0), array(0.0))
    loss, was_held = cispo(tokens, Clip(0.2, 0.3, None))
    gradient = jax.grad(lambda logp: cispo(tokens._replace(logp_RxT=logp), Clip(0.2, 0.3, None))[0].sum())(array(-1.5))
    np.testing.assert_allclose((loss[0, 0], gradient[0, 0]), (weight * 0.5 * 1.5, -weight * 0.5), rtol=RTOL)
    assert bool(was_held[0, 0]) == held


@pytest.mark.parametrize(
    'p, anchor, advantage, weight',
    [
        (0.50, 0.40, 2.0, 1.25),
        (0.60, 0.40, 2.0, None),  # risen by more than 0.15
        (0.60, 0.40, -2.0, 1.5),  # risen though bad: pushed back
        (0.30, 0.45, -2.0, 2 / 3),  # fallen by less than 0.2
        (0.20, 0.45, -2.0, None),
        (0.20, 0.45, 2.0, 4 / 9),
        (0.10, 0.001, 2.0, 20.0),  # a hundred times as likely, but hardly moved: the weight is cut at C
        (0.60, 0.10, 0.0, 6.0),  # nothing to stop
    ],
)
def test_binary_tv_stops_a_token_by_its_probabilities_and_cuts_its_weight(p, anchor, advantage, weight):
    """-sg(min(ρ, 20)) A log π unless p - p_old > .15 with A > 0, or < -.2 with A < 0: Binary-TV of (p, 1 - p) and (p_old, 1 - p_old)."""

    def loss(logp):
        ratio = importance_ratio(logp - jnp.log(array(anchor)))
        value, held = binary_tv(Tokens(logp, ratio, array(advantage), jnp.ones((1, 1)), logp, logp), Clip(0.2, 0.15, None))
        return value[0, 0], held[0, 0]

    (value, held), gradient = jax.value_and_grad(loss, has_aux=True)(jnp.log(array(p)))
    assert bool(held) == (weight is None)
    want = -advantage * (weight or 0.0)
    np.testing.assert_allclose((value, gradient[0, 0]), (want * np.log(p), want), rtol=1e-5, atol=1e-7)


def test_ratio_and_closed_form():
    logp, anchor = array(-1.0, -1.0), array(-1.1, -0.7)
    np.testing.assert_allclose(importance_ratio(logp - anchor), [(np.exp(0.1), np.exp(-0.3))], rtol=RTOL)
    loss, _ = loss_of(logp, anchor, array(1.0, -3.0))
    np.testing.assert_allclose(loss, [(-np.exp(0.1), 3 * 0.8)], rtol=RTOL)


def test_k3_is_never_negative_and_its_gradient_vanishes_at_equality():
    target = jnp.linspace(-8.0, 0.0, 81)
    logp = jnp.full(81, -4.0)

    gap = np.asarray(target, np.float64) + 4.0
    np.testing.assert_allclose(k3(logp, target), np.minimum(np.exp(gap) - gap - 1, 10.0), rtol=1e-5, atol=1e-6)
    assert (k3(logp, target) >= 0).all()
    np.testing.assert_allclose(k3(target, target), 0.0, atol=1e-7)
    np.testing.assert_allclose(jax.grad(lambda x: k3(x, target).sum())(target), 0.0, atol=1e-6)
    # Elsewhere -(e^gap - 1), so descent moves logp towards the target; 0 where the value is clamped at 10.
    held = np.exp(gap) - gap - 1 > 10.0
    assert 0 < held.sum() < 20
    gradient = jax.grad(lambda x: k3(x, target).sum())(logp)
    np.testing.assert_allclose(gradient, np.where(held, 0.0, 1 - np.exp(gap)), rtol=1e-5, atol=1e-5)


def test_zero_advantage_contributes_exactly_nothing():
    rng = np.random.default_rng(1)
    logp, anchor = (jnp.asarray(rng.normal(-2, 2, 64), jnp.float32) for _ in range(2))
    value, gradient = jax.value_and_grad(lambda x: loss_of(x, anchor, jnp.zeros(64), dual=3.0)[0].sum())(logp)
    assert value == 0
    assert (gradient == 0).all()


def test_absurd_log_probs_overflow_nothing():
    logp, anchor = array(-1e4, 0.0, -1e30), array(0.0, -1e4, 0.0)

    def total(logp):
        return loss_of(logp, anchor, array(1, -1, 1))[0].sum() + k3(logp, anchor).sum()

    value, gradient = jax.value_and_grad(total)(logp)
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()


def test_the_decoupled_weight_is_cut_and_not_differentiated():
    proximal, behaviour = jnp.log(array(0.1, 0.2, 0.4, 1.0)), jnp.log(array(0.2, 0.2, 0.2, 0.001))
    np.testing.assert_allclose(truncated_weight(proximal, behaviour, 1.5), [(0.5, 1.0, 1.5, 1.5)], rtol=RTOL)
    np.testing.assert_allclose(truncated_weight(proximal, behaviour, 3.0), [(0.5, 1.0, 2.0, 3.0)], rtol=RTOL)
    np.testing.assert_allclose(masked_weight(proximal, behaviour, 1.5), [(0.5, 1.0, 0.0, 0.0)], rtol=RTOL)
    for weight_of in (truncated_weight, masked_weight):
        for argument in (0, 1):
            gradient = jax.grad(lambda p, b: weight_of(p, b, 1.5).sum(), argnums=argument)(proximal, behaviour)
            assert (gradient == 0).all()


def test_behaviour_and_proximal_anchor_and_decoupled_are_one_where_alpha_is_pi():
    """GRPO is BAPO on-policy: the same arrays, bit for bit. Their objectives: test_objective.py."""
    logp, advantage = array(-1.0, -2.0, -0.3), array(1.0, -1.0, 0.5)
    behaviour = proximal = logp
    loss, held = loss_of(logp, behaviour, advantage)
    decoupled, held_there = loss_of(logp, proximal, advantage)
    np.testing.assert_array_equal(loss, truncated_weight(proximal, behaviour, 2.0) * decoupled)
    np.testing.assert_array_equal(held, held_there)
    np.testing.assert_array_equal(loss, -advantage)


def test_total_variation_is_that_of_two_distributions():
    """E_q[(1 - p/q)_+] = ½ Σ |p - q|: exactly, summed over all outcomes; and within 4 standard errors, from samples of q."""
    rng = np.random.default_rng(0)
    p, q = rng.dirichlet(np.ones(7)), rng.dirichlet(np.ones(7))
    exact = 0.5 * np.abs(p - q).sum()
    terms = np.asarray(total_variation(jnp.log(jnp.asarray(p)), jnp.log(jnp.asarray(q))))
    assert (q * terms).sum() == pytest.approx(exact, rel=1e-5)
    samples = terms[rng.choice(7, 20_000, p=q)]
    assert 0 <= samples.min() and samples.max() <= 1
    assert abs(samples.mean() - exact) < 4 * samples.std() / np.sqrt(20_000)


def test_total_variation_of_far_policies_is_finite():
    np.testing.assert_array_equal(total_variation(array(0.0, -200.0), array(-200.0, 0.0)), [[0.0, 1.0]])


def test_cispo_is_the_kernel_with_the_clipped_ratio_as_weight():
    """CISPO: sg(min(ρ, 1 + ε)) A ∇ log π, no token's gradient held back. The anchor is the policy itself, so its own ratio is 1."""
    behaviour, advantage = array(-1.0, -2.0, -0.5, -3.0), array(1.0, -1.0, 2.0, -0.5)
    logp = behaviour + array(0.5, 0.5, -0.5, -0.5)
    weight = truncated_weight(logp, behaviour, 1.2)
    gradient = jax.grad(lambda x: (weight * loss_of(x, logp, advantage)[0]).sum())(logp)
    np.testing.assert_allclose(gradient, -np.minimum(np.exp(logp - behaviour), 1.2) * advantage, rtol=RTOL)


def test_gspo_is_the_kernel_with_the_sequence_ratio_at_every_token():
    """GSPO: -min(s A, clip(s) A) with s = exp(mean (log π - log α)); an anchor of log π - log s makes every token's ratio s."""
    behaviour, logp = array(-1.0, -2.0, -0.5), array(-0.9, -2.2, -0.3)

    def gspo(logp, advantage):
        s = jnp.exp(jnp.mean(logp - behaviour))
        return -jnp.minimum(s * advantage, jnp.clip(s, 0.97, 1.03) * advantage)

    def kernel(x, advantage):
        anchor = logp - jnp.mean(logp - behaviour)
        return loss_of(x, anchor, jnp.full((1, 3), advantage), low=0.03, high=0.03)[0].mean()

    for advantage in (1.5, -1.5):  # inside for one sign, clipped for the other
        (value, gradient), (want, want_gradient) = (jax.value_and_grad(f)(logp, advantage) for f in (kernel, gspo))
        assert float(value) == pytest.approx(float(want), rel=RTOL)
        np.testing.assert_allclose(gradient, want_gradient, rtol=1e-5, atol=1e-7)
