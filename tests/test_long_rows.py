"""Twenty steps of rows: every part acts, and a run stopped in the middle repeats the rest, bit for bit."""

import os
import signal

import numpy as np
import pytest
from small_run import metrics, run
from test_rows_run import row_config, tiny_base  # noqa: F401 - a fixture

from bapo_jax.learner.learner import Learner

pytestmark = pytest.mark.slow


def total(rows, name):
    return sum(row[name] for row in rows)


def f_grpo_acted(rows):
    """There are groups of more than one success rate strictly between 0 and 1: they count by it."""
    mixed = {k for row in rows for k, n in enumerate(row['accuracy_bins']) if n and 0 < k < 4}
    return len(mixed) > 1 and all(row['actor/grad_norm'] > 0 for row in rows)


def dppo_acted(rows):
    """Tokens are stopped, but not all, from the second mini-batch on: the policy has moved since it sampled."""
    return total(rows, 'actor/pg_clipfrac') > 0 and all(row['actor/pg_clipfrac'] < 0.2 for row in rows)


def m2po_acted(rows):
    """Nothing is masked where the policy itself answered, and some tokens are, where one of up to four steps ago did."""
    masked = {lag: {row['actor/trust_narrowed'] for row in rows if row['bapo/lag'] == lag} for lag in range(5)}
    return masked[0] == {0} and all(0 < x < 0.5 for lag in range(1, 5) for x in masked[lag]) and all(masked.values())


def sat_acted(rows):
    """A tenth of the tokens have a narrower clip where the policy has moved since it sampled; and the clip acts."""
    narrowed = {lag: [row['actor/trust_narrowed'] for row in rows if row['bapo/lag'] == lag] for lag in range(8)}
    assert max(narrowed.pop(0)) < 0.05  # rounding errors alone
    return all(x and 0.09 < min(x) <= max(x) < 0.12 for x in narrowed.values()) and total(rows, 'actor/pg_clipfrac') > 0


def gapo_acted(rows):
    """All tokens but those of the only right response of a group have a lower upper end than clip_high; and the clip acts."""
    narrowed = [row['actor/trust_narrowed'] for row in rows]
    return 0.5 < min(narrowed) < 1 and total(rows, 'actor/pg_clipfrac') > 0


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
    'f_grpo': ({}, f_grpo_acted),
    'dppo': ({'learner__clip_low': 1e-3, 'learner__clip_high': 1e-3, 'learner__learning_rate': 1e-2}, dppo_acted),
    'm2po': ({'rollout__sync_every': 5, 'learner__trust__moment': 1e-4, 'learner__learning_rate': 2e-3}, m2po_acted),
    'sat': (
        {'rollout__sync_every': 8, 'learner__clip_low': 0.02, 'learner__clip_high': 0.02, 'learner__learning_rate': 1e-3},
        sat_acted,
    ),
    'gapo': ({'learner__learning_rate': 2e-3}, gapo_acted),
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
