"""A run directory is read whatever state it is in: running, stopped, crashed, finished, old, damaged, read-only; nothing is written."""

import json
import os
import sys
from pathlib import Path

import pytest
import zstandard

from bapo_jax.machine.lock import held
from bapo_jax.run.starts import record_end
from bapo_jax.show.__main__ import run as show
from bapo_jax.show.lines import lines_of, outcome_of
from bapo_jax.show.story import read_story

SETTINGS = {'method': 'bapo', 'steps': 4, 'task': {'name': 'countdown'}}
START = {'time': '2026-11-29T07:18:34+00:00', 'step': 0, 'steps': 4, 'command': 'bapo-train', 'host': 'here', 'devices': '1 cpu'}


def group(*responses):
    texts, verdicts = zip(*responses, strict=True)
    columns = {name: ['x'] * len(texts) for name in ('rewards', 'finish', 'versions')}
    return {'use': 'x1', 'prompt_id': 1, 'prompt': '3 5=8', 'ground_truth': {}, 'responses': texts, 'verdicts': verdicts, **columns}


def rollouts(run, step, *groups):
    (run / 'rollouts').mkdir(exist_ok=True)
    data = zstandard.compress(''.join(json.dumps(row) + '\n' for row in groups).encode())
    (run / 'rollouts' / f'{step:06d}.jsonl.zst').write_bytes(data)


def written(run, settings=SETTINGS, steps=4, timed=True):
    """A run directory after some steps."""
    run.mkdir(parents=True)
    (run / 'config.json').write_text(json.dumps(settings))
    rows = [{'step': i, **({'time': f'2026-11-29T07:20:0{i}+00:00'} if timed else {}), 'timing_s/step': 2.0} for i in range(steps + 1)]
    (run / 'metrics.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
    (run / 'evals').mkdir()
    for step in (0, 2, 4):
        summary = {'questions': 10, 'samples': 2, 'mean': 0.1 + step / 10, 'pass': 0.5}
        (run / 'evals' / f'{step:06d}.json').write_text(json.dumps({'step': step, 'benchmarks': {'cd4': summary}}))
    (run / 'checkpoints' / '2').mkdir(parents=True)
    (run / 'events.jsonl').write_text('{"event": "server lost"}\n{"event": "server lost"}\n')
    rollouts(run, 2, group(('5+3', 'correct')))
    rollouts(run, 4, group(('?', 'infra_error'), ('3*5', 'wrong'), ('3', 'wrong')))
    return run


def files(directory):
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in directory.rglob('*') if path.is_file()}


def test_a_run_tells_what_its_files_say_and_nothing_is_written(tmp_path):
    run = written(tmp_path / 'run', SETTINGS | {'starts': [START]})
    before = files(run)
    told = read_story(run)
    assert (told.step, told.rows, told.seconds, told.checkpoint, told.held) == (4, 4, 8.0, 2, False)
    assert told.written == '2026-11-29T07:20:04+00:00' and [row['step'] for row in told.first] == [1, 2, 3, 4]
    assert {step: of['cd4']['mean'] for step, of in told.scores.items()} == {0: 0.1, 4: 0.5}
    assert told.events == {'server lost': 2} and told.notes == []
    assert [(r.step, r.verdict, r.response) for r in told.responses] == [(2, 'correct', '5+3'), (4, 'wrong', '3*5')]
    assert outcome_of(told) == 'crashed after step 4 of 4, or copied while it ran; the same command continues after step 2'
    assert files(run) == before


def test_a_run_is_running_while_its_directory_is_held_and_then_has_ended(tmp_path):
    settings = SETTINGS | {'starts': [START]}
    run = written(tmp_path / 'run', settings, steps=3)
    with held(run):
        assert outcome_of(read_story(run)) == 'running, after step 3 of 4'
        record_end(run, settings, 3, finished=False)
    assert outcome_of(read_story(run)) == 'stopped after step 3 of 4; the same command continues'
    record_end(run, settings, 4, finished=True)
    assert outcome_of(read_story(run)) == 'finished, 4 steps'


def test_an_old_run_and_one_that_has_only_begun_are_told(tmp_path):
    old = read_story(written(tmp_path / 'old', timed=False))
    assert outcome_of(old) == 'finished, 4 steps' and old.written.endswith('+00:00')
    (tmp_path / 'new').mkdir()
    (tmp_path / 'new' / 'config.json').write_text(json.dumps(SETTINGS | {'starts': [START]}))
    new = read_story(tmp_path / 'new')
    assert outcome_of(new) == 'crashed before the first step of 4, or copied while it ran; the same command starts over' and new.written is None
    with (tmp_path / 'new' / 'metrics.jsonl').open('w') as f:
        f.write('{"step": 0, "ti')  # killed while it wrote its first row
    assert read_story(tmp_path / 'new').rows == 0
    (tmp_path / 'old' / 'config.json').unlink()
    assert read_story(tmp_path / 'old').notes == ['config.json is missing, so settings and starts are unknown; restore it']


def test_damaged_files_are_noted_and_the_rest_is_told(tmp_path, caplog):
    starts = [{}, {'end': 3, 'steps': 'x', 'time': 5, 'commit': 7, 'step': []}]
    sections = {'learner': [], 'rollout': None, 'model': 'x', 'fingerprints': {'model': 3}}
    run = written(tmp_path / 'run', SETTINGS | sections | {'starts': starts})
    rollouts(run, 5, {'prompt': 'no verdicts'})
    (run / 'rollouts' / '000006.jsonl.zst').write_bytes(b'no zstandard')
    (run / 'evals' / '000004.json').write_text('{"benchmarks": 7}')
    (run / 'events.jsonl').write_text('{"event": "server lost"}\n[\n[1]\n')
    told = read_story(run)
    assert [note.split(' is damaged')[0] for note in told.notes] == [
        'line 2 of events.jsonl', 'line 3 of events.jsonl', 'rollouts/000006.jsonl.zst', 'rollouts/000005.jsonl.zst',
    ]  # fmt: skip
    assert list(told.scores) == [0] and '000004.json cannot be read' in caplog.text
    assert [r.verdict for r in told.responses] == ['wrong'] and told.events == {'server lost': 1}
    assert dict(lines_of(told))['outcome'].startswith('crashed after step 4 of 4')


@pytest.mark.parametrize('name, said', [
    ('damaged', r'damaged/config\.json is damaged \(Expecting value.*\); restore it, or give another --workdir$'),
    ('nowhere', r'nowhere does not exist; give the --workdir of a run$'),
    ('empty', r'empty is not a run directory \(no config\.json and no metrics\.jsonl\); give the --workdir of a run$'),
    ('model', r'model is not a run directory \(its config\.json has no settings of a run\); give the --workdir of a run$'),
    ('runs', r'runs is not a run directory .* give the --workdir of a run, such as .*runs/a, .*runs/b$'),
    ('runs/a/metrics.jsonl', r'metrics\.jsonl is a file and not a run directory; give the --workdir of a run, such as .*runs/a$'),
    ('runs/a/checkpoints', r'checkpoints is not a run directory .* such as .*runs/a$'),
])  # fmt: skip
def test_what_is_no_run_directory_is_said_with_those_nearby(name, said, tmp_path, monkeypatch):
    (tmp_path / 'empty').mkdir()
    (tmp_path / 'damaged').mkdir()
    (tmp_path / 'damaged' / 'config.json').write_text('{"task": ')
    (tmp_path / 'model').mkdir()
    (tmp_path / 'model' / 'config.json').write_text('{"model_type": "qwen2"}')
    for run in ('a', 'b'):
        written(tmp_path / 'runs' / run)
    monkeypatch.setattr(sys, 'argv', ['bapo-show', str(tmp_path / name)])
    with pytest.raises(SystemExit, match=rf'^error: {tmp_path}/\S*{said}'):
        show()


def test_the_command_shows_a_run_on_a_read_only_mount_and_leaves_it(tmp_path, monkeypatch, capsys):
    run = written(tmp_path / 'run', SETTINGS | {'starts': [START]})
    (run / 'lock').write_text(json.dumps({'token': 'b', 'pid': 2**30, 'machine': 'gone', 'host': 'gone', 'renewed': 1}))
    monkeypatch.setattr('bapo_jax.machine.lock.WATCH_S', 0.2)
    before, opened = files(run), os.open

    def read_only(path, flags, *how, **more):
        if str(path).startswith(str(run)) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(30, 'Read-only file system', str(path))
        return opened(path, flags, *how, **more)

    monkeypatch.setattr(os, 'open', read_only)
    for way in ('write_text', 'write_bytes', 'unlink', 'mkdir', 'touch'):
        monkeypatch.setattr(Path, way, lambda *_, **__: pytest.fail('written'))
    monkeypatch.setattr(sys, 'argv', ['bapo-show', str(run)])
    show()
    told = capsys.readouterr().out
    assert 'crashed after step 4 of 4' in told and '3 5=8 → 5+3' in told and 'cd4 mean@2: 10.0 → 50.0' in told
    monkeypatch.undo()
    assert files(run) == before
