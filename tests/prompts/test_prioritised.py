"""Prioritised sampling: frequencies against the enumerated probabilities, the success rate by hand, and a state that survives a restart."""

import itertools
import json

import numpy as np
import pytest

from bapo_jax.groups import Group, Prompt, Verdict, binary_rewards, sampled
from bapo_jax.prompts.prioritised import Prioritised
from bapo_jax.prompts.weighted import without_replacement

PROMPTS = [Prompt(100 + i, 'countdown', np.array([i], np.int32), None) for i in range(23)]
RESPONSE = sampled(np.array([1], np.int32), np.array([-1.0], np.float32), 'stop', 0)


def group(prompt: Prompt, k: int, G: int = 8, infra: bool = False) -> Group:
    verdicts = [Verdict.CORRECT] * k + [Verdict.WRONG] * (G - k)
    if infra:
        verdicts[-1] = Verdict.INFRA_ERROR
    return Group(prompt, (RESPONSE,) * G, tuple(verdicts), binary_rewards(verdicts), 0)


def make(prompts=PROMPTS, batch=3, seed=7, rate=0.5) -> Prioritised:
    return Prioritised(prompts, batch, seed, rate=rate)


def success(selector) -> dict[int, float]:
    return dict(map(tuple, json.loads(selector.state())['success']))


def ids(prompts) -> list[int]:
    return [p.id for p in prompts]


def run(selector, steps: range) -> list[list[int]]:
    asked = []
    for step in steps:
        prompts = selector.next()
        selector.observe([group(p, (3 * p.id + step) % 9, infra=(p.id + step) % 7 == 0) for p in prompts])
        asked.append(ids(prompts))
    return asked


def test_the_success_rate_begins_at_0_and_follows_the_groups():
    halving, newest = make(rate=0.5), make(rate=1.0)
    for selector in (halving, newest):
        selector.observe([group(PROMPTS[0], 8), group(PROMPTS[1], 2)])
        selector.observe([group(PROMPTS[0], 4), group(PROMPTS[2], 8, infra=True)])
    assert success(halving) == {100: 0.5, 101: 0.125}  # 0 -> 1/2 -> 1/2 + (1/2 - 1/2)/2; 0 -> 1/8
    assert success(newest) == {100: 0.5, 101: 0.25}
    assert halving.metrics()['prompts/seen'] == 2


def test_ordered_draws_have_the_probabilities_of_drawing_one_after_another():
    """P(i, j) = w_i/Σw · w_j/(Σw - w_i), enumerated; 20,000 draws have a standard error of at most 0.0036."""
    weight = np.array([1.0, 0.5, 0.25, 0.75])
    rng, counts = np.random.default_rng(0), np.zeros((4, 4))
    for _ in range(20_000):
        i, j = without_replacement(rng, np.log(weight), 2)
        counts[i, j] += 1
    want = np.zeros((4, 4))
    for i, j in itertools.permutations(range(4), 2):
        want[i, j] = weight[i] / weight.sum() * weight[j] / (weight.sum() - weight[i])
    np.testing.assert_allclose(counts / 20_000, want, atol=0.015)


def test_a_prompt_is_drawn_in_proportion_to_its_failure_rate():
    """One prompt a step of four with s = 0, 1/4, 1/2 and 1: 4/9, 3/9, 2/9 and never."""
    selector, counts = make(PROMPTS[:4], batch=1, rate=1.0), np.zeros(4)
    selector.observe([group(p, k) for p, k in zip(PROMPTS[1:4], (2, 4, 8))])
    for _ in range(9_000):
        counts[selector.next()[0].id - 100] += 1
    np.testing.assert_allclose(counts / 9_000, [4 / 9, 3 / 9, 2 / 9, 0], atol=0.025)
    assert counts[3] == 0


def test_a_step_asks_no_prompt_twice_even_if_all_are_solved():
    selector = make(batch=23, rate=1.0)
    selector.observe([group(p, 8) for p in PROMPTS[:20]])
    drawn = ids(selector.next())
    assert sorted(drawn) == ids(PROMPTS) and set(drawn[:3]) == {120, 121, 122}  # the unseen first
    assert selector.metrics()['prompts/success_mean'] == pytest.approx(20 / 23)


def test_if_all_are_solved_each_has_the_same_chance():
    """Four prompts with s = 1, one a step: 1/4 each; 4,000 draws have a standard error of 0.007."""
    selector, counts = make(PROMPTS[:4], batch=1, rate=1.0), np.zeros(4)
    selector.observe([group(p, 8) for p in PROMPTS[:4]])
    for _ in range(4_000):
        counts[selector.next()[0].id - 100] += 1
    np.testing.assert_allclose(counts / 4_000, 1 / 4, atol=0.03)


def test_the_draw_depends_on_the_seed_its_number_and_the_results_alone():
    first = run(make(), range(9))
    assert run(make(), range(9)) == first
    assert run(make(seed=8), range(9)) != first
    still = make()
    assert ids(still.next()) != ids(still.next())


@pytest.mark.parametrize('consumed', [0, 1, 5])
def test_a_restored_prioritised_selector_goes_on_where_it_stood(consumed):
    selector, again = make(), make()
    run(selector, range(consumed))
    saved = selector.state()
    run(again, range(3))  # what it held before is forgotten
    again.restore(saved)
    assert again.state() == saved
    assert run(again, range(consumed, 20)) == run(selector, range(consumed, 20))
    assert again.state() == selector.state()


def test_too_few_prompts_to_prioritise_are_refused():
    with pytest.raises(ValueError, match=r'23 training prompts.*learner\.batch_groups=24.*task\.limit'):
        make(batch=24)
