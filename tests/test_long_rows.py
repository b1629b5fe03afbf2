"""Twenty steps of the rows that remember or wait: every part acts, and a run stopped in the middle repeats the rest, bit for bit."""

import os
import signal

import numpy as np
import pytest
from small_run import metrics, run
from test_rows_run import row_config, tiny_base  # noqa: F401 - a fixture

from bapo_jax.learner.learner import Learner

pytestmark = pytest.mark.slow


def total(rows, name):
    return sum(row.get(name, 0) for row in rows)


def arpo_acted(rows):
    """Some failed groups got a success, some had none; what is not fresh is one response of such a group."""
    replayed = total(rows, 'bapo/replay_groups')
    assert 0 < replayed < total(rows, 'bapo/batch_groups')
    assert rows[-1]['rollout/reused_total'] == rows[-1]['rollout/discarded_total'] == replayed
    assert rows[-1]['buffer/arpo/responses'] > rows[-1]['buffer/arpo/prompts'] > 0
    return True


def fifo_acted(rows):
    """It waits for a batch, forgets what is old, and trains on about two groups for each fresh one."""
    assert rows[0]['bapo/batch_groups'] == 0 and all(row['bapo/batch_groups'] == 16 for row in rows[1:])
    assert rows[-1]['buffer/fifo/groups'] == 24 and 0 < total(rows[3:], 'bapo/x1_groups') < 17 * 8
    assert 1 < rows[-1]['bapo/replay/age'] <= 3 and rows[-1]['bapo/replay/uses'] > 0
    return True


def freshper_acted(rows):
    assert all(row['bapo/x1_groups'] == 8 for row in rows) and rows[0].get('bapo/replay_groups', 0) == 0
    assert total(rows, 'bapo/replay_groups') > 60 and rows[-1]['buffer/freshper/groups'] == 80
    assert all(0 < row['bapo/replay/weight'] < 1 for row in rows[3:]) and max(row['bapo/replay/age'] for row in rows[1:]) > 2
    return True


def exgrpo_acted(rows):
    """It starts late, then asks prompts again, and each group that a success leads has one response of before."""
    started = [row['buffer/exgrpo/started'] for row in rows]
    assert started[0] == 0 and started[-1] == 1 and started == sorted(started)
    first = started.index(1) + 2  # what is stored in the next step leads from the step after that
    assert all(row['bapo/reevaluated'] == 0 for row in rows[:first]) and all(row['bapo/reevaluated'] > 0 for row in rows[first:])
    assert rows[-1]['rollout/reused_total'] == total(rows, 'bapo/replay_groups') > 0
    assert max(abs(row['actor/trace_loss']) for row in rows) > 0 and rows[-1]['staleness/max'] == 0
    assert rows[-1]['buffer/exgrpo/retired'] > 0
    return True


# row -> (changes of its config, what must have happened, given the metrics of the steps)
ROWS = {
    'areal': (
        {'rollout__most_behind': 2, 'rollout__step_share': 0.6},
        lambda rows: max(r['staleness/max'] for r in rows) >= 3 and max(r['rollout/unfinished'] for r in rows) > 0,
    ),
    'kimi': (
        {'rollout__step_share': 0.6},
        lambda rows: max(r['rollout/unfinished'] for r in rows) > 0
        and max(abs(r['critic/rewards/mean'] - r['critic/score/mean']) for r in rows if np.isfinite(r['critic/score/mean'])) > 0.001,
    ),
    'arpo': ({'task__limit': 16}, arpo_acted),
    'fifo': ({'replay__fifo__ratio': 2, 'replay__fifo__capacity': 24}, fifo_acted),
    'freshper': ({'replay__freshper__capacity': 80, 'replay__freshper__tau': 5.0}, freshper_acted),
    'exgrpo': ({'task__limit': 16, 'replay__exgrpo__start_above': 0.25}, exgrpo_acted),
}


@pytest.mark.parametrize('row', ROWS)
def test_twenty_steps_with_a_resume(row, tiny_base, tmp_path, monkeypatch):  # noqa: F811
    changes, acted = ROWS[row]

    def config():
        made = row_config(row, tiny_base)
        made.steps, made.checkpoint.every, made.log.theory_every, made.log.rollouts_every = 20, 7, 0, 0
        made.update_from_flattened_dict({name.replace('__', '.'): value for name, value in changes.items()})
        return made

    run(config(), tmp_path / 'whole')
    rows = metrics(tmp_path / 'whole')
    assert [r['step'] for r in rows] == list(range(21)) and acted(rows[1:])
    update, updates = Learner.update, []

    def stopped(self, *args):
        updates.append(1)
        if len(updates) == 11:
            os.kill(os.getpid(), signal.SIGTERM)
        return update(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Learner, 'update', stopped)
        assert run(config(), tmp_path / 'again').step == 11
    run(config(), tmp_path / 'again')
    assert metrics(tmp_path / 'again') == rows
