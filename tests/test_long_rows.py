"""Twenty steps of the rows that remember or wait: every part acts, and a run stopped in the middle repeats the rest, bit for bit."""

import os
import signal

import numpy as np
import pytest
from small_run import metrics, run
from test_rows_run import row_config, tiny_base  # noqa: F401 - a fixture

from bapo_jax.learner.learner import Learner

pytestmark = pytest.mark.slow

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
