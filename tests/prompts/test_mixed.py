"""Half of a step from prompts that were mixed last: whose turn it is, by hand, and a state that survives a restart."""

import numpy as np
import pytest
from group_builders import graded, right

from bapo_jax.groups import Prompt, Verdict, sampled
from bapo_jax.prompts.epochs import ShuffledEpochs
from bapo_jax.prompts.mixed import MixedLast

PROMPTS = [Prompt(100 + i, 'countdown', np.array([i], np.int32), None) for i in range(23)]
RESPONSES = (sampled(np.array([1], np.int32), np.array([-1.0], np.float32), 'stop', 0),) * 4


def group(prompt, k):
    return graded(prompt, RESPONSES, right(k, 4))


def ids(prompts):
    return [p.id for p in prompts]


def run(selector, steps, mixed=lambda p: p.id % 3 == 0):
    asked = []
    for _ in range(steps):
        asked.append(selector.next())
        selector.observe([group(p, 2 if mixed(p) else 4 * (p.id % 2)) for p in asked[-1]])
    return [ids(prompts) for prompts in asked]


def test_before_any_group_is_mixed_it_is_shuffled_epochs():
    stream = ShuffledEpochs(PROMPTS, 1, 7)
    assert [i for step in run(MixedLast(PROMPTS, 5, 7), 4, mixed=lambda p: False) for i in step] == [stream.next()[0].id for _ in range(20)]


def test_half_of_a_step_was_mixed_last_and_a_prompt_that_is_not_mixed_again_leaves():
    selector = MixedLast(PROMPTS, 6, 7)
    selector.observe([group(p, k) for p, k in zip(PROMPTS, (1, 2, 3, 0, 4, 2))])
    assert set(ids(selector.next())[:3]) < {100, 101, 102, 105} and selector.metrics() == {'prompts/again': 3, 'prompts/mixed': 4}
    selector.observe([group(PROMPTS[0], 0), group(PROMPTS[1], 4), group(PROMPTS[2], 4)])
    assert ids(selector.next())[0] == 105 and selector.metrics() == {'prompts/again': 1, 'prompts/mixed': 1}


def test_no_prompt_is_asked_twice_in_a_step_and_an_epoch_reaches_all():
    steps = run(MixedLast(PROMPTS, 8, 7), 12)
    assert all(len(set(step)) == 8 for step in steps)
    assert set().union(*steps[:5]) == set(ids(PROMPTS))


def test_each_prompt_that_was_mixed_has_the_same_chance():
    """Two of eight a draw: 1/4 each; 4,000 draws have a standard error of 0.007."""
    selector, counts = MixedLast(PROMPTS, 4, 7), np.zeros(8)
    selector.observe([group(p, 2) for p in PROMPTS[:8]])
    for _ in range(4_000):
        for i in ids(selector.next())[:2]:
            counts[i - 100] += 1
    np.testing.assert_allclose(counts / 4_000, 1 / 4, atol=0.03)


def test_a_group_with_an_infrastructure_error_says_nothing():
    selector = MixedLast(PROMPTS, 4, 7)
    selector.observe([graded(PROMPTS[0], RESPONSES, (Verdict.CORRECT, Verdict.WRONG, Verdict.WRONG, Verdict.INFRA_ERROR))])
    assert selector.metrics()['prompts/mixed'] == 0


@pytest.mark.parametrize('consumed', [0, 1, 5])
def test_a_restored_selector_of_mixed_prompts_goes_on_where_it_stood(consumed):
    selector, again = MixedLast(PROMPTS, 6, 7), MixedLast(PROMPTS, 6, 7)
    run(selector, consumed)
    saved = selector.state()
    run(again, 3)
    again.restore(saved)
    assert again.state() == saved
    assert run(again, 9) == run(selector, 9) != run(MixedLast(PROMPTS, 6, 8), 9)


def test_too_few_prompts_for_a_step_are_refused():
    with pytest.raises(ValueError, match=r'23 training prompts.*learner\.batch_groups=24.*task\.limit'):
        MixedLast(PROMPTS, 24, 7)
