"""metrics.jsonl, TensorBoard and the progress that people see: each step once, whole rows."""

import pytest

from bapo_jax.run.log import MetricsLog, ProgressBar, read_metrics


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


def test_a_directory_without_metrics_has_no_rows(tmp_path):
    assert read_metrics(tmp_path) == []


def test_tensorboard_events_are_written(tmp_path):
    log = MetricsLog(tmp_path, -1)
    log.write(1, {'actor/lr': 0.5, 'accuracy_bins': [1, 2], 'bapo/r_tot': None})
    log.close()
    assert next((tmp_path / 'tensorboard').iterdir()).stat().st_size > 0
    assert read_metrics(tmp_path) == [{'step': 1, 'actor/lr': 0.5, 'accuracy_bins': [1, 2], 'bapo/r_tot': None}]


@pytest.mark.parametrize('steps, shown', [(25, [10, 20, 25]), (3, [3])])
def test_elsewhere_than_on_a_terminal_every_tenth_step_and_the_last_have_a_line(steps, shown, capsys):
    bar = ProgressBar(steps, 0)
    for step in range(1, steps + 1):
        groups = {'bapo/x1_groups': 5, 'bapo/x2_groups': 1, 'bapo/x3_groups': 2}
        bar.update(step, {'critic/score/mean': 0.5, **groups, 'timing_s/step': 1.5})
    bar.stop()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == [f'{step}/{steps}' for step in shown]
    assert 'reward 0.500   X1/X2/X3 5/1/2   1.5 s/step' in lines[0]
