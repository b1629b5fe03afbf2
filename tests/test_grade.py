"""`python -m bapo_jax.grade`: one verdict a row, and a malformed row stops it with its line number."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bapo_jax import grade
from bapo_jax.grade import ROWS_AT_ONCE, parse_row
from bapo_jax.groups import Verdict
from bapo_jax.tasks.countdown.task import check_ground_truth

ROOT = Path(__file__).resolve().parents[1]
TRUTH = {'numbers': [44, 19, 35], 'target': 98}


def row(response='<answer>44+19+35</answer>', ground_truth=TRUTH):
    return json.dumps({'response': response, 'ground_truth': ground_truth}).encode()


def run(data, *arguments):
    command = [sys.executable, '-m', 'bapo_jax.grade', *arguments]
    return subprocess.run(
        command,
        input=data,
        capture_output=True,
        env={**os.environ, 'PYTHONPATH': os.pathsep.join([str(ROOT), *sys.path])},
        timeout=60,
    )


@pytest.mark.slow
def test_one_verdict_a_row():
    responses = ['<answer>44+19+35</answer>', 'é <answer>44 + 19</answer>', 'nothing', '<answer>\ud800</answer>']
    done = run(b'\n'.join(map(row, responses)), 'countdown')
    assert done.returncode == 0
    assert [json.loads(line) for line in done.stdout.splitlines()] == [
        {'verdict': 'correct', 'reward': 1.0, 'answer': '44+19+35'},
        {'verdict': 'wrong', 'reward': 0.0, 'answer': '44 + 19'},
        {'verdict': 'unparseable', 'reward': 0.0, 'answer': None},
        {'verdict': 'unparseable', 'reward': 0.0, 'answer': '\ud800'},
    ]
    assert done.stderr.decode().strip() == 'graded 4 rows: 1 correct, 1 wrong, 2 unparseable, 0 infra_error'


@pytest.mark.slow
def test_a_malformed_row_stops_it_after_the_rows_before_were_answered():
    done = run(row() + b'\n' + row() + b'\n{"response": 5, "ground_truth": {}}\n' + row(), 'countdown')
    assert done.returncode == 2
    assert len(done.stdout.splitlines()) == 2
    assert done.stderr.decode().startswith('line 3: "response" must be a string, got int\n')
    assert b'Traceback' not in done.stderr


@pytest.mark.slow
def test_mathematics_through_the_pool_in_order():
    responses = [r'\boxed{1+x}', r'\boxed{x-1}', 'It is x+1, I think.', r'\boxed{^}', r'<think>\boxed{x+1}']
    rows = [row(r, ['7', 'x+1']) for r in responses]
    rows += [row(r'\boxed{x}', r'\frac{'), row('7', '7'), row('7', {'answers': ['7'], 'boxed': True})]
    done = run(b'\n'.join(rows), 'math')
    assert done.returncode == 0, done.stderr
    assert [json.loads(line) for line in done.stdout.splitlines()] == [
        {'verdict': 'correct', 'reward': 1.0, 'answer': '1+x'},
        {'verdict': 'wrong', 'reward': 0.0, 'answer': 'x-1'},
        {'verdict': 'unparseable', 'reward': 0.0, 'answer': None},
        {'verdict': 'unparseable', 'reward': 0.0, 'answer': '^'},
        {'verdict': 'unparseable', 'reward': 0.0, 'answer': None},
        {'verdict': 'infra_error', 'reward': None, 'answer': 'x'},
        {'verdict': 'correct', 'reward': 1.0, 'answer': '7'},
        {'verdict': 'unparseable', 'reward': 0.0, 'answer': None},
    ]
    assert done.stderr.decode().strip() == 'graded 8 rows: 2 correct, 1 wrong, 4 unparseable, 1 infra_error'


@pytest.mark.slow
def test_geometry():
    rows = [row(r'\boxed{2√3\text{ cm}}', r'2 \sqrt { 3 }'), row(r'\boxed{m\angle A = 31^\circ}', {'answers': ['30']})]
    done = run(b'\n'.join(rows), 'geometry')
    assert [json.loads(line) for line in done.stdout.splitlines()] == [
        {'verdict': 'correct', 'reward': 1.0, 'answer': r'2\sqrt{3}'},
        {'verdict': 'wrong', 'reward': 0.0, 'answer': '31'},
    ]


@pytest.mark.slow
def test_more_rows_than_are_taken_at_once_stay_in_order():
    count = 2 * ROWS_AT_ONCE + 3
    done = run(b'\n'.join(row(f'\\boxed{{{i}}}', str(i - i % 2)) for i in range(count)) + b'\n{}', 'math')
    assert done.returncode == 2 and done.stderr.decode().startswith(f'line {count + 1}: "response" is missing')
    verdicts = [json.loads(line) for line in done.stdout.splitlines()]
    assert [v['answer'] for v in verdicts] == [str(i) for i in range(count)]
    assert [v['verdict'] for v in verdicts] == [('correct', 'wrong')[i % 2] for i in range(count)]


@pytest.mark.slow
def test_a_reader_that_leaves_ends_it_without_a_message(tmp_path):
    """As `| head -1` does."""
    rows = tmp_path / 'rows.jsonl'
    rows.write_bytes(b'\n'.join([row()] * 4 * ROWS_AT_ONCE))
    command = f'{sys.executable} -m bapo_jax.grade countdown < {rows} 2> {tmp_path}/errors | head -1; exit ${{PIPESTATUS[0]}}'
    environment = {**os.environ, 'PYTHONPATH': os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run(['bash', '-c', command], capture_output=True, env=environment, timeout=60)
    assert len(done.stdout.splitlines()) == 1
    assert done.returncode == 1 and (tmp_path / 'errors').read_text() == ''


@pytest.mark.slow
def test_workers_that_do_not_start_are_told_in_one_message():
    """As where memory is short: here a worker finds no module."""
    program = (
        'import sys; from bapo_jax import grade\n'
        'from bapo_jax.tasks.mathematics import task; from bapo_jax.tasks.verifier_pool import VerifierPool\n'
        "task._pool = lambda: VerifierPool('no_such_module_here', workers=1, wall_s=1.0)\n"
        "sys.argv = ['grade', 'math']; grade.main()"
    )
    done = subprocess.run(
        [sys.executable, '-c', program], input=row('\\boxed{x+1}', 'x+2'), capture_output=True, timeout=60,
        env={**os.environ, 'PYTHONPATH': os.pathsep.join([str(ROOT), *sys.path])},
    )  # fmt: skip
    assert done.returncode == 1 and b'Traceback' not in done.stderr
    assert b'error: 3 workers of no_such_module_here in a row ended before they were ready' in done.stderr


OWN = """
def exact(data_source, response, ground_truth, extra):
    if extra.get('finish') == 'length':
        raise RuntimeError('cut off')
    right = response == ground_truth['answer']
    return {'score': 1.0 if right else 0.25 * data_source.startswith('easy'), 'correct': right, 'pred': response}
"""


def as_a_command(rows, monkeypatch, capsys, *arguments):
    """(exit status, rows of stdout, stderr) of the command in this process."""
    monkeypatch.setattr(sys, 'argv', ['grade', *arguments])
    monkeypatch.setattr(sys, 'stdin', io.TextIOWrapper(io.BytesIO(b''.join(json.dumps(row).encode() + b'\n' for row in rows))))
    status, said = grade.main(), capsys.readouterr()
    return status, [json.loads(line) for line in said.out.splitlines()], said.err


def test_a_reward_function_judges_in_place_of_a_task(tmp_path, monkeypatch, capsys):
    (tmp_path / 'my_own_grades.py').write_text(OWN)
    monkeypatch.chdir(tmp_path)
    plain = {'response': '4', 'ground_truth': {'answer': '4'}}
    rows = [plain, plain | {'response': '5'}, plain | {'response': '5', 'data_source': 'easy'}]
    rows += [plain | {'response': '5', 'data_source': None}]
    rows += [plain | {name: {'finish': 'length'}} for name in ('extra', 'extra_info')]
    status, graded, _ = as_a_command(rows, monkeypatch, capsys, '--reward=my_own_grades:exact')
    assert status == 0
    assert graded == [
        {'verdict': 'correct', 'reward': 1.0, 'answer': '4'},
        {'verdict': 'wrong', 'reward': 0.0, 'answer': '5'},
        {'verdict': 'wrong', 'reward': 0.25, 'answer': '5'},
        {'verdict': 'wrong', 'reward': 0.0, 'answer': '5'},
        *2 * [{'verdict': 'infra_error', 'reward': None, 'answer': None}],
    ]


@pytest.mark.parametrize(
    ('column', 'message'),
    [
        ({'data_source': 5}, '"data_source" must be a string, got int; correct or remove it'),
        ({'extra': []}, '"extra" must be an object, got list; correct or remove it'),
        ({'extra_info': '{}'}, '"extra_info" must be an object, got str; correct or remove it'),
    ],
)
def test_a_column_that_no_reward_function_can_read_stops_it_with_the_line(column, message, monkeypatch, capsys):
    monkeypatch.setattr(grade, 'reward_judge', lambda name: lambda rows: [(Verdict.CORRECT, 1.0, None) for _ in rows])
    plain = {'response': '4', 'ground_truth': '4'}
    status, graded, said = as_a_command([plain, plain | column], monkeypatch, capsys, '--reward=some:function')
    assert (status, len(graded), said.splitlines()[0]) == (2, 1, f'line 2: {message}')


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        ([], 'give either a task or --reward=MODULE:FUNCTION'),
        (['math', '--reward=my_rewards:exact'], 'give either a task or --reward=MODULE:FUNCTION'),
        (['--reward=math:hypot3'], 'math has no function hypot3; add it'),
        (['--reward=exact'], "expected 'module:function', such as my_rewards:exact"),
    ],
)
def test_either_a_task_or_a_reward_function_that_exists_is_needed(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, 'argv', ['grade', *arguments])
    with pytest.raises(SystemExit) as error:
        grade.main()
    assert error.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.slow
def test_an_unknown_task_is_refused_with_the_choices():
    done = run(b'', 'chess')
    assert done.returncode == 2 and b'countdown' in done.stderr and done.stdout == b''


@pytest.mark.parametrize(
    ('line', 'message'),
    [
        (b'', 'JSON object'),
        (b'{"response": "x"', 'JSON object'),
        (b'[' * 100_000, 'JSON object'),
        (b'[1]', 'expected an object with "response" and "ground_truth", got list'),
        (b'\xff\xfe', 'UTF-8'),
        (b'{"ground_truth": {}}', '"response" is missing'),
        (b'{"response": "x"}', '"ground_truth" is missing'),
        (row(response=None), '"response" must be a string, got NoneType'),
        (row(ground_truth=None), 'ground_truth must be an object'),
        (row(ground_truth={'numbers': [1]}), r'ground_truth\.target is missing'),
        (row(ground_truth={'numbers': 1, 'target': 2}), r'ground_truth\.numbers must be'),
        (row(ground_truth={'numbers': [1], 'target': 'x'}), r'ground_truth\.target must be a number'),
    ],
)
def test_a_malformed_row_is_explained(line, message):
    with pytest.raises(ValueError, match=message):
        parse_row(line, lambda row: check_ground_truth(row['ground_truth']))
