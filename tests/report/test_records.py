"""What a run directory holds, read whole or in part."""

import pytest
from making import evaluation, make_run, row
from tensorboardX.event_file_writer import EventsWriter

from bapo_jax.report import figures
from bapo_jax.report.records import read_run
from bapo_jax.run.log.metrics import MetricsLog


def test_a_directory_that_is_no_run_is_named(tmp_path):
    with pytest.raises(ValueError, match=f'{tmp_path} is not a run directory'):
        read_run(tmp_path)


def test_a_run_without_a_training_step_is_named(tmp_path):
    with pytest.raises(ValueError, match='has no training step'):
        read_run(make_run(tmp_path / 'run', [{'step': 0, 'val-core/cd4/acc/mean@2': 0.5}]))


def test_scores_come_from_the_metrics_where_evals_are_absent(tmp_path):
    rows = [{'step': 0, 'val-core/a/acc/mean@4': 0.25, 'val-core/a/acc/pass@4': None}, row(1)]
    rows.append(row(2, **{'val-core/a/acc/mean@4': 0.5, 'val-core/a/acc/pass@4': 0.75}))
    score = read_run(make_run(tmp_path / 'run', rows)).scores['a']
    assert (score.samples, score.steps.tolist(), score.mean.tolist()) == (4, [0, 2], [0.25, 0.5])
    assert str(score.passed.tolist()) == '[nan, 0.75]'


def test_a_damaged_file_becomes_a_note(tmp_path):
    directory = make_run(tmp_path / 'run', [row(1)], [evaluation(0, [0], 0.5, 0.5)], [{'event': 'no time'}])
    (directory / 'evals' / '000001.json').write_text('{"step": 1, ')
    (directory / 'evals' / '000002.json').write_text('{"step": 2, "benchmarks": {"cd4": {"samples": 2}}}')
    (directory / 'config.json').write_text('[]')
    r = read_run(directory)
    evals = ['000001.json is damaged', '000002.json is damaged']
    assert r.notes == [*evals, 'line 1 of events.jsonl is damaged', 'config.json is damaged']
    assert len(r.tracked) == 1 and r.config == {} and r.faults == []


def test_a_last_row_that_a_crash_cut_short_is_left_out(tmp_path):
    directory = make_run(tmp_path / 'run', [row(1), row(2)])
    with (directory / 'metrics.jsonl').open('a') as f:
        f.write('{"step": 3, "critic')
    assert read_run(directory).steps.tolist() == [1, 2]


def write(log, steps):
    for step in steps:
        log.write(step, row(step))
    log.close()


def test_a_resumed_run_has_each_step_once_and_marks_the_restart(tmp_path, monkeypatch):
    monkeypatch.setattr('time.time', lambda: 1000.0)
    write(MetricsLog(tmp_path, -1), range(1, 8))
    monkeypatch.setattr('time.time', lambda: 2000.0)  # the second of the start names the file
    write(MetricsLog(tmp_path, 5), range(6, 11))
    r = read_run(tmp_path)
    assert r.steps.tolist() == list(range(1, 11)) and r.restarts == [6] and r.notes == []
    assert figures.reward(r).panels[0].marks == (6,)
    assert figures.faults(r).table.rows == (('restart', '1', '6 to 6', ''),)


def test_an_event_takes_its_own_step_or_the_last_one_before_it(tmp_path, monkeypatch):
    log = MetricsLog(tmp_path, -1)
    for step, seconds in ((1, 1000.0), (2, 2000.0), (3, 3000.0)):
        monkeypatch.setattr('time.time', lambda seconds=seconds: seconds)
        log.write(step, row(step))
    log.close()
    at = '1970-01-01T00:{:02}:00+00:00'
    events = [{'event': 'server lost', 'time': at.format(40)}, {'event': 'update skipped', 'time': at.format(1), 'step': 3}]
    make_run(tmp_path, [row(1), row(2), row(3)], events=[*events, {'event': 'server lost', 'time': at.format(5)}])
    r = read_run(tmp_path)
    assert [f.step for f in r.faults] == [2, 3, 0]
    assert figures.faults(r).table.rows == (('server lost', '2', '0 to 2', ''), ('update skipped', '1', '3 to 3', ''))
    assert figures.reward(r).panels[0].marks == (0, 2, 3)


def test_an_event_has_no_step_where_nothing_tells(tmp_path):
    event = {'event': 'server lost', 'time': '2026-01-01T00:00:00+00:00', 'message': 'gone'}
    figure = figures.faults(read_run(make_run(tmp_path / 'run', [row(1)], events=[event])))
    assert figure.panels == () and figure.table.rows == (('server lost', '1', 'unknown', 'gone'),)


def test_tensorboard_cut_short_keeps_what_lies_before(tmp_path):
    directory = make_run(tmp_path / 'run', [row(1)])
    (directory / 'tensorboard').mkdir()
    EventsWriter(str(directory / 'tensorboard' / 'events')).close()
    (file,) = (directory / 'tensorboard').iterdir()
    file.write_bytes(file.read_bytes() + b'\x09' * 20)
    assert read_run(directory).restarts == []
