"""X2's simulation: its integrals are the means of drawn problems in the real buffer; its page says them."""

import numpy as np
import pytest
from group_builders import graded, make_group, right

from bapo_jax.groups import Prompt
from bapo_jax.replay.bapo import improved
from bapo_jax.replay.buffer import ReplayBuffer
from studies.x2_map import calibrate, page
from studies.x2_map.simulate import (
    ASKED, EVERY, FAILED, GROUP, PAPER, Policy, Retry, accuracy, again, delayed, fifo, gain, hard, mixed,
    with_accuracy,
)  # fmt: skip

BATCH = 64
MOST_LOST = -100 * ASKED / (EVERY + ASKED)  # where nothing that is asked again is ever mixed


def drawn(policy, ease, hopeless, rng):
    """How many of a group are right, of each problem."""
    p = np.where(hopeless, 0.0, 1 / (1 + np.exp(-policy.ability - policy.spread * ease)))
    return rng.binomial(GROUP, p)


@pytest.mark.parametrize('most', [PAPER, FAILED])
def test_the_integrals_are_the_means_of_drawn_problems(most):
    policy, lag, rng, n = Policy(0.5, 2.0, 0.2, 0.06, 0.04), 20, np.random.default_rng(0), 400_000
    ease, hopeless = rng.standard_normal(n), rng.random(n) < policy.hopeless
    then, now = (drawn(p, ease, hopeless, rng) for p in (policy.after(-lag), policy))
    was_hard = then <= most
    for exact, seen in (
        (accuracy(policy), now / GROUP),
        (mixed(policy), (now > 0) & (now < GROUP)),
        (hard(policy.after(-lag), most), was_hard),
        (again(policy, lag, most), ((now > most) & (now < GROUP))[was_hard]),
    ):
        assert exact == pytest.approx(seen.mean(), abs=4 * seen.std() / np.sqrt(len(seen)))


@pytest.mark.parametrize(
    'most, start', [(PAPER, Policy(-1.5, 2.0, 0.1, 0.02, 0.01)), (FAILED, Policy(0.0, 1.0, 0.02, 0.02))]
)
def test_by_fifo_is_what_the_real_buffer_does(most, start):
    rng, buffer = np.random.default_rng(1), ReplayBuffer(BATCH, BATCH, 1, most / GROUP)
    responses, ease, hopeless = make_group(0, 0).responses, [], []
    asked, entered, fresh, ages = [], [], [], []  # pairs: seen, expected

    def groups(policy, ids, step):
        counts = drawn(policy, np.take(ease, ids), np.take(hopeless, ids), rng)
        prompts = (Prompt(i, '', np.zeros(0, np.int32), None) for i in ids)
        return [graded(p, responses, right(k, GROUP), step) for p, k in zip(prompts, counts, strict=True)]

    for step in range(1, 251):
        policy = start.after(step)
        if step % EVERY == 0 and len(buffer.bad) == BATCH:
            retry = fifo(policy, most)
            found = groups(policy, [prompt.id for prompt in buffer.hard_prompts(rng, BATCH // 2)], step)
            asked.append((len(found), retry.asked * EVERY * BATCH))
            entered.append((len(improved(found, most / GROUP)), retry.enters * len(found)))
            ages.append((buffer.metrics(step)['buffer/bad/age_mean'], retry.lag))
        ease += rng.standard_normal(BATCH).tolist()
        hopeless += (rng.random(BATCH) < start.hopeless).tolist()
        new = groups(policy, range(len(ease) - BATCH, len(ease)), step)
        fresh.append((sum(0 < g.correct < GROUP for g in new), BATCH * mixed(policy)))
        buffer.add(new, step)
    assert len(asked) > 30 and all(seen == expected for seen, expected in asked)
    for counts in (entered, fresh):
        # A prompt may be asked several times, so the error is somewhat above that of independent draws.
        seen, expected = np.sum(counts, axis=0)
        assert seen == pytest.approx(expected, abs=4 * np.sqrt(expected))
    seen, expected = np.mean(ages, axis=0)
    assert seen == pytest.approx(expected, rel=0.1) and seen > 1.1


def test_problems_that_are_all_alike_bring_nothing():
    """A failure says nothing if all have one probability: X2 can only lose what c1 shuts out."""
    policy = Policy(-1.0, 0.0)
    p = accuracy(policy)
    one = GROUP * p * (1 - p) ** (GROUP - 1)
    assert gain(policy, fifo(policy, FAILED)) == pytest.approx(0)
    assert gain(policy, fifo(policy, PAPER)) == pytest.approx(MOST_LOST * one / mixed(policy))


def test_a_hopeless_share_among_problems_that_are_alike():
    """P(hopeless | 0 of 8) = h / (h + (1 - h)(1 - p)^8), by Bayes."""
    policy = Policy(-0.5, 0.0, 0.3)
    failed = 0.7 * (1 - accuracy(policy) / 0.7) ** GROUP
    assert hard(policy, FAILED) == pytest.approx(0.3 + failed)
    lost = MOST_LOST * (1 - failed / (0.3 + failed) / 0.7)
    assert gain(policy, fifo(policy, FAILED)) == pytest.approx(lost)
    assert gain(policy, Retry(ASKED / EVERY, 0.0, 1)) == pytest.approx(MOST_LOST)


@pytest.mark.parametrize('most', [PAPER, FAILED])
@pytest.mark.parametrize('policy', [Policy(-2.0, 1.0), Policy(0.0, 2.0, 0, 0.03), Policy(4.0, 3.0, 0, 0.1)])
def test_the_more_are_hopeless_the_less_x2_brings(policy, most):
    """At the same ability, by the share that enters; and where as many are asked, by the gain."""
    mixtures = [policy._replace(hopeless=share) for share in (0.1, 0.2, 0.4, 0.8)]
    assert np.all(np.diff([again(p, 5, most) / mixed(p) for p in mixtures]) < 0)
    retries = [delayed(p, 5, most) for p in mixtures]
    assert {retry.asked for retry in retries} == {ASKED / EVERY}
    assert np.all(np.diff([gain(p, retry) for p, retry in zip(mixtures, retries, strict=True)]) < 0)


def test_without_growth_waiting_brings_nothing():
    policy = Policy(0.3, 2.0, 0.1)
    assert delayed(policy, 80)[:2] == pytest.approx(delayed(policy, 1)[:2])
    assert again(policy._replace(growth=0.05), 80, FAILED) > again(policy, 80, FAILED)
    found = with_accuracy(0.7, policy)
    assert found.spread == 2.0 and accuracy(found) == pytest.approx(0.7)


def test_a_fit_finds_the_policy_that_answered():
    policy, steps = Policy(-1.5, 1.2, 0.3, 0.03, 0.02), 50
    rng, n = np.random.default_rng(2), 100_000
    ease, hopeless = rng.standard_normal(n), rng.random(n) < policy.hopeless
    both = [drawn(p, ease, hopeless, rng) for p in (policy, policy.after(steps))]
    asked = calibrate.Answers(calibrate.pairs([both], GROUP), steps)
    found = calibrate.fit(asked)
    assert found.first == pytest.approx(policy, rel=0.05) and asked.counts.sum() == n
    assert calibrate.fit(asked, same_spread=True).loss > found.loss + 100


def test_the_page_says_what_the_simulation_says():
    text, fits, same = page.PAGE.read_text('utf-8') + page.PLAN.read_text('utf-8'), page.all_fits(), page.all_fits(same_spread=True)
    for name, table in page.tables(fits).items():
        assert f'<!-- {name} -->\n{table}\n<!-- /{name} -->' in text
    text = ' '.join(text.split())
    costs = [-x for percent in page.MIDDLE for h in page.HOPELESS for x in page.gains(percent, h, PAPER)]
    assert f'right X2 costs {min(costs):.0f} to {max(costs):.0f} %, and less only' in text
    at_most = [max(page.gains(*at, PAPER)) for at in ((90, 0), (95, 0.02), (95, 0))]
    assert 'at most {:.0f} % at 90, {:.0f} to {:.0f} at 95.'.format(*at_most) in text
    assert f'arm RX measured {calibrate.measured_gain():.1f}.' in text
    seen, fixed = calibrate.checks(fits), calibrate.checks(same)
    last, other = (of['135M, CD-23'][-1] for of in (seen, fixed))
    shares = page.percents(last.seen_shares[0], last.failed, other.failed)
    assert '{} % were mixed; fitted (held out) {}, with a fixed spread {}.'.format(*shares) in text
    last = seen['135M, arithmetic'][-1]
    shares = page.percents(*last.seen_shares, last.failed, last.fresh)
    assert 'Of arithmetic {}, fresh {}; fitted {} and {}.'.format(*shares) in text
    assert last.lag == other.lag == 20
