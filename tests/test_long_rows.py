"""Rows through 20 real steps, cut in the middle and continued: every part acts, and no number of the whole run changes."""

import shutil

import jax
import numpy as np
import pytest
from small_run import metrics, run
from test_rows_run import row_config, tiny_base

pytestmark = pytest.mark.slow
__all__ = ['tiny_base']  # a fixture


def total(rows, name):
    return sum(row.get(name, 0) for row in rows)


def f_grpo_acted(rows):
    """There are groups of more than one success rate strictly between 0 and 1: they count by it."""
    assert len({k for row in rows for k, n in enumerate(row['accuracy_bins']) if n and 0 < k < 4}) > 1
    assert all(row['actor/grad_norm'] > 0 for row in rows)


def dppo_acted(rows):
    """Tokens are stopped, but not all, from the second mini-batch on: the policy has moved since it sampled."""
    assert total(rows, 'actor/pg_clipfrac') > 0 and all(row['actor/pg_clipfrac'] < 0.2 for row in rows)


def m2po_acted(rows):
    """Nothing is masked where the policy itself answered, and some tokens are, where one of up to four steps ago did."""
    assert {row['bapo/lag'] for row in rows} == {0, 1, 2, 3, 4}
    assert all(0 < row['actor/trust_narrowed'] < 0.5 if row['bapo/lag'] else row['actor/trust_narrowed'] == 0 for row in rows)
    assert total(rows, 'actor/pg_clipfrac') == 0


def sat_acted(rows):
    """A tenth of the tokens have a narrower clip where the policy has moved since it sampled; and the clip acts."""
    assert {row['bapo/lag'] for row in rows} == set(range(8))
    assert all(0.09 < row['actor/trust_narrowed'] < 0.12 for row in rows if row['bapo/lag']) and total(rows, 'actor/pg_clipfrac') > 0
    assert all(row['actor/trust_narrowed'] < 0.05 for row in rows if not row['bapo/lag'])  # only rounding errors


def gapo_acted(rows):
    """All tokens but those of the only right response of a group have a lower upper end than clip_high; and the clip acts."""
    assert all(0.5 < row['actor/trust_narrowed'] <= 1 for row in rows) and min(row['actor/trust_narrowed'] for row in rows) < 1
    assert total(rows, 'actor/pg_clipfrac') > 0


# Row -> (changes that let its parts act within 20 steps, what must have acted, of the rows of metrics.jsonl).
LONG = {
    'f_grpo': ({}, f_grpo_acted),
    'dppo': ({'learner__clip_low': 1e-3, 'learner__clip_high': 1e-3, 'learner__learning_rate': 1e-2}, dppo_acted),
    'm2po': ({'rollout__sync_every': 5, 'learner__trust__moment': 1e-4, 'learner__learning_rate': 2e-3}, m2po_acted),
    'sat': (
        {'rollout__sync_every': 8, 'learner__clip_low': 0.02, 'learner__clip_high': 0.02, 'learner__learning_rate': 1e-3},
        sat_acted,
    ),
    'gapo': ({'learner__learning_rate': 2e-3}, gapo_acted),
}  # fmt: skip


@pytest.mark.parametrize('method', LONG)
def test_twenty_steps_with_a_resume(method, tiny_base, tmp_path):
    changes, acted = LONG[method]
    whole, again = tmp_path / 'whole', tmp_path / 'again'

    def config():
        c = row_config(method, tiny_base)
        c.update_from_flattened_dict({name.replace('__', '.'): value for name, value in changes.items()})
        c.steps, c.checkpoint.every, c.log.theory_every = 20, 10, 10
        return c

    first = run(config(), whole)
    rows = metrics(whole)
    assert [row['step'] for row in rows] == list(range(21))
    acted(rows[1:])
    shutil.copytree(whole, again)
    shutil.rmtree(again / 'checkpoints' / '20')
    second = run(config(), again)
    assert metrics(again) == rows
    jax.tree.map(np.testing.assert_array_equal, *map(jax.device_get, (first.theta, second.theta)))
