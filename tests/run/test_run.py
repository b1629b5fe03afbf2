"""A run under way: a step's random numbers, seconds and row, and what is due after it."""

import json
import os
import signal
import types

import numpy as np
import pytest
from group_builders import make_group

from bapo_jax.config import default_config
from bapo_jax.groups import make_batch
from bapo_jax.replay import PURPOSES
from bapo_jax.run import run as module
from bapo_jax.run.log import read_metrics
from bapo_jax.run.run import Run, Step


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
        self.saves, self.closed = [], False

    def save(self, state, *of_host):
        self.saves.append((state.step, of_host))

    def close(self):
        self.closed = True


@pytest.fixture
def begin(tmp_path, monkeypatch):
    """A function of the run's periods and its last step: (Run, what it notes)."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    monkeypatch.setattr(module, 'write_rollouts', lambda path, *_: noted.rollouts.append(path.name))
    noted = types.SimpleNamespace(rollouts=[], evaluations=[], checkpoints=Saved(), told=[])

    def make(steps=4, evaluate=0, rollouts=0, checkpoint=100, done=0):
        c = default_config()
        c.evaluate.every, c.rollouts.every, c.checkpoint.every = evaluate, rollouts, checkpoint
        state = types.SimpleNamespace(step=done, sync=lambda: noted.told.append('θ'))
        hosts = types.SimpleNamespace(tell=lambda what, **_: noted.told.append(what))

        def evaluated():
            noted.evaluations.append(state.step)
            return {'val-core/x/acc/mean@2': 0.5}

        def saved():
            return 'replay', 'selector'

        run = Run(c, tmp_path, steps, state, noted.checkpoints, hosts, None, evaluate=evaluated, to_save=saved)
        return run, noted

    yield make
    for number, handler in handlers.items():
        signal.signal(number, handler)


def take(run, number, **metrics):
    """One step as the loop takes it; whether the run is to stop."""
    batch = make_batch([make_group(1, 4)], ['x1'])
    with run.step(number) as now:
        run.state.step = number
        now.record({'critic/score/mean': 0.5, 'bapo/x1_groups': 1, 'bapo/x2_groups': 0, 'bapo/x3_groups': 0, **metrics})
    return run.due(now, batch, [], [])


def test_each_thing_is_done_at_its_period_and_everything_but_rollouts_at_the_end(begin):
    run, noted = begin(steps=7, evaluate=3, rollouts=2, checkpoint=5)
    assert [take(run, number) for number in run.steps_left()] == [False] * 6 + [True]
    assert noted.evaluations == [3, 6, 7]
    assert noted.rollouts == ['000002.jsonl.zst', '000004.jsonl.zst', '000006.jsonl.zst']
    assert noted.checkpoints.saves == [(5, ('replay', 'selector')), (7, ('replay', 'selector'))]
    assert noted.told == ['save', 'save']
    run.close()
    assert noted.checkpoints.closed


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


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_the_run_after_its_step_with_a_checkpoint(number, begin, capsys):
    run, noted = begin(steps=9)
    assert not take(run, 1)
    os.kill(os.getpid(), number)
    assert take(run, 2)
    assert [step for step, _ in noted.checkpoints.saves] == [2] and noted.evaluations == []
    assert f'{number.name}: stopping after this step, with a checkpoint' in capsys.readouterr().out
    run.close()


def test_a_continued_run_goes_on_after_its_checkpoint_and_forgets_later_rows(begin, tmp_path):
    (tmp_path / 'metrics.jsonl').write_text(''.join(json.dumps({'step': step}) + '\n' for step in range(5)))
    run, _ = begin(steps=6, done=3)
    assert list(run.steps_left()) == [4, 5, 6]
    assert [row['step'] for row in read_metrics(tmp_path)] == [0, 1, 2, 3]
    run.close()


def test_a_sync_is_told_to_the_other_hosts_first(begin):
    run, noted = begin()
    run.sync()
    assert noted.told == ['sync', 'θ']
    run.close()
