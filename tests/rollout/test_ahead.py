"""Rollouts ahead of time: the order of questions, what the selector knows, and where a run that stops goes on."""

import threading

import numpy as np
import pytest

from bapo_jax.groups import Group, Prompt, Response, Verdict
from bapo_jax.rollout.ahead import Rollouts
from bapo_jax.rollout.collect import Collected

RESPONSE = Response(np.array([1], np.int32), np.array([-1.0], np.float32), 'stop', 0)


class Counting:
    """A selector that counts up, and whose state is what it was asked and told."""

    def __init__(self):
        self.events = []

    def next(self):
        self.events.append('next')
        first = 2 * self.events.count('next')
        return [Prompt(i, 'countdown', np.array([1], np.int32), {}) for i in (first, first + 1)]

    def observe(self, groups):
        self.events.append([g.prompt.id for g in groups])

    def state(self):
        return str(self.events)


def judged(step, prompts, hard):
    return Collected([Group(p, (RESPONSE,), (Verdict.WRONG,), step) for p in [*prompts, *hard]], 0.5, 0.25)


@pytest.fixture
def rollouts():
    made = []

    def make(ask=judged):
        made.append(Rollouts(Counting(), ask))
        return made[-1]

    yield make
    for r in made:
        r.close()


def ids(groups):
    return [g.prompt.id for g in groups]


def test_steps_begun_early_give_what_steps_taken_one_by_one_give(rollouts):
    late, early = rollouts(), rollouts()
    for step in (1, 2, 3):
        early.begin(step)
    for step in (1, 2, 3):
        a, b = late.take(step), early.take(step)
        assert ids(a.fresh) == ids(b.fresh) == [2 * step, 2 * step + 1]
        assert {g.step for g in b.fresh} == {step}
        assert a.selector == b.selector


def test_the_selector_observes_a_step_before_it_is_asked_for_the_next(rollouts):
    r = rollouts()
    for step in (1, 2):
        r.begin(step)
    r.take(1)
    assert r.take(2).selector == str(['next', [2, 3], 'next', [4, 5]])


def test_a_step_is_answered_while_the_one_before_is_in_use(rollouts):
    asked = threading.Event()

    def ask(step, prompts, hard):
        if step == 2:
            asked.set()
        return judged(step, prompts, hard)

    r = rollouts(ask)
    r.take(1)
    assert not asked.is_set()
    r.begin(2)
    assert asked.wait(10)  # nobody has taken it


def test_hard_prompts_go_out_with_the_fresh_ones_and_are_not_shown_to_the_selector(rollouts):
    r = rollouts()
    answered = r.take(1, [Prompt(77, 'countdown', np.array([1], np.int32), {})])
    assert ids(answered.fresh) == [2, 3] and ids(answered.reevaluated) == [77]
    assert answered.selector == str(['next', [2, 3]])


def test_hard_prompts_cannot_join_a_step_that_was_begun(rollouts):
    r = rollouts()
    r.begin(1)
    with pytest.raises(RuntimeError, match='step 1 was begun without its hard prompts'):
        r.take(1, [Prompt(77, 'countdown', np.array([1], np.int32), {})])


def test_what_the_engine_raises_reaches_whoever_takes_the_step(rollouts):
    def ask(step, prompts, hard):
        raise OSError('the engine is gone')

    r = rollouts(ask)
    r.begin(1)
    with pytest.raises(OSError, match='the engine is gone'):
        r.take(1)


def test_close_drops_steps_that_have_not_begun(rollouts):
    release, steps = threading.Event(), []

    def ask(step, prompts, hard):
        steps.append(step)
        assert release.wait(10)
        return judged(step, prompts, hard)

    r = rollouts(ask)
    for step in (1, 2, 3):
        r.begin(step)
    threading.Timer(0.1, release.set).start()
    r.close()
    assert steps == [1]
