"""What is written down: each step once, whole files, and numbers that account for every prompt."""

import json

import numpy as np
import pytest
from group_builders import judged_group

from bapo_jax.groups import Batch, Verdict
from bapo_jax.metrics import MetricsLog, Timer, batch_metrics, discarded_metrics, fresh_metrics, read_metrics, trained_tokens
from bapo_jax.report import draw_run

RIGHT, WRONG, NONE, BROKEN = Verdict.CORRECT, Verdict.WRONG, Verdict.UNPARSEABLE, Verdict.INFRA_ERROR


def groups():
    rng = np.random.default_rng(0)
    return [judged_group(i, v, rng) for i, v in enumerate([[RIGHT, WRONG], [NONE, NONE], [RIGHT, RIGHT], [RIGHT, BROKEN]])]


def test_rows_after_the_checkpoint_go_and_a_half_written_row_goes(tmp_path):
    log = MetricsLog(tmp_path, -1)
    for step in range(5):
        log.write(step, {'x': step})
    log.close()
    with (tmp_path / 'metrics.jsonl').open('a') as f:
        f.write('{"step": 5, "x"')
    assert [row['step'] for row in read_metrics(tmp_path)] == [0, 1, 2, 3, 4]
    log = MetricsLog(tmp_path, 2)
    log.write(3, {'x': 30})
    log.close()
    assert read_metrics(tmp_path) == [{'step': 0, 'x': 0}, {'step': 1, 'x': 1}, {'step': 2, 'x': 2}, {'step': 3, 'x': 30}]


def test_tensorboard_events_are_written(tmp_path):
    log = MetricsLog(tmp_path, -1)
    log.write(1, {'actor/lr': 0.5})
    log.close()
    assert next((tmp_path / 'tensorboard').iterdir()).stat().st_size > 0


def test_fresh_metrics_by_hand():
    m = fresh_metrics(groups())
    assert m['critic/score/mean'] == 0.5  # of the three judged groups: 1/2, 0, 1
    assert m['accuracy_bins'] == [1, 1, 1]
    assert (m['reward/unparseable'], m['reward/infra_error']) == (2, 1)


def test_discarded_and_kept_account_for_every_fresh_group():
    fresh = groups()
    assert discarded_metrics(fresh, fresh[:1]) == {'bapo/discarded/filtered': 2, 'bapo/discarded/infra_error': 1}


def test_batch_metrics_by_hand():
    g = groups()
    batch = Batch((g[0], g[2]), ('x1', 'x3'))
    ages = [7 - 1 - r.version for group in batch.groups for r in group.responses]
    m = batch_metrics(batch, step=7)
    assert (m['bapo/x1_groups'], m['bapo/x2_groups'], m['bapo/x3_groups'], m['bapo/batch_groups']) == (1, 0, 1, 2)
    assert (m['staleness/mean'], m['staleness/max']) == (np.mean(ages), max(ages))
    assert trained_tokens(batch) == sum(5 + len(r.tokens) for group in batch.groups for r in group.responses)
    assert batch_metrics(Batch((), ()), 1)['bapo/batch_groups'] == 0


def test_a_timer_adds_up_by_phase():
    timer = Timer()
    for _ in range(2):
        with timer('gen'):
            json.dumps('work')
    assert set(timer.seconds) == {'timing_s/gen'} and timer.seconds['timing_s/gen'] > 0


def test_a_run_without_a_step_has_no_figure(tmp_path):
    with pytest.raises(ValueError, match='no training step'):
        draw_run(tmp_path)
