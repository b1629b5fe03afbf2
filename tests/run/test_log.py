"""metrics.jsonl, TensorBoard and the progress that people see: each step once, whole rows."""

import io
import re
import time
from types import SimpleNamespace

import pytest
from rich.console import Console
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.record_writer import RecordWriter

from bapo_jax.run.log.metrics import MetricsLog, read_metrics
from bapo_jax.run.log.progress import ProgressBar, side_by_side


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
    assert [(row['step'], row['x']) for row in read_metrics(tmp_path)] == [(0, 0), (1, 1), (2, 2), (3, 30)]


def test_a_row_has_its_time_in_utc_and_keeps_it_when_the_run_continues(tmp_path, monkeypatch):
    monkeypatch.setattr(time, 'time', lambda: 1_795_936_771.9)
    log = MetricsLog(tmp_path, -1)
    log.write(1, {'x': 0.5})
    log.close()
    monkeypatch.setattr(time, 'time', lambda: 1_800_000_000.0)
    MetricsLog(tmp_path, 1).close()
    assert read_metrics(tmp_path) == [{'step': 1, 'time': '2026-11-29T07:19:31+00:00', 'x': 0.5}]


def test_a_run_of_a_version_without_times_goes_on_with_them(tmp_path):
    (tmp_path / 'metrics.jsonl').write_text('{"step": 0}\n{"step": 1, "x": 0.5}\n')
    log = MetricsLog(tmp_path, 1)
    log.write(2, {'x': 1.5})
    log.close()
    *earlier, last = read_metrics(tmp_path)
    assert earlier == [{'step': 0}, {'step': 1, 'x': 0.5}] and last.keys() == {'step', 'time', 'x'}


def test_a_directory_without_metrics_has_no_rows(tmp_path):
    assert read_metrics(tmp_path) == []


@pytest.mark.parametrize('line', ['{"step": 1, "x": ', '[1]', '{"x": 1}', '[' * 100_000, '\xff'])
def test_a_damaged_row_is_named(line, tmp_path):
    (tmp_path / 'metrics.jsonl').write_bytes(b'{"step": 0}\n' + line.encode('latin1') + b'\n{"step": 2}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2 (is damaged|has no 'step').*restore the file, or remove that line"):
        read_metrics(tmp_path)


def test_rows_that_the_checkpoint_should_have_are_missed_aloud(tmp_path, caplog):
    (tmp_path / 'metrics.jsonl').write_text('{"step": 0}\n{"step": 1}\n')
    MetricsLog(tmp_path, 1).close()
    assert not caplog.records
    MetricsLog(tmp_path, 3).close()
    assert [r.row['event'] for r in caplog.records] == ['metrics missing']
    assert 'ends at step 1, but the checkpoint is of step 3; rows between are lost' in caplog.text


def test_rows_that_are_removed_while_the_run_goes_on_are_missed_aloud(tmp_path, caplog):
    log = MetricsLog(tmp_path, -1)
    log.write(1, {'x': 1.0})
    (tmp_path / 'metrics.jsonl').unlink()
    log.write(2, {'x': 2.0})
    log.write(3, {'x': 3.0})
    assert [row['step'] for row in read_metrics(tmp_path)] == [2, 3]
    assert caplog.text.count('metrics.jsonl was removed during the run; its earlier rows are lost') == 1
    log.close()


def test_a_full_disk_is_an_error_and_no_wait(tmp_path):
    log = MetricsLog(tmp_path, -1)
    log._tensorboard = open('/dev/full', 'wb')  # noqa: SIM115
    with pytest.raises(OSError, match='No space left'):
        for step in range(100):
            log.write(step, {'x': step})
    assert step == 0


def test_tensorboard_events_are_written(tmp_path):
    log = MetricsLog(tmp_path, -1)
    log.write(1, {'actor/lr': 0.5, 'accuracy_bins': [1, 2], 'bapo/r_tot': None})
    log.close()
    file, events = next((tmp_path / 'tensorboard').glob('events.out.tfevents.*')), []
    data = file.read_bytes()
    while data:
        length = int.from_bytes(data[:8], 'little')
        events.append(Event.FromString(data[12 : 12 + length]))
        data = data[16 + length :]
    theirs = RecordWriter(str(tmp_path / 'theirs'))
    for event in events:
        theirs.write(event.SerializeToString())
    theirs.close()
    assert file.read_bytes() == (tmp_path / 'theirs').read_bytes()  # lengths and checksums too
    assert events[0].file_version == 'brain.Event:2' and events[1].step == 0 and events[1].session_log.status == 1
    assert [(e.step, [(v.tag, v.simple_value) for v in e.summary.value]) for e in events[2:]] == [(1, [('actor/lr', 0.5)])]
    [row] = read_metrics(tmp_path)
    del row['time']
    assert row == {'step': 1, 'actor/lr': 0.5, 'accuracy_bins': [1, 2], 'bapo/r_tot': None}


def test_elsewhere_than_on_a_terminal_the_start_of_other_work_is_a_line_and_then_one_every_few_minutes(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr('bapo_jax.run.log.progress.time', SimpleNamespace(monotonic=lambda: now[0], perf_counter=time.perf_counter))
    bar = ProgressBar(9, 0)
    for now[0] in range(0, 500, 10):
        bar.note(f'scoring the base: {now[0]:g}')
    bar.note('step 1: sampling')
    assert capsys.readouterr().out.splitlines() == [f'scoring the base: {n}' for n in (0, 190, 380)] + ['step 1: sampling']


@pytest.mark.parametrize('steps, shown', [(25, [10, 20, 25]), (3, [3])])
def test_elsewhere_than_on_a_terminal_every_tenth_step_and_the_last_have_a_line(steps, shown, capsys):
    bar = ProgressBar(steps, 0)
    for step in range(1, steps + 1):
        groups = {'bapo/x1_groups': 5, 'bapo/x2_groups': 1, 'bapo/x3_groups': 2}
        bar.update(step, {'critic/score/mean': 0.5, **groups, 'timing_s/step': 1.5})
    bar.stop()
    assert bar._bar.live.refresh_per_second == 1  # where it is a bar: more often costs more than it shows
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == [f'{step}/{steps}' for step in shown]
    assert 'reward 0.500   X1/X2/X3 5/1/2   1.5 s/step   left' in lines[0]


def test_a_line_has_tokens_a_second_of_both_sides_and_who_waits(capsys):
    groups = {'critic/score/mean': 0.5, 'bapo/x1_groups': 5, 'bapo/x2_groups': 1, 'bapo/x3_groups': 2, 'timing_s/step': 1.5}
    bar = ProgressBar(1, 0)
    rates = {'perf/throughput/update': 12_345.6, 'perf/throughput/gen': 987.4}
    bar.update(1, {**groups, **rates})
    assert '1.5 s/step   12.3k/987 tok/s   left 0.0 min' in capsys.readouterr().out
    bar.update(1, {**groups, **rates, 'perf/idle/trainer': 0.204, 'perf/idle/engine': 0.6, 'perf/mfu/actor': 0.317})
    assert '12.3k/987 tok/s   idle 20/60%   MFU 32%   left 0.0 min' in capsys.readouterr().out
    bar.stop()


def test_at_80_columns_the_counts_and_the_time_left_are_whole(monkeypatch):
    shown = Console(width=80, force_terminal=True, file=io.StringIO())
    monkeypatch.setattr('bapo_jax.machine.terminal.console', lambda: shown)
    monkeypatch.setattr('bapo_jax.machine.terminal.guard', lambda: None)
    bar = ProgressBar(1000, 0)
    bar.stop()
    groups = {'critic/score/mean': 0.5, 'bapo/x1_groups': 120, 'bapo/x2_groups': 8, 'bapo/x3_groups': 128}
    bar.update(123, {**groups, 'timing_s/step': 123.4, 'perf/throughput/update': 12_345.6, 'perf/throughput/gen': 34_567.8,
                     'perf/idle/trainer': 0.5, 'perf/idle/engine': 0.25, 'perf/mfu/actor': 0.3,
                     'perf/servers/cache_used': 0.987, 'perf/servers/preemptions': 3.0})  # fmt: skip
    with shown.capture() as said:
        shown.print(bar._bar.get_renderable())
    lines = [' '.join(line.split()) for line in re.sub(r'\x1b\[[0-9;]*m', '', said.get()).splitlines()]
    assert lines[0].startswith('step 123/1000 ') and lines[0].endswith(' left -:--:-- reward 0.500 X1/X2/X3 120/8/128')
    assert lines[1:] == ['123.4 s/step 12.3k/34.6k tok/s', 'idle 50/25% MFU 30% cache 99%', '3 preempted']


def test_parts_of_a_line_are_packed_whole():
    assert side_by_side(['reward 0.500', '1.5 s/step', 'idle 20/60%'], 25) == ['reward 0.500   1.5 s/step', 'idle 20/60%']
    assert side_by_side(['longer than the line', 'x'], 5) == ['longer than the line', 'x']


def test_what_is_printed_above_the_bar_breaks_no_word(monkeypatch):
    shown = Console(width=20, force_terminal=True, file=io.StringIO())
    monkeypatch.setattr('bapo_jax.machine.terminal.console', lambda: shown)
    bar = ProgressBar(9, 0)
    bar.stop()
    with shown.capture() as said:
        bar.show('step 1, correct: one two three')
    assert said.get().split('\n') == ['step 1, correct: one', 'two three', '']
