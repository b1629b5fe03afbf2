"""A draw names one use of randomness. `generate` waits for what `ask` promises. Sampled image tokens are not trained on."""

import itertools
from concurrent.futures import Future
from threading import Timer

import jax
import pytest

from bapo_jax.rollout.engine import (
    EVALUATION, FRESH, PROBE, REEVALUATION, TRACKING, Draw, Engine, RolloutError, Sampling,
)  # fmt: skip


def bits(draw):
    return tuple(jax.random.key_data(draw.key()).tolist())


def test_every_seed_step_and_purpose_has_a_key_of_its_own_that_comes_again():
    draws = [Draw(*d) for d in itertools.product((0, 1), (0, 1, 2), (FRESH, REEVALUATION, EVALUATION, TRACKING, PROBE))]
    keys = [bits(draw) for draw in draws]
    assert len(set(keys)) == len(draws)
    assert keys == [bits(draw) for draw in draws]


class Promises(Engine):
    """Promises the futures that it is given."""

    def __init__(self, futures):
        self._futures = futures

    def load(self, params, version):
        pass

    def ask(self, prompts, group_size, sampling, draws):
        return self._futures

    def close(self):
        pass


def generate(futures):
    return Promises(futures).generate([], 2, Sampling(1.0, 4), [])


def test_generate_gives_the_groups_in_their_order_whichever_comes_first():
    first, second = Future(), Future()
    second.set_result(('b', 'c'))
    Timer(0.05, first.set_result, [('a',)]).start()
    assert generate([first, second]) == [('a',), ('b', 'c')]


def test_generate_raises_what_failed_and_gives_up_the_others():
    pending, failed, done = Future(), Future(), Future()
    done.set_result(('a',))
    failed.set_exception(RolloutError('nobody answers'))
    with pytest.raises(RolloutError, match='nobody answers'):
        generate([pending, failed, done])
    assert pending.cancelled()
