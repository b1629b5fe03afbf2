"""Hard prompts that wait for m steps: who is asked when, by hand, and the capacity and schedule that this needs."""

import numpy as np
from group_builders import make_group

from bapo_jax.config import default_config, resolve
from bapo_jax.replay.bapo import Bapo
from bapo_jax.replay.kinds import make_retries
from bapo_jax.replay.retries import Delayed, Uniform
from bapo_jax.rollout.schedule import schedule_of


def config(reevaluate='delayed', m=3, **replay):
    c = default_config()
    c.model.path, c.learner.batch_groups = 'unused', 4
    c.learner.mini_batch_groups = 4
    c.replay.update({'reevaluate': reevaluate, 'reevaluate_every': m, 'fresh_filter': 'range', **replay})
    return resolve(c)


def rng(purpose):
    return np.random.default_rng(0)


def asked_by(bapo, step):
    return [begun.prompt.id for begun in bapo.hard_prompts(step, rng)]


def run(bapo, steps, again=lambda i: 0):
    """Prompts 10 t … 10 t + 3 fail at step t, and get `again(id)` of 8 right when they are asked again; asked at each step."""
    asked = {}
    for step in range(1, steps + 1):
        asked[step] = asked_by(bapo, step)
        fresh = [make_group(10 * step + i, 0, step=step) for i in range(4)]
        reevaluated = [make_group(i, again(i), step=step) for i in asked[step]]
        batch = bapo.compose(step, fresh, reevaluated, rng, None)
        asked[step, 'x2'] = [g.prompt.id for g in batch.of_origin('x2')]
        bapo.add(step, fresh, batch)
    return asked


def made(c):
    return Bapo(c.replay, c.learner.batch_groups, schedule_of(c, 40).reevaluation_due, make_retries(c, 40, None))


def test_each_is_asked_once_when_m_steps_have_passed():
    asked = run(made(config(m=3)), 7)
    assert [asked[step] for step in range(1, 8)] == [[], [], [], [10, 11, 12, 13], [20, 21, 22, 23], [30, 31, 32, 33], [40, 41, 42, 43]]


def test_those_that_wait_longest_come_first_and_the_others_wait_on():
    asked = run(made(config(m=3, max_reevaluate=3, bad_capacity=100)), 6)
    assert [asked[step] for step in (4, 5, 6)] == [[10, 11, 12], [13, 20, 21], [22, 23, 30]]


def test_what_is_solved_sometimes_by_then_enters_x2():
    asked = run(made(config(m=2)), 4, again=lambda i: 3 if i % 2 else 0)
    assert asked[3] == [10, 11, 12, 13] and sorted(asked[3, 'x2']) == [11, 13]


def test_a_prompt_that_a_fresh_group_has_solved_meanwhile_is_not_asked():
    bapo = made(config(m=2))
    for step, right in ((1, 0), (2, 4)):
        fresh = [make_group(7, right, step=step)]
        bapo.add(step, fresh, bapo.compose(step, fresh, [], rng, None))
    assert asked_by(bapo, 3) == asked_by(bapo, 4) == []


def test_the_papers_rule_asks_again_whatever_m_is():
    """B_bad holds B prompts, so those of the step before are the only ones left after m steps."""
    asked = run(made(config('uniform', m=3)), 6)
    assert [asked[step] for step in (3, 6)] == [[20, 21, 22, 23], [50, 51, 52, 53]] and not asked[4]


def test_capacity_and_schedule_follow():
    delayed, uniform = config(m=5), config('uniform', m=5)
    assert (delayed.replay.bad_capacity, uniform.replay.bad_capacity) == (6 * 4, 4)
    assert [schedule_of(c, 9).reevaluate_every for c in (delayed, uniform, config(m=5, use_x2=False))] == [1, 5, 0]
    kinds = [type(make_retries(c, 40, None)) for c in (delayed, uniform)]
    assert kinds == [Delayed, Uniform]
