"""Logs of rollouts and evaluations for Inspect, read back by its file format, restated in inspect_format.py."""

import json
import math
import sys

import numpy as np
import pytest
import zstandard
from inspect_format import read

from bapo_jax.report import inspect_log
from bapo_jax.scores import pass_at_k

VERDICTS = ['correct', 'wrong', 'unparseable', 'infra_error']
VALUES = {'correct': ('C', 1.0), 'wrong': ('I', 0.0), 'unparseable': ('N', 0.0)}


def group(prompt_id, verdicts, **more):
    G = len(verdicts)
    return {
        'use': 'x1', 'prompt_id': prompt_id, 'prompt': f'question {prompt_id}?', 'ground_truth': {'numbers': [1, 2], 'target': 3},
        'responses': [f'response {i} to {prompt_id} · √2' for i in range(G)], 'verdicts': verdicts,
        'rewards': [None if v == 'infra_error' else float(v == 'correct') for v in verdicts],
        'finish': ['length'] + ['stop'] * (G - 1), 'versions': [4] * G, 'step': 5, **more,
    }  # fmt: skip


GROUPS = [
    group(7, VERDICTS, answers=['3', '4', None, None]),
    group(9, ['correct', 'correct', 'wrong', 'wrong'], answers=['3', '3', '1', '1']),
    group(11, ['infra_error'] * 4, answers=[None] * 4),
]
SAMPLES = [
    {'benchmark': 'my_set.jsonl', 'question': i // 2, 'sample': i % 2, 'response': f'r{i}',
     'ground_truth': {'problem': f'p{i // 2}', 'answers': ['3', 'three']},
     'verdict': VERDICTS[i % 3], 'answer': str(i), 'finish': 'stop', 'tokens': 2}
    for i in range(4)
]  # fmt: skip
SCORES = {'questions': 2, 'samples': 2, 'mean': 0.5, 'pass': 1.0, 'infra_errors': 0}


@pytest.fixture
def run_directory(tmp_path):
    """A run with the rollouts of a step, an evaluation during training, and one by `evaluate`."""
    config = {
        'method': 'bapo', 'model': {'path': 'models/base'}, 'task': {'name': 'countdown'},
        'rollout': {'temperature': 1.0, 'max_response_tokens': 8}, 'evaluate': {'temperature': 0.6, 'max_response_tokens': 16},
    }  # fmt: skip
    evaluation = tmp_path / 'evaluation' / '000010'
    for folder in (tmp_path / 'rollouts', tmp_path / 'evals', evaluation):
        folder.mkdir(parents=True)
    (tmp_path / 'config.json').write_text(json.dumps(config))
    write_rollouts(tmp_path, GROUPS)
    told = {'step': 0, 'benchmarks': {'cd34': SCORES, 'data/none.jsonl': SCORES | {'mean': None, 'pass': None, 'infra_errors': 4}}}
    (tmp_path / 'evals' / '000000.json').write_text(json.dumps(told))
    (evaluation / 'my_set.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in SAMPLES))
    told = {'step': 10, 'config.evaluate.temperature': 0.0, 'benchmarks': {'data/my_set.jsonl': SCORES}}
    (evaluation / 'summary.json').write_text(json.dumps(told, indent=1))
    return tmp_path


def write_rollouts(run, groups):
    data = ''.join(json.dumps(g) + '\n' for g in groups).encode()
    (run / 'rollouts' / '000005.jsonl.zst').write_bytes(zstandard.compress(data))


def command(monkeypatch, *words):
    monkeypatch.setattr(sys, 'argv', ['inspect_log', *map(str, words)])
    inspect_log.run()


def test_a_log_says_what_was_sampled_and_how_it_was_judged(run_directory, monkeypatch):
    command(monkeypatch, run_directory)
    logs = {(log['task'], log['step']): log for log in read(run_directory / 'inspect')}
    assert set(logs) == {('countdown-rollouts', 5), ('cd34', 0), ('none', 0), ('my-set', 10)}

    log = logs['countdown-rollouts', 5]
    assert (log['model'], log['epochs'], log['temperature']) == ('bapo_jax/bapo-step-5', 4, 1.0)
    assert (log['total'], log['unscored']) == (12, 5)
    judged, correct = np.array([3, 4, 0]), np.array([1, 2, 0])
    assert math.isclose(log['metrics']['mean@4'], (1 / 3 + 1 / 2) / 2)
    assert log['metrics']['pass@4'] == np.nanmean(pass_at_k(judged, correct, 4)) == 1.0
    samples = iter(log['samples'])
    for g in GROUPS:
        for i, verdict in enumerate(g['verdicts']):
            s = next(samples)
            assert (s['id'], s['epoch'], s['input'], s['target']) == (g['prompt_id'], i + 1, g['prompt'], '3')
            assert (s['said'], s['messages'], s['reward']) == (g['responses'][i], 2, g['rewards'][i])
            assert s['stop'] == ('stop' if i else 'max_tokens')
            if verdict == 'infra_error':
                assert not s['score'] and s['error'] == 'no verdict: infra_error'
            else:
                assert tuple(s['score'].values()) == (*VALUES[verdict], g['answers'][i]) and s['error'] is None

    log = logs['my-set', 10]
    assert [(s['id'], s['epoch'], s['said'], s['input']) for s in log['samples']] == [
        (0, 1, 'r0', 'p0'), (0, 2, 'r1', 'p0'), (1, 1, 'r2', 'p1'), (1, 2, 'r3', 'p1')
    ]  # fmt: skip
    assert [s['score']['value'] for s in log['samples']] == ['C', 'I', 'N', 'C']
    assert log['samples'][0]['target'] == ['3', 'three'] and log['temperature'] == 0.0
    assert log['metrics'] == {'mean@2': 0.5, 'pass@2': 1.0}

    assert (logs['cd34', 0]['samples'], logs['cd34', 0]['metrics']) == ([], {'mean@2': 0.5, 'pass@2': 1.0})
    assert (logs['none', 0]['metrics'], logs['none', 0]['unscored']) == ({}, 4)


def test_rollouts_of_before_answers_were_kept_have_none(run_directory):
    write_rollouts(run_directory, [group(7, VERDICTS)])
    [log] = inspect_log.logs(run_directory, 5)
    assert [s['scores']['verdict']['answer'] for s in log['samples'] if 'scores' in s] == [None] * 3


def test_a_prompt_that_was_asked_twice_has_twice_the_epochs(run_directory):
    """As by refills: no response may hide another."""
    write_rollouts(run_directory, [group(7, VERDICTS), group(7, VERDICTS, use='x2')])
    [log] = inspect_log.logs(run_directory, 5)
    assert [(s['epoch'], s['metadata']['use']) for s in log['samples']] == [(i, 'x1' if i < 5 else 'x2') for i in range(1, 9)]


def test_a_step_that_sampled_nothing_has_no_log(run_directory):
    write_rollouts(run_directory, [])
    assert list(inspect_log.logs(run_directory, 5)) == []


def test_writing_again_replaces_and_one_step_can_be_chosen(run_directory, tmp_path, monkeypatch, capsys):
    for _ in range(2):
        command(monkeypatch, run_directory, f'--output={tmp_path}/all')
    command(monkeypatch, run_directory, '--step=5', f'--output={tmp_path}/one')
    [one] = (tmp_path / 'one').iterdir()
    everything = {file.name: file.read_bytes() for file in (tmp_path / 'all').iterdir()}
    assert len(everything) == 4 and everything[one.name] == one.read_bytes()
    assert capsys.readouterr().out.endswith(f'\n1 logs: {tmp_path}/one   to view them: inspect view --log-dir {tmp_path}/one\n')


@pytest.mark.parametrize('truth, expected', [
    ({'numbers': [1], 'target': 24}, '24'), ({'problem': 'x', 'answers': ['a', 'b']}, ['a', 'b']), ({'answer': 35}, '35'),
    ({'a': 2, 'b': 3}, '{"a": 2, "b": 3}'),
])  # fmt: skip
def test_the_target_is_what_the_task_accepts(truth, expected):
    assert inspect_log.target(truth) == expected


def test_what_cannot_be_exported_is_named(run_directory, tmp_path, monkeypatch):
    with pytest.raises(SystemExit, match=f'^error: {tmp_path}/typo is not a run directory .*give the --workdir of a run$'):
        command(monkeypatch, tmp_path / 'typo')
    with pytest.raises(SystemExit, match='^error: .* has no rollouts or evaluations to export, or none of --step'):
        command(monkeypatch, run_directory, '--step=3')
    assert not (run_directory / 'inspect').exists()
    for damaged in (b'no zstandard', zstandard.compress(b'{"use": ')):
        (run_directory / 'rollouts' / '000005.jsonl.zst').write_bytes(damaged)
        with pytest.raises(SystemExit, match=r'^error: .*/rollouts/000005\.jsonl\.zst is damaged \(.+\); restore or remove it$'):
            command(monkeypatch, run_directory)
