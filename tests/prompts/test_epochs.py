"""The prompt stream: every prompt once an epoch, in a new order each, and a position that survives a restart."""

import numpy as np
import pytest

from bapo_jax.groups import Prompt
from bapo_jax.prompts.epochs import ShuffledEpochs

PROMPTS = [Prompt(i, 'countdown', np.array([i], np.int32), None) for i in range(23)]


def ids(selector: ShuffledEpochs, steps: int) -> list[list[int]]:
    return [[p.id for p in selector.next()] for _ in range(steps)]


def test_an_epoch_asks_no_prompt_twice_and_each_epoch_has_its_own_order():
    drawn = ids(ShuffledEpochs(PROMPTS, 5, seed=1), 8)
    first, second = sum(drawn[:4], []), sum(drawn[4:], [])
    assert len(set(first)) == len(first) == len(set(second)) == len(second) == 20
    assert first != second


def test_the_order_depends_on_the_seed_alone():
    assert ids(ShuffledEpochs(PROMPTS, 5, seed=1), 6) == ids(ShuffledEpochs(PROMPTS, 5, seed=1), 6)
    assert ids(ShuffledEpochs(PROMPTS, 5, seed=1), 6) != ids(ShuffledEpochs(PROMPTS, 5, seed=2), 6)


@pytest.mark.parametrize('consumed', [0, 1, 4, 7])
def test_a_restored_stream_goes_on_where_it_stood(consumed):
    selector = ShuffledEpochs(PROMPTS, 5, seed=1)
    ids(selector, consumed)
    again = ShuffledEpochs(PROMPTS, 5, seed=1)
    again.restore(selector.state())
    assert ids(again, 6) == ids(selector, 6)


def test_fewer_prompts_than_a_batch_are_refused_with_the_fields_named():
    with pytest.raises(ValueError, match=r'23 training prompts.*learner\.batch_groups=24.*task\.limit'):
        ShuffledEpochs(PROMPTS, 24, seed=1)
