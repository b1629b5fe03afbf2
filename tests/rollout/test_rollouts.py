"""Which policy answers, and when: the order of prompts, what the selector knows, which policy the engine holds, and resumption."""

import ast
import contextlib
import dataclasses
import itertools
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
from group_builders import assert_same_groups, graded

from bapo_jax.cluster.hosts import Hosts
from bapo_jax.config import default_config, resolve
from bapo_jax.groups import Author, Begun, Prompt, Span, Verdict, sampled
from bapo_jax.machine.stopping import Stopped
from bapo_jax.prompts.protocol import PromptSelector
from bapo_jax.rollout import rollouts as module
from bapo_jax.rollout.collect import Collected, TooFewJudged
from bapo_jax.rollout.engine import FAILED, FRESH, PROBE, REEVALUATION
from bapo_jax.rollout.fidelity import PolicyMismatch
from bapo_jax.rollout.answered import Pending
from bapo_jax.rollout.rollouts import Rollouts
from bapo_jax.rollout.schedule import Schedule

RESPONSE = sampled(np.array([1], np.int32), np.array([-1.0], np.float32), 'stop', 0)
STEPS = 3


def prompt(number):
    return Prompt(number, 'countdown', np.array([1], np.int32), {})


HARD = [Begun(prompt(77))]


class Counting(PromptSelector):
    """A selector that counts up, and whose state is what it was asked and told."""

    def __init__(self, learns):
        self.events, self.learns = [], learns

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
    """An engine that notes which policy it is given and what it is asked; `answer(draws)` gives the answer to each prompt."""

    servers, holds_several = 0, False

    def __init__(self, answer):
        self.events, self.read, self._answer, self._thread = [], [], answer, ThreadPoolExecutor(1)

    def ask(self, begun, group_size, sampling, draws):
        self.events.append(('ask', [(one.prompt.id, d.purpose) for one, d in zip(begun, draws, strict=True)]))
        self.read += [one.read.tokens.tolist() for one in begun]
        return [self._thread.submit(self._answer, draw) for draw in draws]

    def probe(self, prompt, group_size, sampling, draw):
        self.events.append(('ask', [(prompt.id, draw.purpose)] * self.servers))
        return [self._answer(draw) for _ in range(self.servers)]

    def load(self, params, version):
        self.events.append(('load', params, version))

    def metrics(self):
        return {'perf/servers/cache_used': 0.5}

    def close(self):
        self.events.append('closed')


@dataclasses.dataclass
class Trained:
    """θ after step - 1 steps, and α of an older version."""

    step: int
    alpha_version: int = 0
    alpha: str = 'α'
    recent: tuple = ()
    before: str = 'α before'
    synced_after: int = -1

    def sync(self):
        self.alpha, self.alpha_version, self.synced_after = 'θ', self.step, self.step

    def policies(self):
        return {}

    @property
    def theta(self):
        return type('Theta', (), {'params': 'θ'})


def judged(answers, tokenizer, prompts, draws, reward, budget_s=0.0):
    groups = [graded(p, a.result(10), (Verdict.WRONG,), d.step) for p, a, d in zip(prompts, answers, draws, strict=True)]
    return Collected(groups, 0.5, 0.25)


@pytest.fixture
def rollouts(monkeypatch):
    """A function that makes Rollouts, whose engine answers with `answer(draw)`; every response is judged wrong."""
    made = []
    monkeypatch.setattr(module, 'judge_as_they_come', judged)
    monkeypatch.setattr(module, 'judge', lambda tokenizer, prompts, responses, draws, reward: [
        graded(p, r, (Verdict.WRONG,), d.step) for p, r, d in zip(prompts, responses, draws, strict=True)])  # fmt: skip

    def make(answer=lambda _: (RESPONSE,), overlap=False, sync_every=100, servers=0, learns=False, fields=None, **schedule):
        config = default_config()
        config.model.path, config.rollout.overlap = 'unused', overlap
        config.update_from_flattened_dict(fields or {})
        engine, schedule = Noting(answer), Schedule(STEPS, sync_every, 0, 0, **schedule)
        engine.servers = servers
        of_run = {'policies': Trained(0), 'hosts': Hosts(), 'logprobs': served(0), 'probe': prompt(9)}
        made.append((Rollouts(engine, None, Counting(learns), schedule, resolve(config), None, **of_run), engine))
        return made[-1]

    yield make
    for r, _ in made:
        r.close()


def ids(groups):
    return [g.prompt.id for g in groups]


def take(r, step, hard, policies):
    """A step of a run whose policies are these."""
    r._policies = policies
    return r.take(step, hard)


def serve(r, policies, logprobs):
    """α, with the trainer's log-probs of a batch."""
    r._policies, r._logprobs = policies, lambda by_role, batch: logprobs(batch)
    r.serve()
    assert policies.before is None


def test_steps_begun_early_give_what_steps_taken_one_by_one_give(rollouts):
    (late, _), (early, _) = rollouts(), rollouts(overlap=True)
    early.begin_ahead(0)
    for step in (1, 2, 3):
        (a, _), (b, _) = take(late, step, [], Trained(step - 1)), take(early, step, [], Trained(step - 1))
        assert ids(a) == ids(b) == [2 * step, 2 * step + 1]
        assert {g.step for g in b} == {step}
        assert late.state() == early.state()


def test_a_step_has_the_metrics_of_selector_meter_and_engine(rollouts):
    r, _ = rollouts()
    started = time.perf_counter()
    take(r, 1, [], Trained(0))
    found = r.metrics(started)
    assert found['prompts/batches'] == 1 and found['perf/servers/cache_used'] == 0.5 and 0 <= found['perf/idle/trainer'] <= 1


def test_a_selector_that_learns_observes_a_step_before_it_is_asked_for_the_next(rollouts):
    r, _ = rollouts(overlap=True, learns=True)
    r.begin_ahead(0)
    take(r, 1, [], Trained(0))
    take(r, 2, [], Trained(1))
    assert r.state()[1] == str(['next', [2, 3], 'next', [4, 5]])  # that of step 2, whatever of step 3 is done


def test_all_steps_up_to_the_sync_are_asked_while_the_first_is_still_answered(rollouts):
    """The earlier first; the selector's state is that of the step taken."""
    release = threading.Event()
    r, engine = rollouts(lambda _: release.wait(10) and (RESPONSE,), overlap=True)
    with ThreadPoolExecutor(1) as pool:
        taken = pool.submit(take, r, 1, [], Trained(0))
        deadline = time.monotonic() + 10
        while len(engine.events) < STEPS and time.monotonic() < deadline:
            time.sleep(0.01)
        assert [[number for number, _ in asked] for _, asked in engine.events] == [[2, 3], [4, 5], [6, 7]]
        assert not taken.done()
        release.set()
        assert ids(taken.result(10)[0]) == [2, 3]
    assert r.state()[1] == str(['next'])


@pytest.mark.parametrize(
    'hard, alpha_version, settings', [([], 0, {'learns': True}), (HARD, -1, {}), (HARD, 0, {'sync_phase': 'code'})]
)
def test_later_steps_are_not_asked_before_the_engine_may_hold_another_policy(hard, alpha_version, settings, rollouts):
    """Nor before a selector that learns has seen the step: π_θ answers the hard prompts, or becomes α with them."""
    release = threading.Event()
    r, engine = rollouts(lambda _: release.wait(10) and (RESPONSE,), overlap=True, **settings)
    threading.Timer(0.2, lambda: (engine.events.append('answered'), release.set())).start()
    take(r, 1, hard, Trained(0, alpha_version=alpha_version))
    assert [event for event in engine.events[: engine.events.index('answered')] if event[0] == 'ask'] == engine.events[:1]


def test_a_row_keeps_the_policy_that_answered_the_hard_prompts_as_alpha(rollouts):
    r, engine = rollouts(sync_phase='code')
    take(r, 3, HARD, policies := Trained(2, alpha_version=0))
    assert engine.events[-2:] == [('load', 'α', 0), ('load', 'θ', 2)] and policies.alpha_version == 2
    take(r, 4, [], policies := Trained(3, alpha_version=2))
    assert policies.alpha_version == 2


def test_a_sync_is_told_to_all_hosts_and_one_that_a_checkpoint_has_is_not_repeated(rollouts):
    r, engine = rollouts()
    told = []
    r._hosts, r._policies = types.SimpleNamespace(tell=told.append), Trained(4)
    r.sync()
    r.sync()
    assert told == ['sync'] and engine.events == [('load', 'θ', 4)] * 2


def test_nothing_is_begun_ahead_without_overlap_or_past_a_sync(rollouts):
    for settings in ({'overlap': False}, {'overlap': True, 'sync_every': 2}):
        r, engine = rollouts(**settings)
        take(r, 1, [], Trained(0))
        r.begin_ahead(1)
        assert len(engine.events) == 1


def test_hard_prompts_go_out_with_the_fresh_ones_where_alpha_is_theta_and_are_not_shown_to_the_selector(rollouts):
    r, engine = rollouts()
    fresh, reevaluated = take(r, 1, HARD, Trained(0, alpha_version=0))
    assert ids(fresh) == [2, 3] and ids(reevaluated) == [77]
    assert engine.events == [('ask', [(2, FRESH), (3, FRESH), (77, REEVALUATION)])]
    r, engine = rollouts(learns=True)
    fresh, reevaluated = take(r, 1, HARD, Trained(0, alpha_version=0))
    assert ids(fresh) == [2, 3] and ids(reevaluated) == [77]
    assert r.state()[1] == str(['next', [2, 3]])
    assert 'timing_s/reevaluate' not in r.metrics(0.0)


@pytest.mark.parametrize('alpha', [0, 2])
def test_an_engine_reads_given_tokens_behind_a_hard_prompt(rollouts, alpha):
    r, engine = rollouts()
    begun = Begun(HARD[0].prompt, (Span(np.array([8, 9], np.int32), None, Author.PREFIX),))
    _, [group] = take(r, 3, [begun], Trained(2, alpha_version=alpha))
    assert engine.read == [[1], [1], [1, 8, 9]] and group.prompt is begun.prompt


def test_hard_prompts_are_answered_by_theta_and_the_engine_then_holds_alpha_again(rollouts):
    r, engine = rollouts()
    fresh, reevaluated = take(r, 3, HARD, Trained(2, alpha_version=0))
    assert ids(fresh) == [2, 3] and ids(reevaluated) == [77] and {g.step for g in reevaluated} == {3}
    assert engine.events == [
        ('ask', [(2, FRESH), (3, FRESH)]), ('load', 'θ', 2), ('ask', [(77, REEVALUATION)]), ('load', 'α', 0)
    ]  # fmt: skip
    row = r.metrics(0.0)
    assert row['prompts/batches'] == 1
    assert (row['timing_s/gen'], row['timing_s/reward'], row['timing_s/reevaluate']) == (0.5, 0.25, 0.75)


def test_an_engine_of_several_policies_is_asked_for_hard_prompts_and_later_steps_before_any_answer(rollouts):
    r, engine = rollouts(overlap=True)
    engine.holds_several = True
    fresh, reevaluated = take(r, 2, HARD, Trained(1, alpha_version=0))
    assert ids(fresh) == [2, 3] and ids(reevaluated) == [77]
    assert engine.events == [
        ('ask', [(2, FRESH), (3, FRESH)]), ('load', 'θ', 1), ('ask', [(77, REEVALUATION)]), ('load', 'α', 0), ('ask', [(4, FRESH), (5, FRESH)])
    ]  # fmt: skip


def test_hard_prompts_of_a_step_that_was_requested_ahead_are_asked_by_themselves(rollouts):
    r, engine = rollouts(overlap=True, sync_every=1, most_behind=1)
    r.begin_ahead(0)
    fresh, reevaluated = take(r, 1, HARD, Trained(0, alpha_version=0))
    assert ids(fresh) == [2, 3] and ids(reevaluated) == [77]
    assert engine.events[0] == ('ask', [(2, FRESH), (3, FRESH)])
    assert engine.events[-3:] == [('load', 'θ', 0), ('ask', [(77, REEVALUATION)]), ('load', 'α', 0)]


def test_steps_requested_before_a_sync_are_saved_as_they_were_answered(rollouts):
    """A run that resumes takes them, asks nothing again, and goes on with the prompts after them."""
    r, engine = rollouts(overlap=True, sync_every=1, most_behind=1)
    take(r, 1, [], Trained(0, alpha_version=0))
    assert engine.events == [('ask', [(i, FRESH), (i + 1, FRESH)]) for i in (2, 4)]
    pending, selector = r.state()
    assert selector == str(['next'])
    again, after = rollouts(overlap=True, sync_every=1, most_behind=1)
    again.restore(pending, selector)
    fresh, _ = take(again, 2, [], Trained(1, alpha_version=1))
    assert_same_groups(fresh, take(r, 2, [], Trained(1, alpha_version=1))[0])
    assert ids(fresh) == [4, 5] and {g.step for g in fresh} == {2}
    assert after.events == [('ask', [(6, FRESH), (7, FRESH)])]  # of step 3 alone
    assert again.state()[1] == r.state()[1]


def test_a_step_whose_wait_a_signal_ends_is_saved_as_well(rollouts, monkeypatch):
    """Asked again, it would be answered by another policy."""

    @contextlib.contextmanager
    def ended():
        raise Stopped
        yield

    r, engine = rollouts(overlap=True, sync_every=1, most_behind=1)
    r.begin_ahead(0)
    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(module, 'leaving_waits', ended)
        take(r, 1, [], Trained(0, alpha_version=0))
    again, after = rollouts(overlap=True, sync_every=1, most_behind=1)
    again.restore(*r.state())
    assert [ids(take(again, step, [], Trained(step - 1, alpha_version=step - 1))[0]) for step in (1, 2)] == [[2, 3], [4, 5]]
    assert after.events == [('ask', [(6, FRESH), (7, FRESH)])]


@pytest.mark.parametrize('late', [False, True])
def test_a_step_requested_ahead_that_fails_or_is_late_costs_no_checkpoint(late, rollouts, monkeypatch, caplog):
    """It is asked again by the run that continues, with all that follows it, even where that was answered."""
    free = threading.Event()

    def answer(draw):
        if draw.step == 2 and not free.is_set():
            if not late:
                raise ValueError('no server')
            free.wait(10)
        return (RESPONSE,)

    r, _ = rollouts(answer, overlap=True, sync_every=1, most_behind=2)
    take(r, 1, [], Trained(0, alpha_version=0))
    if late:  # a signal comes while the checkpoint waits
        threading.Timer(0.3, lambda: monkeypatch.setattr(module.stopping, '_half', time.monotonic())).start()
    else:
        assert r._begun[3].result(10)
    pending, selector = r.state()
    assert not pending.ahead and selector == str(['next'])
    assert f'without the responses of step 2 and later ({"TimeoutError" if late else "no server"})' in caplog.text
    free.set()
    again, after = rollouts(overlap=True, sync_every=1, most_behind=2)
    again.restore(pending, selector)
    assert ids(take(again, 2, [], Trained(1, alpha_version=1))[0]) == [4, 5]
    assert after.events == [('ask', [(i, FRESH), (i + 1, FRESH)]) for i in (4, 6)]


def test_references_are_asked_and_observed_before_the_prompts_are_chosen(rollouts):
    """One of them is chosen and not asked again; the other is the last of the fresh groups."""
    r, engine = rollouts(learns=True)
    r._selector.references = lambda: r._selector.events.append('references') or [prompt(50), prompt(2)]
    fresh, reevaluated = take(r, 1, HARD, Trained(0, alpha_version=0))
    assert ids(fresh) == [2, 3, 50] and ids(reevaluated) == [77]
    assert engine.events == [('ask', [(50, FRESH), (2, FRESH)]), ('ask', [(3, FRESH), (77, REEVALUATION)])]
    assert r.state()[1] == str(['references', [50, 2], 'next', [2, 3]])
    assert r.metrics(0.0)['timing_s/gen'] == 1.0, 'of both waves'


def test_responses_begin_with_what_the_selector_gives(rollouts):
    r, engine = rollouts()
    r._selector.begin = lambda prompts: [Begun(p, (Span(np.array([p.id], np.int32), None, Author.PREFIX),)) for p in prompts]
    fresh, _ = take(r, 1, HARD, Trained(0, alpha_version=0))
    assert engine.read == [[1, 2], [1, 3], [1]] and ids(fresh) == [2, 3]


def test_an_evaluation_is_answered_by_theta_and_the_engine_then_holds_alpha_again(rollouts):
    r, engine = rollouts()
    r._policies = Trained(5, alpha_version=3)
    with r.held_by_theta() as held:
        assert held is engine
        assert engine.events == [('load', 'θ', 5)]
    assert engine.events == [('load', 'θ', 5), ('load', 'α', 3)]


def test_what_the_engine_raises_reaches_whoever_takes_the_step(rollouts):
    def gone(draw):
        raise OSError('the engine is gone')

    r, _ = rollouts(gone, overlap=True)
    r.begin_ahead(0)
    with pytest.raises(OSError, match='the engine is gone'):
        take(r, 1, [], Trained(0))


@pytest.mark.parametrize('learns', [False, True])
def test_a_step_with_too_few_verdicts_ends_the_run(learns, rollouts):
    """Both groups are lost, of eight responses each."""
    r, _ = rollouts(lambda _: (), learns=learns)
    with pytest.raises(TooFewJudged, match='16 of 16 responses of step 1 have no verdict.* gave up 2 groups of 8'):
        take(r, 1, [], Trained(0))


def test_prompts_that_are_only_counted_may_all_be_lost(rollouts):
    """Nothing is trained on them, so a step that has been answered is not lost with them."""
    r, engine = rollouts(lambda _: ())
    groups = r.ask_failed(5, [prompt(3), prompt(4)])
    assert ids(groups) == [3, 4] and all(group.infra_error for group in groups)
    assert engine.events == [('ask', [(3, FAILED), (4, FAILED)])] and r.state() == (Pending(), str([]))


@pytest.mark.parametrize('learns', [False, True])
def test_close_waits_for_one_step_at_most(learns, rollouts):
    """The steps behind it are not judged and, of a selector that learns, not even asked."""
    release = threading.Event()
    r, engine = rollouts(lambda _: release.wait(10) and (RESPONSE,), overlap=True, learns=learns)
    r.begin_ahead(0)
    waiting, end = [r._begun[step] for step in (2, 3)], time.monotonic() + 10
    while len(engine.events) < (1 if learns else 3) and time.monotonic() < end:
        time.sleep(0.01)  # a selector that learns asks from another thread
    threading.Timer(0.1, release.set).start()
    r.close()
    assert all(step.cancelled() for step in waiting)
    assert len(engine.events) == (2 if learns else 4) and engine.events[-1] == 'closed'


def test_a_restored_stream_goes_on_after_the_last_step_taken(rollouts):
    """Steps answered ahead of it are answered again."""
    (whole, _), (stopped, _), (continued, _) = rollouts(), rollouts(overlap=True), rollouts()
    take(whole, 1, [], Trained(0))
    stopped.begin_ahead(0)
    take(stopped, 1, [], Trained(0))
    assert stopped.state() == whole.state()
    continued.restore(*stopped.state())
    assert continued.state() == whole.state()
    assert ids(take(continued, 2, [], Trained(1))[0]) == ids(take(whole, 2, [], Trained(1))[0]) == [4, 5]
    assert continued.state() == whole.state()


def served(difference):
    """Log-probs as the servers gave them, and the trainer's, apart by `difference`."""
    def logprobs(batch):
        logp = np.concatenate([r.logp for g in batch.groups for r in g.responses])
        return logp, logp + np.float32(difference)

    return logprobs


def test_every_server_is_asked_the_probe_after_it_got_alpha(rollouts):
    r, engine = rollouts(servers=2)
    serve(r, Trained(4, alpha_version=4), served(0))
    assert engine.events == [('load', 'α', 4), ('ask', [(9, PROBE), (9, PROBE)])]
    with pytest.raises(PolicyMismatch, match=r'policy 4: .* rollout\.probe_tolerance=0\.001'):
        serve(r, Trained(4, alpha_version=4), served(0.1))


def test_the_probe_knows_what_both_sides_round_to_and_what_the_trainers_devices_multiply_with(rollouts, monkeypatch):
    for field in ('rollout.dtype', 'model.dtype'):
        r, _ = rollouts(servers=1, fields={field: 'bfloat16'})
        serve(r, Trained(4, alpha_version=4), served(0.04))
    r, _ = rollouts(servers=1)
    with pytest.raises(PolicyMismatch, match=r'probe_tolerance=0\.001'):
        serve(r, Trained(4, alpha_version=4), served(0.005))
    monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
    serve(r, Trained(5, alpha_version=5), served(0.005))


def test_a_server_that_still_has_the_policy_before_is_found(rollouts):
    r, _ = rollouts(servers=1)

    def logprobs(batch):
        logp, trained = served(1e-4)(batch)
        return logp, trained, logp  # under the policy before, as the server said

    with pytest.raises(PolicyMismatch, match='policy 4: the server still answers with the previous policy'):
        serve(r, Trained(4, alpha_version=4), logprobs)


def test_one_wrong_server_among_many_is_found(rollouts):
    """Its tokens are a thirtieth of all: too few for the mean and the quantile of all."""
    r, _ = rollouts(servers=30)
    asked = itertools.count()
    with pytest.raises(PolicyMismatch, match='mean 0.1,'):
        serve(r, Trained(4, alpha_version=4), lambda batch: served(0.1 if next(asked) == 29 else 0.0)(batch))


def test_an_engine_in_this_process_gets_alpha_and_no_probe(rollouts):
    r, engine = rollouts()
    serve(r, Trained(4, alpha_version=4), None)
    assert engine.events == [('load', 'α', 4)]


# ---- who answers of several, and how often is asked

MIXTURE = {'rollout.mixture.share': 0.9, 'rollout.sync_every': 1, 'replay.use_x2': False, 'rollout.overlap': False}


@pytest.mark.parametrize('recent', [((7, 'older'), (6, 'oldest')), ((7, 'older'),), ()])
def test_every_policy_that_is_kept_answers_some_prompts_of_a_mixture(recent, rollouts):
    """Also the oldest; where fewer are kept than ages drawn, the oldest there is. Groups keep the prompts' order, and α is held last."""
    r, engine = rollouts(fields=MIXTURE, sync_every=1, mixture=0.9, mixture_policies=2)
    for step in range(1, 13):
        fresh, _ = take(r, step, (), Trained(step, alpha_version=8, recent=recent))
        assert [g.prompt.id for g in fresh] == [2 * step, 2 * step + 1]
    loads = [params for event, params, *_ in engine.events if event == 'load']
    assert set(loads) == {'α', *(params for _, params in recent)} and loads[-1] == 'α'


@pytest.mark.parametrize(('batch_groups', 'waves'), [(1, 1), (2, 1), (3, 2), (4, 2), (5, 3), (9, 3)])
def test_a_refill_ends_once_b_groups_are_mixed_or_no_wave_is_left(batch_groups, waves, rollouts, monkeypatch):
    """Two prompts a wave, all of whose groups are mixed; at most three waves."""

    def mixed(answers, tokenizer, prompts, draws, *_):
        made = [graded(p, (RESPONSE,) * 2, (Verdict.CORRECT, Verdict.WRONG), d.step) for p, d in zip(prompts, draws, strict=True)]
        return Collected(made, 0.5, 0.25)

    monkeypatch.setattr(module, 'judge_as_they_come', mixed)
    fields = {
        'rollout.refill_batches': 3, 'rollout.group_size': 2, 'replay.fresh_filter': 'range', 'learner.batch_groups': batch_groups,
        'learner.mini_batch_groups': 1,
    }  # fmt: skip
    r, engine = rollouts(fields=fields)
    fresh, _ = take(r, 1, (), Trained(1))
    assert len(engine.events) == waves and len(fresh) == 2 * waves
