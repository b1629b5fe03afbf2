"""Which policy answers, and when: the order of prompts, what the selector knows, which policy the engine holds, and resumption."""

import ast
import dataclasses
import threading

import numpy as np
import pytest
from group_builders import graded

from bapo_jax.config import default_config, resolve
from bapo_jax.groups import Prompt, Response, Verdict, make_batch
from bapo_jax.rollout import rollouts as module
from bapo_jax.rollout.collect import Collected
from bapo_jax.rollout.engine import FRESH, PROBE, REEVALUATION
from bapo_jax.rollout.fidelity import PolicyMismatch
from bapo_jax.rollout.rollouts import Rollouts
from bapo_jax.rollout.schedule import Schedule

RESPONSE = Response(np.array([1], np.int32), np.array([-1.0], np.float32), 'stop', 0)
STEPS = 3


def prompt(number):
    return Prompt(number, 'countdown', np.array([1], np.int32), {})


HARD = [prompt(77)]


class Counting:
    """A selector that counts up, and whose state is what it was asked and told."""

    def __init__(self):
        self.events = []

    def next(self):
        self.events.append('next')
        first = 2 * self.events.count('next')
        return [prompt(first), prompt(first + 1)]

    def observe(self, groups):
        self.events.append([g.prompt.id for g in groups])

    def metrics(self):
        return {'prompts/batches': self.events.count('next')}

    def state(self):
        return str(self.events)

    def restore(self, state):
        self.events = ast.literal_eval(state)


class Noting:
    """An engine that answers nothing and notes which policy it is given."""

    servers = 0

    def __init__(self):
        self.events = []

    def load(self, params, version):
        self.events.append(('load', params, version))

    def close(self):
        self.events.append('closed')


@dataclasses.dataclass
class Trained:
    """θ after step - 1 steps, and α of an older version."""

    step: int
    alpha_version: int = 0
    alpha: str = 'α'
    recent: tuple = ()

    @property
    def theta(self):
        return type('Theta', (), {'params': 'θ'})


def judged(engine, prompts, draws):
    return Collected([graded(p, (RESPONSE,), (Verdict.WRONG,), d.step) for p, d in zip(prompts, draws, strict=True)], 0.5, 0.25)


@pytest.fixture
def rollouts(monkeypatch):
    """A function that makes Rollouts; `ask(engine, prompts, draws)` stands for sampling and judging, and is noted by the engine."""
    made = []

    def make(ask=judged, overlap=False, sync_every=100, servers=0):
        def collect(engine, tokenizer, prompts, group_size, sampling, draws, reward):
            engine.events.append(('ask', [(p.id, d.purpose) for p, d in zip(prompts, draws, strict=True)]))
            return ask(engine, prompts, draws)

        monkeypatch.setattr(module, 'collect', collect)
        config = default_config()
        config.model.path, config.rollout.overlap = 'unused', overlap
        engine, schedule = Noting(), Schedule(STEPS, sync_every, 0, 0)
        engine.servers = servers
        made.append((Rollouts(engine, None, Counting(), schedule, resolve(config), None, probe=prompt(9)), engine))
        return made[-1]

    yield make
    for r, _ in made:
        r.close()


def ids(groups):
    return [g.prompt.id for g in groups]


def test_steps_begun_early_give_what_steps_taken_one_by_one_give(rollouts):
    (late, _), (early, _) = rollouts(), rollouts(overlap=True)
    early.begin_ahead(0)
    for step in (1, 2, 3):
        (a, _), (b, _) = late.take(step, [], Trained(step - 1)), early.take(step, [], Trained(step - 1))
        assert ids(a) == ids(b) == [2 * step, 2 * step + 1]
        assert {g.step for g in b} == {step}
        assert late.state() == early.state()


def test_the_selector_observes_a_step_before_it_is_asked_for_the_next(rollouts):
    r, _ = rollouts(overlap=True)
    r.begin_ahead(0)
    r.take(1, [], Trained(0))
    r.take(2, [], Trained(1))
    assert r.state() == str(['next', [2, 3], 'next', [4, 5]])  # that of step 2, whatever of step 3 is done


def test_a_step_is_answered_while_the_one_before_is_in_use(rollouts):
    asked = threading.Event()

    def ask(engine, prompts, draws):
        if draws[0].step == 2:
            asked.set()
        return judged(engine, prompts, draws)

    r, _ = rollouts(ask, overlap=True)
    r.take(1, [], Trained(0))
    assert not asked.is_set()
    r.begin_ahead(1)
    assert asked.wait(10)  # nobody has taken it


def test_nothing_is_begun_ahead_without_overlap_or_past_a_sync(rollouts):
    for settings in ({'overlap': False}, {'overlap': True, 'sync_every': 2}):
        r, engine = rollouts(**settings)
        r.take(1, [], Trained(0))
        r.begin_ahead(1)
        r._thread.submit(lambda: None).result()  # whatever had been begun would be over
        assert len(engine.events) == 1


def test_hard_prompts_go_out_with_the_fresh_ones_where_alpha_is_theta_and_are_not_shown_to_the_selector(rollouts):
    r, engine = rollouts()
    fresh, reevaluated = r.take(1, HARD, Trained(0, alpha_version=0))
    assert ids(fresh) == [2, 3] and ids(reevaluated) == [77]
    assert r.state() == str(['next', [2, 3]])
    assert engine.events == [('ask', [(2, FRESH), (3, FRESH), (77, REEVALUATION)])]
    assert 'timing_s/reevaluate' not in r.metrics(make_batch([], []), Trained(0), None)


def test_hard_prompts_are_answered_by_theta_and_the_engine_then_holds_alpha_again(rollouts):
    r, engine = rollouts()
    fresh, reevaluated = r.take(3, HARD, Trained(2, alpha_version=0))
    assert ids(fresh) == [2, 3] and ids(reevaluated) == [77] and {g.step for g in reevaluated} == {3}
    assert engine.events == [
        ('ask', [(2, FRESH), (3, FRESH)]), ('load', 'θ', 2), ('ask', [(77, REEVALUATION)]), ('load', 'α', 0)
    ]  # fmt: skip
    assert r.state() == str(['next', [2, 3]])
    row = r.metrics(make_batch([], []), Trained(2), None)
    assert row['prompts/batches'] == 1
    assert (row['timing_s/gen'], row['timing_s/reward'], row['timing_s/reevaluate']) == (0.5, 0.25, 0.75)


def test_hard_prompts_cannot_join_a_step_that_was_begun(rollouts):
    r, _ = rollouts(overlap=True)
    r.begin_ahead(0)
    with pytest.raises(RuntimeError, match='step 1 was begun without its hard prompts'):
        r.take(1, HARD, Trained(0))


def test_an_evaluation_is_answered_by_theta_and_the_engine_then_holds_alpha_again(rollouts):
    r, engine = rollouts()
    with r.held_by_theta(Trained(5, alpha_version=3)) as held:
        assert held is engine
        assert engine.events == [('load', 'θ', 5)]
    assert engine.events == [('load', 'θ', 5), ('load', 'α', 3)]


def test_what_the_engine_raises_reaches_whoever_takes_the_step(rollouts):
    def ask(engine, prompts, draws):
        raise OSError('the engine is gone')

    r, _ = rollouts(ask, overlap=True)
    r.begin_ahead(0)
    with pytest.raises(OSError, match='the engine is gone'):
        r.take(1, [], Trained(0))


def test_close_drops_steps_that_have_not_begun(rollouts):
    release, steps = threading.Event(), []

    def ask(engine, prompts, draws):
        steps.append(draws[0].step)
        assert release.wait(10)
        return judged(engine, prompts, draws)

    r, engine = rollouts(ask, overlap=True)
    r.begin_ahead(0)
    threading.Timer(0.1, release.set).start()
    r.close()
    assert steps == [1]
    assert engine.events[-1] == 'closed'


def test_a_restored_stream_goes_on_after_the_last_step_taken(rollouts):
    """Steps answered ahead of it are answered again."""
    (whole, _), (stopped, _), (continued, _) = rollouts(), rollouts(overlap=True), rollouts()
    whole.take(1, [], Trained(0))
    stopped.begin_ahead(0)
    stopped.take(1, [], Trained(0))
    assert stopped.state() == whole.state()
    continued.restore(stopped.state())
    assert continued.state() == whole.state()
    assert ids(continued.take(2, [], Trained(1))[0]) == ids(whole.take(2, [], Trained(1))[0]) == [4, 5]
    assert continued.state() == whole.state()


def served(difference):
    """Log-probs as the servers gave them, and the trainer's, apart by `difference`."""
    def logprobs(batch):
        logp = np.concatenate([r.logp for g in batch.groups for r in g.responses])
        return logp, logp + np.float32(difference)

    return logprobs


def test_every_server_is_asked_the_probe_after_it_got_alpha(rollouts):
    r, engine = rollouts(servers=2)
    r.serve(Trained(4, alpha_version=4), served(0))
    assert engine.events == [('load', 'α', 4), ('ask', [(9, PROBE), (9, PROBE)])]
    with pytest.raises(PolicyMismatch, match=r'policy 4: .* rollout\.probe_tolerance=0\.001'):
        r.serve(Trained(4, alpha_version=4), served(0.1))


def test_an_engine_in_this_process_gets_alpha_and_no_probe(rollouts):
    r, engine = rollouts()
    r.serve(Trained(4, alpha_version=4), None)
    assert engine.events == [('load', 'α', 4)]


def test_the_mismatch_is_that_of_the_fresh_groups_alpha_answered(rollouts):
    r, _ = rollouts(servers=1)
    fresh, _ = r.take(1, [], Trained(0))
    assert r.metrics(make_batch(fresh, ['x1', 'x3']), Trained(0), served(0.25))['mismatch/logprob_abs_max'] == 0.25
    for batch in (make_batch(fresh, ['x2', 'x3']), make_batch([], [])):
        assert not any(name.startswith('mismatch') for name in r.metrics(batch, Trained(0), served(0.25)))
