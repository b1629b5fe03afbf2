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


def luffy_acted(rows):
    """Some prompts have a trace and some none; a trace makes room for itself, and some are wrong."""
    groups = total(rows, 'traces/groups')
    assert rows[-1]['rollout/discarded_total'] == rows[-1]['traces/groups_total'] == groups
    assert 0 < total(rows, 'traces/correct') < groups < total(rows, 'bapo/x1_groups') == 20 * 8
    assert all(row['actor/trace_loss'] != 0 for row in rows)


def relift_acted(rows):
    """Demonstrations join at some steps, and some prompts still wait; a batch of RL alone has no supervised loss."""
    joined = [row['traces/demonstrations'] for row in rows]
    assert set(joined) == {0, 2} and max(row['traces/queued'] for row in rows) > 0
    assert [row['actor/ce_loss'] > 0 for row in rows] == [n > 0 for n in joined]
    assert all(row['bapo/batch_groups'] == 8 + n for row, n in zip(rows, joined)) and rows[-1]['rollout/discarded_total'] == 0


# Row -> (changes that let its parts act within 20 steps, what must have acted, of the rows of metrics.jsonl).
LONG = {
    'luffy': ({}, luffy_acted),
    'relift': ({'replay__traces__demonstrations': 2}, relift_acted),
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
