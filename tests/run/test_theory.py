"""The theory monitors against exact sums over small distributions, and numbers worked out by hand."""

import ast
import dataclasses
import itertools
import math
import sys
from pathlib import Path

import numpy as np
import pytest
from group_builders import graded, masked, right

from bapo_jax.groups import Group, Prompt, Verdict, joined, make_batch, sampled, taken
from bapo_jax.replay.bapo import improved
from bapo_jax.replay.thresholds import in_range
from bapo_jax.run import theory
from bapo_jax.run.theory import (
    bound_terms,
    bretagnolle_huber,
    constants,
    effective_share,
    log_ratios,
    monitor,
    per_prompt,
    pinsker,
    sequence_kl_k1,
    sequence_kl_k3,
    sequence_ratio,
    sequence_tv,
    token_tv,
)  # fmt: skip
from bapo_jax.tasks.traces import trace

THRESHOLDS = {'c1': 1 / 8, 'low': 4 / 8, 'high': 5 / 8}
END, LENGTH = 2, 3  # a response over the symbols 0, 1, 2 ends with its first 2, or after three tokens


def response(logp, mask=None):
    logp = np.asarray(logp, np.float32)
    whole = sampled(np.zeros(len(logp), np.int32), logp, 'stop', 0)
    return whole if mask is None else masked(whole, mask)


def group(correct, logps, masks=None, rewards=None):
    """A group whose `correct` are 1 for a right response, else 0."""
    responses = tuple(response(*pair) for pair in zip(logps, masks or [None] * len(logps), strict=True))
    verdicts = tuple(Verdict.CORRECT if c else Verdict.WRONG for c in correct)
    rewards = np.array(correct if rewards is None else rewards, np.float32)
    return Group(Prompt(0, 'countdown', np.zeros(1, np.int32), {}), responses, verdicts, rewards, 0)


def level(k, G):
    return group([1] * k + [0] * (G - k), [[-1.0]] * G)


def one_token_groups(ratios_by_prompt):
    """Half-right groups of one-token responses drawn at log-prob -1, and log-probs of a policy with these ratios to it."""
    groups = [group([1, 0] * (len(ratios) // 2), [[-1.0]] * len(ratios)) for ratios in ratios_by_prompt]
    return groups, [[np.array([math.log(r) - 1], np.float32) for r in ratios] for ratios in ratios_by_prompt]


# ---- exact distributions


class Policy:
    """A conditional distribution of the next symbol for every prefix."""

    def __init__(self, rng, near=None, step=0.0):
        prefixes = [p for n in range(LENGTH) for p in itertools.product(range(3), repeat=n)]
        self.logits = {p: rng.standard_normal(3) for p in prefixes}
        if near is not None:
            self.logits = {p: near.logits[p] + step * x for p, x in self.logits.items()}

    def next(self, prefix):
        return np.exp(self.logits[prefix]) / np.exp(self.logits[prefix]).sum()

    def logp(self, y):
        return np.array([math.log(self.next(y[:i])[token]) for i, token in enumerate(y)])


RESPONSES = [
    y for n in range(1, LENGTH + 1) for y in itertools.product(range(3), repeat=n)
    if END not in y[:-1] and (y[-1] == END or n == LENGTH)
]  # fmt: skip


def expectation(estimator, p, q):
    """E over y from q of estimator(log p - log q), by enumeration."""
    return sum(math.exp(q.logp(y).sum()) * estimator(p.logp(y) - q.logp(y)) for y in RESPONSES)


def exact_tv(p, q):
    return 0.5 * sum(abs(math.exp(p.logp(y).sum()) - math.exp(q.logp(y).sum())) for y in RESPONSES)


def exact_kl(q, p):
    return sum(math.exp(q.logp(y).sum()) * (q.logp(y).sum() - p.logp(y).sum()) for y in RESPONSES)


@pytest.fixture(params=range(5))
def policies(request):
    rng = np.random.default_rng(request.param)
    q = Policy(rng)
    return Policy(rng, near=q, step=1.0), q


def test_the_enumeration_is_complete(policies):
    assert len(RESPONSES) == 1 + 2 + 4 * 3
    assert sum(math.exp(policies[0].logp(y).sum()) for y in RESPONSES) == pytest.approx(1)


def test_sequence_tv_is_unbiased(policies):
    assert expectation(sequence_tv, *policies) == pytest.approx(exact_tv(*policies), rel=1e-12)
    assert exact_tv(*policies) > 0.05


def test_sequence_kl_is_unbiased_by_both_estimators(policies):
    p, q = policies
    assert expectation(sequence_kl_k1, p, q) == pytest.approx(exact_kl(q, p), rel=1e-10)
    assert expectation(sequence_kl_k3, p, q) == pytest.approx(exact_kl(q, p), rel=1e-10)


def test_token_tv_is_the_mean_of_the_conditionals_tv(policies):
    p, q = policies
    for prefix in p.logits:
        now, then = p.next(prefix), q.next(prefix)
        expected = sum(then[a] * token_tv(np.log(now[[a]] / then[[a]])) for a in range(3))
        assert expected == pytest.approx(0.5 * np.abs(now - then).sum(), rel=1e-12)
    assert token_tv(np.log([0.5, 1.5, 0.9, 1.0])) == pytest.approx((0.5 + 0 + 0.1 + 0) / 4)


def test_sequence_tv_is_below_the_chain_and_the_kl_bounds(policies):
    p, q = policies
    tv, kl = exact_tv(p, q), exact_kl(q, p)
    chain = expectation(lambda gap: len(gap) * token_tv(gap), p, q)
    assert tv <= chain
    assert tv <= pinsker(kl) and tv <= bretagnolle_huber(kl)


def test_bounds_by_kl():
    assert pinsker(np.array(0.5)) == pytest.approx(0.5)
    assert bretagnolle_huber(np.array(math.log(2))) == pytest.approx(math.sqrt(0.5))
    assert bretagnolle_huber(np.array(0.0)) == 0 and bretagnolle_huber(np.array(50.0)) <= 1
    assert bretagnolle_huber(np.array(3.0)) < 1 < pinsker(np.array(3.0))


def test_distances_grow_with_the_gap():
    q = Policy(np.random.default_rng(0))
    at = [Policy(np.random.default_rng(1), near=q, step=step) for step in (0.0, 0.1, 0.3, 1.0)]
    for estimator in (token_tv, sequence_tv, sequence_kl_k1, sequence_kl_k3):
        values = [expectation(estimator, p, q) for p in at]
        assert abs(values[0]) < 1e-12 and np.all(np.diff(values) > 0), estimator


@pytest.mark.parametrize('gap', [[0.0], [-1000.0], [1000.0], [30.0, -30.0], [-0.3, 5.0, -7.0], []])
def test_tv_stays_in_the_unit_interval_on_every_response(gap):
    gap = np.array(gap)
    assert 0 <= token_tv(gap) <= 1 and 0 <= sequence_tv(gap) <= 1
    assert math.isfinite(sequence_ratio(gap)) and sequence_kl_k3(gap) >= 0


def test_a_ratio_above_one_adds_no_tv():
    """|ρ - 1| / 2 and (ρ - 1)_+ have the same mean under q and unbounded values."""
    assert sequence_tv(np.log([3.0])) == token_tv(np.log([3.0])) == 0
    assert sequence_tv(np.log([0.25])) == token_tv(np.log([0.25])) == pytest.approx(0.75)
    assert sequence_tv(np.log([0.5, 0.5])) == pytest.approx(0.75)
    assert sequence_tv(np.log([0.5, 2.0])) == pytest.approx(0, abs=1e-12)


def test_long_responses_have_sequence_tv_close_to_one():
    """The number in the module's docstring: 8,000 tokens of 0.001 nats each."""
    rng = np.random.default_rng(0)
    gaps = [[rng.normal(-0.001, math.sqrt(0.002), 8000) for _ in range(1000)]]
    assert per_prompt(sequence_tv, gaps)[0] == pytest.approx(0.95, abs=0.02)
    assert per_prompt(sequence_kl_k1, gaps)[0] == pytest.approx(8, abs=0.5)
    assert per_prompt(token_tv, gaps)[0] < 0.02


def test_effective_share():
    assert effective_share(np.ones(7)) == 1
    assert 7 * effective_share(np.ones(7)) == 7  # ESS = n
    assert effective_share(np.array([1.0, 0, 0, 0])) == 0.25
    assert effective_share(np.array([3.0, 1.0])) == pytest.approx(16 / 20)
    assert effective_share(np.array([1e-3, 3e-3])) == pytest.approx(effective_share(np.array([1.0, 3.0])))


# ---- constants


def test_constants_of_algorithms():
    K = constants(8, 1 / 8, 4 / 8, 5 / 8)
    assert K['K1'] == pytest.approx(2.0237, abs=5e-5)
    assert K['K1'] == pytest.approx(1 / math.sqrt(7 / 64 + 1e-6) - 1, rel=1e-12)
    assert K['K3'] == K['K3_printed'] == pytest.approx(1.0656, abs=5e-5)
    assert constants(8, 1 / 8, 1 / 8, 2 / 8)['K3'] == pytest.approx(2.0237, abs=5e-5)
    assert constants(8, 1 / 8, 4 / 8, 4 / 8)['K3'] == pytest.approx(1, abs=1e-5)  # the least possible, at accuracy ½


def test_k2_as_printed_holds_for_the_papers_numbers_only():
    K = constants(8, 1 / 8, 4 / 8, 5 / 8)
    assert K['K2'] == K['K2_printed'] == K['K1']
    K = constants(16, 1 / 8, 4 / 8, 5 / 8)
    assert K['K2'] == pytest.approx(1 / math.sqrt(15 / 256 + 1e-6) - 1) and K['K2_printed'] == pytest.approx(2.0237, abs=5e-5)
    K = constants(8, 1 / 2, 4 / 8, 5 / 8)
    assert K['K2'] == pytest.approx(2.0237, abs=5e-5) and K['K2_printed'] == pytest.approx(1, abs=1e-5)


def test_k3_off_the_grid_is_of_the_levels_between():
    K = constants(8, 1 / 8, 2.5 / 8, 3.5 / 8)
    assert K['K3'] == pytest.approx(1 / math.sqrt(15 / 64 + 1e-6) - 1)
    assert K['K3_printed'] == pytest.approx(1 / math.sqrt(2.5 * 5.5 / 64 + 1e-6) - 1)


def test_no_level_in_the_range_is_nan():
    assert math.isnan(constants(8, 7 / 8, 4 / 8, 5 / 8)['K2'])
    assert math.isnan(constants(4, 1 / 8, 0.3, 0.4)['K3'])


def test_epsilon_is_under_the_root():
    assert constants(2, 0.5, 0.5, 0.5, eps=0.0)['K1'] == 1
    assert constants(2, 0.5, 0.5, 0.5, eps=0.75)['K1'] == 0


@pytest.mark.parametrize('G', [2, 7, 8, 16])
def test_levels_are_those_that_replay_chooses(G):
    for n in range(0, 41):
        c = n / 40
        K = constants(G, c, c, min(1.0, c + 1 / 8))
        for name, levels in {
            'K2': [g.correct for g in improved([level(k, G) for k in range(G + 1)], c)],
            'K3': [k for k in range(G + 1) if in_range(k, G, c, min(1.0, c + 1 / 8))],
        }.items():
            want = min((k * (G - k) / G**2 for k in levels), default=math.nan)
            np.testing.assert_allclose(K[name], 1 / math.sqrt(want + 1e-6) - 1, rtol=1e-12)


@pytest.mark.parametrize('c', [3 / 8 * (1 - 1e-12), 3 / 8 * (1 + 1e-12)])
def test_a_threshold_on_the_grid_holds_its_level_despite_rounding(c):
    K = constants(8, c, c, c)
    assert K['K3'] == pytest.approx(1 / math.sqrt(15 / 64 + 1e-6) - 1)
    assert math.isnan(constants(8, 7 / 3 * c, c, c)['K2'])  # 7/8, which X2 leaves out


# ---- the bound


def test_surrogate_by_hand():
    """Rewards 1, 0, 0, 0: Â = 3/√3, -1/√3 (three times), ε aside; ρ = 2, 1, 1/2, 1/2."""
    groups = [group([1, 0, 0, 0], [[-1.0]] * 4)]
    now = log_ratios(groups, one_token_groups([[2.0, 1.0, 0.5, 0.5]])[1])
    start = log_ratios(groups, one_token_groups([[1.0, 1.0, 0.8, 1.0]])[1])
    got = bound_terms(groups, start, now, K=2.0)
    L = (2 * 3 - 1 - 0.5 - 0.5) / math.sqrt(3) / 4
    assert got.surrogate == pytest.approx(L, rel=1e-5)
    assert got.tv_now == pytest.approx((0.5 + 0.5) / 4, rel=1e-5) and got.tv_start == pytest.approx(0.2 / 4, rel=1e-5)
    assert got.value == pytest.approx(L - 2 * 2 * 0.25 - 2 * 0.05, abs=1e-5)
    assert bound_terms(groups, start, now, K=2.0, factor=1.0).value == pytest.approx(L - 2 * 0.25 - 0.05, abs=1e-5)


@pytest.mark.parametrize('seed', range(20))
def test_the_bound_holds_where_its_terms_are_exact(seed):
    """A group that is the whole distribution α (uniform over 8 answers): every estimate is an exact value."""
    rng = np.random.default_rng(seed)
    k = int(rng.integers(1, 8))
    right = np.array([1.0] * k + [0.0] * (8 - k))
    g = group(right, [[-math.log(8)]] * 8)
    start, now = (rng.dirichlet(np.full(8, concentration)) for concentration in (20.0, 2.0))
    gaps = [log_ratios([g], [[np.log([p]) for p in policy]]) for policy in (start, now)]
    K = constants(8, 1 / 8, k / 8, k / 8)['K3']
    got = bound_terms([g], *gaps, K)
    sigma = math.sqrt(right.var() + 1e-6)
    assert got.surrogate == pytest.approx((now @ right - right.mean()) / sigma, rel=1e-5, abs=1e-7)
    assert got.tv_now == pytest.approx(0.5 * np.abs(now - 1 / 8).sum(), rel=1e-5)
    assert got.tv_start == pytest.approx(0.5 * np.abs(start - 1 / 8).sum(), rel=1e-5)
    gain = (now - start) @ right
    assert got.value <= bound_terms([g], *gaps, K, factor=1.0).value <= gain + 1e-6


# ---- the row


def test_on_policy_row():
    groups, logp = one_token_groups([[1.0] * 8] * 2)
    batch = make_batch(groups, ['x1', 'x1'])
    assert monitor(batch, logp, None, **THRESHOLDS) == {
        'theory/K1': pytest.approx(2.0237, abs=5e-5),
        'theory/tv_token/x1': 0, 'theory/tv_sequence/x1': 0, 'theory/tv_bound/x1': 0, 'theory/kl_sequence/x1': 0,
        'theory/kl_sequence_k1/x1': 0, 'theory/ess_sequence/x1': 1,
        'theory/delta1/mean': 0, 'theory/delta1/p95': 0, 'theory/delta1/max': 0,
        'theory/surrogate/x1': 0, 'theory/bound/x1': 0,
    }  # fmt: skip


def test_delta_by_hand():
    """Eleven prompts of TV 0, 0.1, … 0.9 and 0.95: the 95th percentile lies halfway between the two largest."""
    tvs = [0.1 * i for i in range(10)] + [0.95]
    groups, logp = one_token_groups([[1 - tv] * 2 for tv in tvs] + [[0.7, 0.5]])
    row = monitor(make_batch(groups, ['x1'] * 11 + ['x3']), logp, None, c1=1 / 8, low=0.5, high=0.5)
    assert row['theory/delta1/mean'] == pytest.approx(np.mean(tvs), rel=1e-5) == row['theory/tv_sequence/x1']
    assert row['theory/delta1/p95'] == pytest.approx((0.9 + 0.95) / 2, rel=1e-5)
    assert row['theory/delta1/max'] == pytest.approx(0.95, rel=1e-5)
    # The mean over a prompt's responses comes first, so δ3 of the one prompt is 0.4 throughout.
    for name in ('mean', 'p95', 'max'):
        assert row[f'theory/delta3/{name}'] == pytest.approx(0.4, rel=1e-5)


def test_row_of_all_origins_after_an_update():
    """Each origin reads its own groups, thresholds and log-probs, whatever the order of the batch."""
    G = 8
    groups = [level(k, G) for k in (4, 2, 4, 4)]
    batch = make_batch(groups, ['x3', 'x1', 'x2', 'replay'])
    before, after = (
        [[np.full(1, math.log(ratio) - 1)] * G for ratio in ratios] for ratios in ([0.5, 0.9, 1.0, 0.1], [0.4, 0.8, 0.7, 0.1])
    )
    row = monitor(batch, before, after, c1=1 / 8, low=0.5, high=0.5)
    K = constants(G, 1 / 8, 0.5, 0.5)
    for name in ('K1', 'K2', 'K2_printed', 'K3', 'K3_printed'):
        assert row[f'theory/{name}'] == K[name]
    for origin, k, start, now in (('x1', 'K1', 0.1, 0.2), ('x2', 'K2', 0.0, 0.3), ('x3', 'K3', 0.5, 0.6)):
        assert row[f'theory/tv_sequence/{origin}'] == pytest.approx(start, abs=1e-6)
        assert row[f'theory/tv_sequence_after/{origin}'] == pytest.approx(now, abs=1e-6)
        assert row[f'theory/surrogate/{origin}'] == pytest.approx(0, abs=1e-6)  # one ratio for right and wrong alike
        assert row[f'theory/bound/{origin}'] == pytest.approx(-2 * K[k] * now - 2 * start, abs=1e-5)
    assert row['theory/delta1/max'] == pytest.approx(0.1, abs=1e-6) and row['theory/delta3/max'] == pytest.approx(0.5, abs=1e-6)
    assert not [name for name in row if 'replay' in name or 'delta2' in name]
    assert all(isinstance(value, float) for value in row.values())


def test_traces_do_not_count():
    """Nobody knows the policy that wrote them: a group is what remains of it without them, and a group of a trace alone is not there."""
    groups, logp = one_token_groups([[0.9, 0.5, 0.7, 0.8], [0.6, 0.8, 0.9, 0.5]])
    groups = [dataclasses.replace(g, answers=(None,) * 4) for g in groups]
    written = graded(groups[0].prompt, [trace(np.arange(2, dtype=np.int32))], right(1, 1))
    mixed = joined(written, taken(groups[0], range(1, 4)))
    batch = make_batch([mixed, groups[1], written], ['x1', 'x1', 'demonstrations'])
    of_trace = np.full(2, -3.0)
    before = [[of_trace, *logp[0][1:]], logp[1], [of_trace]]
    own = make_batch([taken(groups[0], range(1, 4)), groups[1]], ['x1', 'x1'])
    of_own = [logp[0][1:], logp[1]]
    assert monitor(batch, before, before, **THRESHOLDS) == monitor(own, of_own, of_own, **THRESHOLDS)


def test_an_update_towards_right_answers_raises_the_surrogate():
    groups, before = one_token_groups([[1.0, 1.0]])
    _, after = one_token_groups([[1.3, 0.7]])
    row = monitor(make_batch(groups, ['x1']), before, after, **THRESHOLDS)
    assert row['theory/surrogate/x1'] == pytest.approx(0, abs=1e-6)
    assert row['theory/surrogate_after/x1'] == pytest.approx(0.3, rel=1e-4)
    assert row['theory/bound/x1'] == pytest.approx(0.3 - 2 * 0.15, abs=1e-5)  # K1 = 1 at G = 2


def test_tv_bound_takes_the_lower_of_the_two():
    groups, logp = one_token_groups([[0.9] * 2, [math.exp(-8)] * 2])
    kl = [r - 1 - math.log(r) for r in (0.9, math.exp(-8))]
    row = monitor(make_batch(groups, ['x1', 'x1']), logp, None, **THRESHOLDS)
    assert row['theory/tv_bound/x1'] == pytest.approx((math.sqrt(kl[0] / 2) + math.sqrt(1 - math.exp(-kl[1]))) / 2, rel=1e-4)


def test_masked_tokens_do_not_count():
    logps = [[-1.0, -2.0, -0.5], [-1.5, -0.1, -0.7]]
    masks = [[True, False, True], [False, True, True]]
    kept = group([1, 0], [[-1.0, -0.5], [-0.1, -0.7]])
    masked = group([1, 0], logps, masks)
    now = [np.array([-0.9, -9.0, -0.9], np.float32), np.array([0.0, -0.3, -0.2], np.float32)]
    now_kept = [np.array([-0.9, -0.9], np.float32), np.array([-0.3, -0.2], np.float32)]

    def row_of(g, logp):
        return monitor(make_batch([g], ['x3']), [logp], [logp], c1=1 / 8, low=0.5, high=0.5)

    assert row_of(masked, now) == row_of(kept, now_kept)
    assert row_of(kept, now_kept)['theory/tv_sequence/x3'] > 0.05
    # The learner scores such tokens as 0; what stands there is never read.
    blank = [np.where(mask, logp, np.nan) for mask, logp in zip(masks, now, strict=True)]
    assert row_of(masked, blank) == row_of(masked, now)


def test_the_bound_leaves_out_what_the_theorem_does_not_cover():
    groups, logp = one_token_groups([[0.5, 0.5], [1.0, 1.0]])
    groups[0] = level(0, 2)
    row = monitor(make_batch(groups, ['x1', 'x1']), logp, None, **THRESHOLDS)
    assert row['theory/bound/x1'] == pytest.approx(0, abs=1e-5) and row['theory/tv_sequence/x1'] == pytest.approx(0.25, rel=1e-5)
    alone = monitor(make_batch(groups[:1], ['x1']), logp[:1], logp[:1], **THRESHOLDS)
    assert 'theory/tv_sequence/x1' in alone and 'theory/bound/x1' not in alone and 'theory/surrogate_after/x1' not in alone


def test_an_empty_batch_gives_no_keys():
    assert monitor(make_batch([], []), [], [], **THRESHOLDS) == {}


def test_log_probs_of_another_batch_are_refused():
    groups, logp = one_token_groups([[1.0] * 2])
    with pytest.raises(ValueError):
        monitor(make_batch(groups, ['x1']), [logp[0][:1]], None, **THRESHOLDS)


def test_monitors_are_numpy_alone():
    nodes = list(ast.walk(ast.parse(Path(theory.__file__).read_text('utf-8'))))
    names = {n.module for n in nodes if isinstance(n, ast.ImportFrom)}
    names |= {alias.name for n in nodes if isinstance(n, ast.Import) for alias in n.names}
    assert {name for name in names if name.split('.')[0] not in sys.stdlib_module_names} == {'numpy', 'bapo_jax.groups', 'bapo_jax.replay.bapo'}
