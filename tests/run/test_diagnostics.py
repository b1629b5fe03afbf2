"""A batch is scored around its update at steps that are due, and nothing of the step changes."""

import types
from collections import Counter

import pytest
from group_builders import make_group

from bapo_jax.config import default_config
from bapo_jax.groups import make_batch
from bapo_jax.learner.objective import PROXIMAL
from bapo_jax.run.diagnostics import Diagnostics
from bapo_jax.run.run import Step
from bapo_jax.run.theory import monitor

BATCH = make_batch([make_group(1, 3), make_group(2, 4)], ['x1', 'x3'])


class Scoring:
    """A learner that notes whom it scores; the log-probs under policy p are those of the behaviour policy plus p."""

    def __init__(self):
        self.scored = []

    def score_batch(self, role, params, batch):
        self.scored.append((role, params))
        return [[r.logp + r.logp.dtype.type(params) for r in g.responses] for g in batch.groups]


@pytest.fixture
def step_of():
    """A function of a step's number, its batch and thresholds: (the step, its learner), after an update from policy 0 to -0.1."""

    def make(number, batch=BATCH, thresholds={}, every=3, rollouts=False):
        config, learner, now = default_config(), Scoring(), Step(0, number, Counter())
        config.log.theory_every, now.writes_rollouts = every, rollouts
        state = types.SimpleNamespace(theta=types.SimpleNamespace(params=0.0))
        with Diagnostics(config, (), learner, None, state).around_update(now, (), batch, thresholds):
            now.record({'actor/loss': 1.0})
            state.theta = types.SimpleNamespace(params=-0.1)
        assert state.theta.params == -0.1
        return now, learner

    return make


def test_a_step_that_is_due_is_scored_before_and_after_its_update_and_records_the_monitors(step_of):
    now, learner = step_of(6, thresholds={'bapo/c2': 0.25, 'bapo/c3': 0.5})
    assert learner.scored == [(PROXIMAL, 0.0), (PROXIMAL, -0.1)]
    before, after = (Scoring().score_batch(PROXIMAL, params, BATCH) for params in (0.0, -0.1))
    want = monitor(BATCH, before, after, c1=1 / 8, low=0.25, high=0.5)
    assert now.metrics == {'actor/loss': 1.0, **want}
    assert all(name.startswith('theory/') for name in want) and want['theory/tv_sequence_after/x1'] > 0
    assert now.seconds['timing_s/theory'] > 0


def test_without_thresholds_every_accuracy_may_be_replayed(step_of):
    assert step_of(3)[0].metrics == step_of(3, thresholds={'bapo/c2': 0.0, 'bapo/c3': 1.0})[0].metrics


@pytest.mark.parametrize('of_step', [{'number': 5}, {'number': 6, 'every': 0}, {'number': 6, 'batch': make_batch([], [])}])
def test_a_step_that_is_not_due_or_trains_on_nothing_is_left_alone(step_of, of_step):
    now, learner = step_of(**of_step)
    assert learner.scored == []
    assert (now.metrics, now.seconds) == ({'actor/loss': 1.0}, Counter())


def test_a_step_whose_rollouts_are_written_scores_what_older_policies_sampled_and_records_nothing(step_of):
    fresh = make_batch([make_group(3, 4, step=4), BATCH.groups[1]], ['x1', 'x3'])
    now, learner = step_of(5, batch=fresh, rollouts=True)
    assert learner.scored == [(PROXIMAL, 0.0)] and now.logp[0] is None
    assert [a.tobytes() for a in now.logp[1]] == [r.logp.tobytes() for r in BATCH.groups[1].responses]
    assert step_of(5, batch=fresh.take([0]), rollouts=True)[1].scored == []
    now, learner = step_of(5, rollouts=True)
    assert learner.scored == [(PROXIMAL, 0.0)]
    assert now.metrics == {'actor/loss': 1.0} and set(now.seconds) == {'timing_s/rollouts'}
    assert [a.tobytes() for g in now.logp for a in g] == [r.logp.tobytes() for g in BATCH.groups for r in g.responses]
    both, learner = step_of(6, rollouts=True)
    assert learner.scored == [(PROXIMAL, 0.0), (PROXIMAL, -0.1)] and both.metrics == step_of(6)[0].metrics


def test_an_update_that_fails_is_not_hidden_and_records_nothing():
    config, now = default_config(), Step(0, 6, Counter())
    config.log.theory_every = 3
    state = types.SimpleNamespace(theta=types.SimpleNamespace(params=0.0))
    with pytest.raises(RuntimeError, match='out of memory'):
        with Diagnostics(config, (), Scoring(), None, state).around_update(now, (), BATCH, {}):
            raise RuntimeError('out of memory')
    assert now.metrics == {}
