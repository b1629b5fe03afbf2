"""MoPPS: the posterior against its unrolled sum, the choice against all candidates sorted, and a state that survives a restart."""

import json
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from bapo_jax.groups import Group, Prompt, Verdict, binary_rewards, sampled
from bapo_jax.prompts import mopps
from bapo_jax.prompts.mopps import Mopps
from bapo_jax.replay import PURPOSES

PROMPTS = [Prompt(100 + i, 'countdown', np.array([i], np.int32), None) for i in range(23)]
RESPONSE = sampled(np.array([1], np.int32), np.array([-1.0], np.float32), 'stop', 0)


def group(prompt: Prompt, k: int, G: int = 8, infra: bool = False) -> Group:
    verdicts = [Verdict.CORRECT] * k + [Verdict.WRONG] * (G - k)
    if infra:
        verdicts[-1] = Verdict.INFRA_ERROR
    return Group(prompt, (RESPONSE,) * G, tuple(verdicts), binary_rewards(verdicts), 0)


def make(batch=3, seed=7, candidates=4, target=0.5, decay=1.0, prompts=PROMPTS) -> Mopps:
    return Mopps(prompts, batch, seed, candidates=candidates, target=target, decay=decay)


def posterior(selector: Mopps) -> dict[int, tuple[float, float]]:
    return {i: (alpha, beta) for i, alpha, beta in json.loads(selector.state())['posterior']}


def answered(prompts, step: int) -> list[Group]:
    """Groups whose k depends on the prompt and the step; every seventh has an infrastructure error."""
    return [group(p, (3 * p.id + step) % 9, infra=(p.id + step) % 7 == 0) for p in prompts]


def ids(prompts) -> list[int]:
    return [p.id for p in prompts]


def run(selector: Mopps, steps: range) -> list[list[int]]:
    asked = []
    for step in steps:
        prompts = selector.next()
        selector.observe(answered(prompts, step))
        asked.append(ids(prompts))
    return asked


def test_the_posterior_by_hand():
    kept, forgetting = make(decay=1.0), make(decay=0.5)
    for selector in (kept, forgetting):
        selector.observe([group(PROMPTS[0], 2), group(PROMPTS[1], 8)])
        selector.observe([group(PROMPTS[0], 5)])
    # Prior (1, 1). Everything counts: 1+2+5 and 1+6+3.
    assert posterior(kept) == {100: (8, 10), 101: (9, 1)}
    # Halved: (1, 1) -> (1+2, 1+6) = (3, 7) -> (1.5+.5+5, 3.5+.5+3).
    assert posterior(forgetting) == {100: (7, 7), 101: (9, 1)}


observations = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 8), st.sampled_from([2, 5, 8]), st.booleans()), max_size=40)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(observations, st.sampled_from([1.0, 0.5, 0.9, 0.0]))
def test_the_posterior_is_the_decayed_sum_of_the_evidence(history, decay):
    """Unrolled: α_N - 1 = Σ_i λ^(N-i) s_i n_i over a prompt's N observations, since the prior is a fixed point of the decay."""
    history = [(i, min(k, G), G, infra) for i, k, G, infra in history]
    selector = make(decay=decay)
    for i, k, G, infra in history:
        selector.observe([group(PROMPTS[i], k, G, infra)])
    for i in range(6):
        judged = [(Fraction(k, G), G) for prompt, k, G, infra in history if prompt == i and not infra]
        if not judged:
            assert PROMPTS[i].id not in posterior(selector)
            continue
        powers = [Fraction(decay) ** (len(judged) - 1 - j) for j in range(len(judged))]
        alpha = 1 + sum(power * s * n for power, (s, n) in zip(powers, judged))
        beta = 1 + sum(power * (1 - s) * n for power, (s, n) in zip(powers, judged))
        np.testing.assert_allclose(posterior(selector)[PROMPTS[i].id], (float(alpha), float(beta)), rtol=1e-12)


class Draws:
    """In a generator's place: gives these rates, and remembers whose rates were asked for."""

    def __init__(self, rates):
        self.rates = rates

    def beta(self, alpha, beta):
        self.asked = list(zip(alpha, beta))
        return np.array(self.rates)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0]), min_size=12, max_size=12),
    st.sampled_from([0.0, 0.5, 0.75]), st.integers(1, 3),
)  # fmt: skip
@pytest.mark.slow
def test_the_chosen_are_the_nearest_of_all_candidates(rates, target, observed_steps):
    """Against a sort of (distance, place); 12 candidates, of which 3 are asked, with many equal distances."""
    with pytest.MonkeyPatch.context() as patch:
        selector = make(target=target, decay=0.5)
        run(selector, range(observed_steps))
        known = posterior(selector)
        stream = mopps.ShuffledEpochs(PROMPTS, 12, 7)
        candidates = [stream.next() for _ in range(observed_steps + 1)][-1]
        draws = Draws(rates)
        patch.setattr(np.random, 'default_rng', lambda key: draws)
        chosen = selector.next()
    assert draws.asked == [known.get(p.id, (1, 1)) for p in candidates]
    nearest = sorted(range(12), key=lambda i: ((rates[i] - target) ** 2, i))[:3]
    assert ids(chosen) == [candidates[i].id for i in nearest]
    means = [a / (a + b) for a, b in (draws.asked[i] for i in nearest)]
    assert selector.metrics() == {
        'prompts/posterior_mean': pytest.approx(sum(means) / 3), 'prompts/candidates': 12, 'prompts/seen': len(known),
    }  # fmt: skip


def test_prompts_of_medium_difficulty_are_asked_most():
    """Eight prompts are never, eight sometimes and seven always solved; the middle ones are four fifths of what is asked."""
    selector = make(candidates=4)
    counts = np.zeros(3)
    for step in range(60):
        prompts = selector.next()
        selector.observe([group(p, 4 * ((p.id - 100) // 8)) for p in prompts])
        if step >= 20:
            counts[[(p.id - 100) // 8 for p in prompts]] += 1
    assert counts[1] > 0.8 * counts.sum()


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 23), st.integers(1, 30), st.integers(0, 99))
def test_a_step_asks_no_prompt_twice(batch, candidates, seed):
    selector = make(batch=batch, candidates=candidates, seed=seed)
    for asked in run(selector, range(4)):
        assert len(asked) == len(set(asked)) == batch


def test_a_pool_smaller_than_the_candidates_is_drawn_whole():
    selector = make(batch=3, candidates=16)
    for _ in range(3):
        selector.next()
        assert selector.metrics()['prompts/candidates'] == 23
    assert set(ids(make(batch=23).next())) == set(ids(PROMPTS))


def test_one_candidate_a_place_is_shuffled_epochs():
    stream, selector = mopps.ShuffledEpochs(PROMPTS, 3, 7), make(candidates=1)
    for asked in run(selector, range(9)):
        assert set(asked) == set(ids(stream.next()))


def test_the_choice_depends_on_the_seed_and_the_results_alone():
    first = run(make(decay=0.5), range(9))
    assert run(make(decay=0.5), range(9)) == first
    assert run(make(decay=0.5, seed=8), range(9)) != first


def test_each_draw_has_a_generator_of_its_own_which_no_step_has(monkeypatch):
    keys, default_rng = [], np.random.default_rng
    monkeypatch.setattr(np.random, 'default_rng', lambda key: keys.append(key) or default_rng(key))
    selector, again = make(), make()
    run(selector, range(5))
    again.restore(selector.state())
    run(again, range(5))
    of_steps = [[7, step, purpose] for step in range(12) for purpose in range(len(PURPOSES))]
    numbers = {default_rng(key).random() for key in keys + of_steps}
    assert len(keys) == 10 and len(numbers) == len(keys) + len(of_steps)


@pytest.mark.parametrize('consumed', [0, 1, 2, 5, 9])
def test_a_restored_selector_goes_on_where_it_stood(consumed):
    selector = make(decay=0.9)
    run(selector, range(consumed))
    saved = selector.state()
    again = make(decay=0.9)
    run(again, range(3))  # what it held before is forgotten
    again.restore(saved)
    assert again.state() == saved and posterior(again) == posterior(selector)
    assert again.metrics()['prompts/seen'] == selector.metrics()['prompts/seen']
    assert run(again, range(consumed, 20)) == run(selector, range(consumed, 20))
    assert again.state() == selector.state()


def test_a_state_saved_between_a_draw_and_its_results_is_exact():
    selector, again = make(), make()
    run(selector, range(4))
    prompts = selector.next()
    again.restore(selector.state())
    for s in (selector, again):
        s.observe(answered(prompts, 4))
    assert run(again, range(5, 12)) == run(selector, range(5, 12))


def test_the_state_holds_observed_prompts_only():
    selector = make()
    asked = sum(run(selector, range(2)), [])
    broken = {i for step, i in enumerate(asked) if (i + step // 3) % 7 == 0}
    assert set(posterior(selector)) == set(asked) - broken
    assert len(asked) < len(PROMPTS)


def test_fewer_prompts_than_a_batch_are_refused_with_the_fields_named():
    with pytest.raises(ValueError, match=r'23 training prompts.*learner\.batch_groups=24.*prompts\.mopps\.candidates=4.*task\.limit'):
        make(batch=24)
