"""A run under way: a step's random numbers, seconds and row, and what is due after it."""

import errno
import json
import os
import signal
import types

import numpy as np
import pytest
from group_builders import make_group

from bapo_jax.cluster.hosts import HostLost
from bapo_jax.config import default_config
from bapo_jax.groups import make_batch
from bapo_jax.machine import stopping
from bapo_jax.replay import PURPOSES
from bapo_jax.run import run as module
from bapo_jax.run.checkpoint import NotSaved
from bapo_jax.run.log import metrics as log
from bapo_jax.run.log.metrics import read_metrics
from bapo_jax.run.run import Run, Step
from bapo_jax.run.state import RunState


def test_a_timer_adds_up_by_phase():
    step = Step(0, 1, module.Counter())
    for _ in range(2):
        with step.timer('gen'):
            json.dumps('work')
    assert set(step.seconds) == {'timing_s/gen'} and step.seconds['timing_s/gen'] > 0


def test_every_step_and_purpose_has_random_numbers_of_its_own_that_come_again():
    def first(seed, number, purpose):
        return float(Step(seed, number, {}).rng(purpose).random())

    keys = [(seed, number, purpose) for seed in (0, 1) for number in (1, 2) for purpose in PURPOSES]
    assert len({first(*key) for key in keys}) == len(keys)
    assert [first(*key) for key in keys] == [first(*key) for key in keys]
    with pytest.raises(ValueError):
        first(0, 1, 'no such purpose')


def test_the_generators_of_a_checkpointed_run_stay_what_they_were():
    """A purpose's place in PURPOSES seeds its generator: a run of before would continue with other draws."""
    assert PURPOSES[:4] == ('filter', 'reevaluate', 'compose', 'shuffle')
    assert Step(42, 7, {}).rng('compose').random() == np.random.default_rng([42, 7, 2]).random()


def test_what_is_recorded_is_one_row():
    step = Step(0, 1, {})
    step.record({'a': 1, 'b': 2}, {'b': 3})
    step.record({'c': 4})
    assert step.metrics == {'a': 1, 'b': 3, 'c': 4}


class Saved:
    """Stands for the checkpoints: notes at which step what was saved."""

    def __init__(self):
        self.saves, self.closed, self.finished = [], False, []

    def save(self, state, *of_host):
        self.saves.append((state.step, of_host))

    def latest_step(self):
        return self.saves[-1][0] if self.saves else None

    def finish(self, seconds):
        self.finished.append(seconds)

    def close(self):
        self.closed = True


@pytest.fixture
def begin(tmp_path, monkeypatch):
    """A function of the run's periods and its last step: (Run, what it notes)."""
    monkeypatch.setattr(module, 'write_rollouts', lambda path, *_: noted.rollouts.append(f'{path.parent.name}/{path.name}'))
    monkeypatch.setattr(module, 'two_responses', lambda step, *_: f'step {step}')
    monkeypatch.setattr(module.ProgressBar, 'show', lambda _, text: noted.shown.append(text))
    noted = types.SimpleNamespace(shown=[], rollouts=[], evaluations=[], checkpoints=Saved(), told=[], progress=[], during=lambda: None, ended=[])

    def make(steps=4, evaluate=0, rollouts=0, checkpoint=100, state=None, at_start=False, sinks=()):
        c = default_config()
        c.log.sinks = sinks
        c.evaluate.every, c.log.rollouts_every, c.checkpoint.every, c.evaluate.at_start = evaluate, rollouts, checkpoint, at_start
        state = state or RunState(None, None)
        hosts = types.SimpleNamespace(tell=lambda what, **_: noted.told.append(what), progress=noted.progress.append)

        def evaluated(say):
            say('evaluating')
            with stopping.leaving_waits():
                noted.during()
            noted.evaluations.append(state.step)
            return {'val-core/x/acc/mean@2': 0.5}

        def saved():
            return 'replay', 'selector'

        run = Run(c, tmp_path, steps, state, noted.checkpoints, hosts, None, None, evaluate=evaluated, to_save=saved, ended=lambda *how: noted.ended.append(how))
        return run, noted

    with stopping.on_signal(600.0):
        yield make


def take(run, number, before_the_end=lambda: None, **metrics):
    """One step as the loop takes it."""
    with run.step(number) as now:
        before_the_end()
        run.state.step = number
        now.logp = [None]
        fresh = [make_group(1, 4)]
        now.took(fresh, [], make_batch(fresh, ['x1']), [1])
        now.record({'critic/score/mean': 0.5, 'bapo/x1_groups': 1, 'bapo/x2_groups': 0, 'bapo/x3_groups': 0, **metrics})


def signalled(number=signal.SIGTERM):
    os.kill(os.getpid(), number)


def test_a_run_directory_that_has_another_in_its_place_ends_the_run(begin, tmp_path):
    run, noted = begin()
    take(run, 1)
    tmp_path.rename(tmp_path.with_name('elsewhere'))
    tmp_path.mkdir()
    with pytest.raises(NotSaved, match='was removed or renamed, and another directory now has its name; put it back'):
        take(run, 2)
    assert list(tmp_path.iterdir()) == []


def test_each_thing_is_done_at_its_period_and_at_the_end(begin):
    run, noted = begin(steps=7, evaluate=3, rollouts=2, checkpoint=5)
    for number in run.steps_left():
        take(run, number)
    assert noted.evaluations == [3, 6, 7]
    assert noted.rollouts == [f'rollouts/00000{step}.jsonl.zst' for step in (1, 2, 4, 6, 7)]
    assert noted.shown == ['step 1', 'step 2', 'step 4', 'step 6', 'step 7']
    assert noted.checkpoints.saves == [(5, ('replay', 'selector')), (7, ('replay', 'selector'))]
    assert noted.told == ['save', 'save'] and noted.ended == []
    run.close()
    assert noted.checkpoints.closed and noted.ended == [(7, True, '')]


def test_files_of_lost_steps_go_and_the_note_that_there_is_no_checkpoint_goes_with_the_first_one(begin, tmp_path):
    note, later = tmp_path / 'checkpoints' / 'none_yet', tmp_path / 'evals' / '000001.json'
    for file in (note, later):
        file.parent.mkdir()
        file.write_text('')
    run, _ = begin(checkpoint=1)
    assert note.exists() and not later.exists()
    take(run, 1)
    assert note.exists()
    (tmp_path / 'checkpoints' / '1').mkdir()  # while the next step is under way
    take(run, 2)
    assert not note.exists()


def test_each_step_is_written_once_with_its_seconds(begin, tmp_path):
    run, _ = begin(steps=4, evaluate=2, checkpoint=1)
    for number in run.steps_left():
        take(run, number, loss=number)
    rows = read_metrics(tmp_path)
    assert [(row['step'], row['loss']) for row in rows] == [(1, 1), (2, 2), (3, 3), (4, 4)]
    assert [('val-core/x/acc/mean@2' in row, 'timing_s/testing' in row) for row in rows] == [(False, False), (True, True)] * 2
    assert all(row['timing_s/step'] > 0 and row['perf/throughput'] > 0 for row in rows)
    # A save comes after its step's row, so its seconds are in the next one.
    assert ['timing_s/save_checkpoint' in row for row in rows] == [False, True, True, True]
    run.close()


@pytest.mark.parametrize('at_start', [True, False])
def test_the_base_is_scored_before_the_first_step_unless_asked_not_to(begin, at_start, tmp_path):
    run, noted = begin(steps=1, at_start=at_start)
    assert next(run.steps_left()) == 1
    assert noted.evaluations == [0] * at_start and [row['step'] for row in read_metrics(tmp_path)] == [0] * at_start
    run.close()


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_while_a_step_trains_ends_the_run_after_it_with_a_checkpoint(number, begin, capfd):
    run, noted = begin(steps=9)
    for step in run.steps_left():
        take(run, step, lambda: step == 2 and signalled(number))  # noqa: B023
    assert [step for step, _ in noted.checkpoints.saves] == [2] and noted.evaluations == []
    assert f'{number.name}: saving a checkpoint and stopping, within 600 s' in capfd.readouterr().err
    run.close()
    assert noted.ended == [(2, False, '')]


def test_a_signal_while_a_step_waits_gives_the_step_up_and_saves_the_one_before(begin, tmp_path):
    def waits():
        with stopping.leaving_waits():
            signalled()

    run, noted = begin(steps=9)
    for step in run.steps_left():
        take(run, step, lambda: step == 3 and waits())  # noqa: B023
    assert [step for step, _ in noted.checkpoints.saves] == [2]
    assert [row['step'] for row in read_metrics(tmp_path)] == [1, 2]
    run.close()


@pytest.mark.parametrize('stop_at, saved', [(1, []), (3, [2]), (4, [2, 3])])
def test_nothing_and_what_is_saved_already_is_not_saved(stop_at, saved, begin):
    run, noted = begin(steps=9, checkpoint=2)
    for step in run.steps_left():
        if step == stop_at:
            with run.step(step):
                signalled()
                with stopping.leaving_waits():  # the signal came before the wait
                    pytest.fail('the wait began')
        else:
            take(run, step)
    assert [step for step, _ in noted.checkpoints.saves] == saved
    run.close()


def test_an_evaluation_that_a_signal_cuts_short_is_made_up_for(begin, tmp_path):
    run, noted = begin(steps=4, evaluate=2)
    noted.during = signalled
    for step in run.steps_left():
        take(run, step, loss=10 * step)
    run.close()
    assert noted.evaluations == [] and [step for step, _ in noted.checkpoints.saves] == [2]
    assert [row['step'] for row in read_metrics(tmp_path)] == [1]  # the row of step 2 is not whole yet
    state = RunState(None, None, step=2, unwritten=json.loads(json.dumps(run.state.unwritten)))
    noted.during = lambda: None
    with stopping.on_signal(600.0):
        run, noted = begin(steps=4, evaluate=2, state=state)
        for step in run.steps_left():
            take(run, step, loss=10 * step)
        run.close()
    rows = read_metrics(tmp_path)
    assert [(row['step'], row['loss']) for row in rows] == [(1, 10), (2, 20), (3, 30), (4, 40)]
    assert ['val-core/x/acc/mean@2' in row for row in rows] == [False, True, False, True]
    assert noted.evaluations == [2, 4]


@pytest.mark.parametrize('row_is_there', [False, True])
def test_a_due_checkpoint_comes_before_the_evaluation_and_a_run_killed_in_that_goes_on_with_it(row_is_there, begin, tmp_path):
    """Where the evaluation had ended, its row is there: it is not made again."""
    run, noted = begin(steps=4, evaluate=2, checkpoint=2)
    states = []
    noted.during = lambda: states.append((noted.checkpoints.latest_step(), json.loads(json.dumps(run.state.unwritten))))
    for step in run.steps_left():
        if step == 3:
            break
        take(run, step, loss=10 * step)
    [(saved, unwritten)] = states
    assert saved == 2 and unwritten['loss'] == 20 and noted.progress == ['evaluating']
    assert noted.checkpoints.saves == [(2, ('replay', 'selector'))] and run.state.unwritten == {}
    if not row_is_there:  # as a kill leaves it
        lines = (tmp_path / 'metrics.jsonl').read_text().splitlines(keepends=True)
        (tmp_path / 'metrics.jsonl').write_text(lines[0])
    run, noted = begin(steps=4, evaluate=2, state=RunState(None, None, step=2, unwritten=unwritten))
    assert next(run.steps_left()) == 3
    assert noted.evaluations == ([2] if row_is_there else [2, 2])
    assert [(row['step'], row['loss'], 'val-core/x/acc/mean@2' in row) for row in read_metrics(tmp_path)] == [(1, 10, False), (2, 20, True)]
    run.close()


def test_a_continued_run_goes_on_after_its_checkpoint_and_forgets_later_rows(begin, tmp_path):
    (tmp_path / 'metrics.jsonl').write_text(''.join(json.dumps({'step': step}) + '\n' for step in range(5)))
    run, _ = begin(steps=6, state=RunState(None, None, step=3))
    assert next(run.steps_left()) == 4
    assert [row['step'] for row in read_metrics(tmp_path)] == [0, 1, 2, 3]
    run.close()


def test_too_many_steps_without_a_finite_gradient_end_the_run(begin, caplog):
    """Five in a row, and their batches are kept; a step without a skipped update begins the count anew."""
    run, noted = begin(steps=20)
    skipped = [1, 1, 0, 2, 1, 1, 1, 1, 1]
    with pytest.raises(module.Diverged, match=r'5 steps in a row had an update whose gradient was not finite; .* with --amend'):
        for step in run.steps_left():
            take(run, step, **{'actor/skipped_updates': skipped[step - 1]})
    assert noted.rollouts == [f'skipped/00000{step}.jsonl.zst' for step in (1, 2, 4, 5, 6, 7, 8)]
    [(step, finished, error)] = noted.ended
    assert (step, finished) == (8, False) and error.startswith('5 steps in a row had an update whose gradient was not finite; ')
    assert [r.row['event'] for r in caplog.records] == ['update skipped'] * 7
    run.close()


@pytest.mark.parametrize('error, waits', [
    (ValueError('a server lies'), True),
    (FileNotFoundError(2, 'no such file'), True),
    (OSError(errno.EROFS, 'read-only'), False),
    (OSError(errno.ENOSPC, 'full'), False),
    (NotSaved('full'), False),
    (HostLost('host 1'), False),
])  # fmt: skip
def test_an_error_lets_a_checkpoint_be_finished_unless_it_cannot_be(error, waits, begin):
    """Of a failing disk the checkpoint library hears only after minutes."""
    run, noted = begin(steps=3)

    def fails():
        raise error

    with pytest.raises(type(error)):
        take(run, 1, fails)
    assert noted.checkpoints.finished == [300.0] * waits
    run.close()


def test_a_run_sends_its_rows_to_the_sinks_of_its_config(begin, tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(log, 'start_sinks', lambda names, directory: started.append((names, directory)) or {})
    begin(sinks=('trackio', 'wandb'))
    assert started == [(('trackio', 'wandb'), tmp_path)]
