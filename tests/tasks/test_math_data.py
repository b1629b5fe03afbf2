"""Every shape of row becomes the same problem, and whatever is wrong with a source is said with its file and row."""

import gzip
import json
import logging
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
from hub_stub import folder_files

from bapo_jax.machine import hub
from bapo_jax.tasks.mathematics.problems import _HUB, BENCHMARKS, SUFFIX, benchmark, read_problems, training_problems

SHARED = Path(__file__).resolve().parents[3] / 'shared' / 'data'
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason='the shared data directory is absent')

ROWS = [{'problem': f'What is {i}+1?', 'answer': str(i + 1), 'solution': 'count'} for i in range(4)]
PROBLEMS = [{'problem': f'What is {i}+1?', 'answers': [str(i + 1)]} for i in range(4)]


def write(path, rows):
    if path.suffix == '.parquet':
        pa.parquet.write_table(pa.Table.from_pylist(rows), path)
    else:
        data = ''.join(json.dumps(row) + '\n' for row in rows).encode()
        path.write_bytes(gzip.compress(data) if path.suffix == '.gz' else data)
    return str(path)


# ---- shapes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('name', ['a.parquet', 'a.jsonl', 'a.jsonl.gz'])
def test_reads_every_format(tmp_path, name):
    path = write(tmp_path / name, ROWS)
    for limit, expected in [(0, PROBLEMS), (-1, PROBLEMS), (2, PROBLEMS[:2]), (99, PROBLEMS)]:
        assert training_problems(path, limit=limit, seed=0) == expected
    assert benchmark(path) == PROBLEMS


def verl(problem, truth, **more):
    prompt = [{'role': 'system', 'content': 'Be brief.'}, {'role': 'user', 'content': problem}]
    return {'data_source': 'x', 'prompt': prompt, 'reward_model': {'style': 'rule', 'ground_truth': truth}, **more}


@pytest.mark.parametrize('name', ['a.parquet', 'a.jsonl'])
def test_a_row_of_verl_keeps_its_chat_and_what_a_reward_function_is_told(tmp_path, name):
    rows = [
        verl('What is 0+1?' + SUFFIX, '["1", "one"]', extra_info={'index': 0}),
        {**verl('q', ['2']), 'problem': 'x', 'answer': 'x'},
    ]
    before = [{'role': 'system', 'content': 'Be brief.'}]
    assert training_problems(write(tmp_path / name, rows[:1]), limit=0, seed=0) == [{
        'problem': 'What is 0+1?' + SUFFIX, 'answers': ['1', 'one'], 'before': before,
        'row': {'data_source': 'x', 'extra_info': {'index': 0}, 'ground_truth': '["1", "one"]'},
    }]  # fmt: skip
    [problem] = read_problems(write(tmp_path / name, rows[1:]))
    assert (problem['problem'], problem['answers']) == ('q', ['2'])


def test_training_keeps_the_first_of_equal_problems_and_says_so(tmp_path, caplog):
    """An epoch of DAPO-Math-17k asks each problem 100 times; the copies differ in what says where they stand."""
    copies = [verl('What is 0+1?', '1', extra_info={'index': i}) for i in range(100)]
    path = write(tmp_path / 'a.parquet', [*copies, verl('What is 0+1?', '2', extra_info={'index': 0})])
    with caplog.at_level(logging.WARNING):
        assert [p['answers'] for p in training_problems(path, limit=0, seed=0)] == [['1'], ['2']]
    assert '99 of 101 rows repeat an earlier problem and are left out of training; 2 distinct problems are' in caplog.text
    assert [p['answers'] for p in training_problems(path, limit=2, seed=0)] == [['1'], ['2']]  # the limit counts distinct ones
    assert len(benchmark(path)) == 101


@pytest.mark.parametrize(
    ('answer', 'answers'),
    [
        ('5', ['5']),
        (' 5 ', ['5']),
        (5, ['5']),
        (142.0, ['142']),
        (0.5, ['0.5']),
        (['a', 'b', 'a'], ['a', 'b']),
        ([1, '1.0'], ['1', '1.0']),
    ],
)
def test_answers_become_a_list_of_texts(tmp_path, answer, answers):
    path = write(tmp_path / 'a.jsonl', [{'problem': 'p', 'answer': answer}])
    assert read_problems(path) == [{'problem': 'p', 'answers': answers}]
    path = write(tmp_path / 'b.jsonl', [{'question': 'p', 'final_answer': answer}])
    assert read_problems(path) == [{'problem': 'p', 'answers': answers}]


def test_numbers_in_a_parquet_column(tmp_path):
    assert read_problems(write(tmp_path / 'a.parquet', [{'problem': 'p', 'answer': 25}])) == [{'problem': 'p', 'answers': ['25']}]
    assert read_problems(write(tmp_path / 'a.parquet', [{'problem': 'p', 'answer': 142.0}])) == [
        {'problem': 'p', 'answers': ['142']}
    ]


@needs_shared
def test_reads_the_shared_training_file():
    problems = training_problems(str(SHARED / 'math_train.jsonl.gz'), limit=0, seed=0)
    assert len(problems) == 9138  # of 9,658 rows three have an empty answer, and 517 repeat a problem
    assert problems[0]['answers'] == [r'\frac{3}{7}'] and problems[0]['problem'].startswith('Find the probability that a monkey')


# ---- benchmarks -------------------------------------------------------------------------------------------------------


@needs_shared
@pytest.mark.parametrize(
    ('name', 'rows'), [('aime24', 30), ('amc23', 83), ('math500', 500), ('minerva', 272), ('olympiadbench', 675)]
)
def test_the_benchmarks_in_the_unified_file(monkeypatch, name, rows):
    monkeypatch.setenv('BAPO_DATA', str(SHARED))
    problems = benchmark(name)
    assert len(problems) == rows
    assert all(p['problem'] and p['answers'] for p in problems)


def test_there_are_five_benchmarks():
    assert list(BENCHMARKS) == list(_HUB) == ['aime24', 'amc23', 'math500', 'minerva', 'olympiadbench']


def test_a_benchmarks_own_file_goes_before_the_unified_one(tmp_path, monkeypatch):
    monkeypatch.setenv('BAPO_DATA', str(tmp_path))
    write(
        tmp_path / 'math_test.jsonl.gz',
        [{'dataset': 'aime24', **ROWS[0]}, {'dataset': 'amc23', **ROWS[1]}, {'dataset': 'amc23', **ROWS[2]}],
    )
    assert benchmark('amc23') == PROBLEMS[1:3]
    write(tmp_path / 'amc23.jsonl', ROWS[3:])
    assert benchmark('amc23') == PROBLEMS[3:] and benchmark('aime24') == PROBLEMS[:1]


def test_a_benchmark_that_the_directory_lacks_is_not_downloaded_instead(tmp_path, monkeypatch):
    monkeypatch.setenv('BAPO_DATA', str(tmp_path))
    monkeypatch.setattr(hub, 'dataset_files', lambda *a, **k: pytest.fail('asked the hub'))
    for _ in range(2):
        with pytest.raises(FileNotFoundError, match=r'neither minerva\.jsonl.*nor rows of minerva in math_test\.jsonl\.gz'):
            benchmark('minerva')
        write(tmp_path / 'math_test.jsonl.gz', [{'dataset': 'aime24', **ROWS[0]}])


def test_without_a_directory_a_benchmark_comes_from_the_hub(tmp_path, monkeypatch, hub_stub):
    monkeypatch.delenv('BAPO_DATA', raising=False)
    rows = [{'question': 'What is 0+1?', 'final_answer': ['1']}]
    for name in ('OE_TO_maths_en_COMP', 'OE_TO_maths_zh_COMP'):
        (tmp_path / 'OlympiadBench' / name).mkdir(parents=True)
        write(tmp_path / 'OlympiadBench' / name / f'{name}.parquet', rows)
    hub_stub.repos['datasets/Hothan/OlympiadBench'] = {'main': folder_files(tmp_path)}
    write(tmp_path / 'test.jsonl', ROWS)
    hub_stub.repos['datasets/HuggingFaceH4/MATH-500'] = {'main': {'test.jsonl': (tmp_path / 'test.jsonl').read_bytes()}}
    assert benchmark('olympiadbench') == PROBLEMS[:1]
    assert benchmark('math500') == PROBLEMS
    assert hub_stub.files_asked() == ['OlympiadBench/OE_TO_maths_en_COMP/OE_TO_maths_en_COMP.parquet', 'test.jsonl']


def test_an_unknown_benchmark_is_refused_with_the_known_ones():
    with pytest.raises(
        ValueError, match=r"unknown math benchmark 'cd34'; choose one of aime24, amc23, math500, minerva, olympiadbench, a file"
    ):
        benchmark('cd34')


# ---- what is wrong with a source --------------------------------------------------------------------------------------

GOOD = '{"problem": "p", "answer": "5"}'
BAD_ROWS = {
    'no answer': ('{"problem": "p"}', r"column 'answer' is missing; the row has problem"),
    'no problem': ('{"answer": "5"}', r"column 'problem' is missing"),
    'answer null': ('{"problem": "p", "answer": null}', '"answer" must be an answer or a list'),
    'answer empty': ('{"problem": "p", "answer": " "}', '"answer" must be an answer'),
    'answer true': ('{"problem": "p", "answer": true}', '"answer" must be an answer'),
    'answer nan': ('{"problem": "p", "answer": NaN}', '"answer" must be an answer'),
    'answer an object': ('{"problem": "p", "answer": {}}', '"answer" must be an answer'),
    'no accepted answer': ('{"problem": "p", "answer": []}', '"answer" must be an answer'),
    'one of them empty': ('{"problem": "p", "answer": ["5", ""]}', '"answer" must be an answer'),
    'problem null': ('{"problem": null, "answer": "5"}', 'the problem must be a string, got None'),
    'problem empty': ('{"problem": "  ", "answer": "5"}', 'the problem must be a string'),
    'verl without a ground truth': (
        '{"prompt": [{"role": "user", "content": "p"}], "reward_model": {}}',
        '"reward_model" must be an object',
    ),
    'a prompt without an answer': ('{"prompt": [{"role": "user", "content": "p"}]}', "column 'answer' is missing; the row has"),
    'a prompt that is no chat': ('{"prompt": [5], "answer": "5"}', "the problem must be a string, or 'prompt' a list of"),
    'a chat without messages': ('{"messages": [], "answer": "5"}', "the last message of 'messages' must be the problem"),
    'a chat that is answered': ('{"prompt": [{"role": "assistant", "content": "p"}], "answer": "5"}', "the last message of 'prompt' must be the problem, from the user"),
    'one of four': ('{"question": "p", "choices": ["5", "6"], "answer": 1}', "multiple-choice questions with a column 'choices' are not supported"),
    'a worked solution without a result': (
        json.dumps({'question': 'p', 'answer': 'He has three apples and buys two more of them. ' * 3 + 'So he has five.'}),
        '"answer" must be an answer',
    ),
    'a proof': ('{"problem": "p", "answer": "proof"}', '"answer" must be an answer'),
    'verl without a user': (
        '{"prompt": [{"role": "system", "content": "p"}], "reward_model": {"ground_truth": "5"}}',
        "the last message of 'prompt' must be the problem, from the user",
    ),
    'verl with an empty answer': ('{"prompt": "p", "reward_model": {"ground_truth": ""}}', r'"reward_model\.ground_truth" must be'),
    'not an object': ('[1, 2]', 'expected an object'),
    'cut short': ('{"problem": "p", "ans', 'not a line of JSON'),
    'nested without end': ('[' * 100_000, 'not a line of JSON'),
}


@pytest.mark.parametrize('name', BAD_ROWS)
def test_a_bad_row_is_named(tmp_path, name):
    line, message = BAD_ROWS[name]
    path = tmp_path / 'a.jsonl'
    path.write_text(f'{GOOD}\n\n{line}')
    with pytest.raises(ValueError, match=rf'a\.jsonl, row 3: .*{message}'):
        benchmark(str(path))
    if name not in ('answer null', 'answer empty', 'verl with an empty answer', 'a worked solution without a result', 'a proof'):
        with pytest.raises(ValueError, match=rf'a\.jsonl, row 3: .*{message}'):
            training_problems(str(path), limit=1, seed=0)  # also where the limit would not reach it


@pytest.mark.parametrize('name', ['a.parquet', 'a.jsonl'])
def test_training_rows_without_an_answer_are_left_out_and_counted(tmp_path, caplog, name):
    blank = [{'problem': 'p', 'answer': a} for a in ('', None, ' ')]
    path = write(tmp_path / name, [ROWS[0], *blank, ROWS[1]])
    with caplog.at_level(logging.WARNING):
        assert training_problems(path, limit=0, seed=0) == PROBLEMS[:2]
    assert f'3 of 5 rows have no answer and are left out; the first is {path}, row 2' in caplog.text
    with pytest.raises(ValueError, match='none of its 3 rows has an answer'):
        training_problems(write(tmp_path / name, blank), limit=0, seed=0)


def test_text_that_is_not_utf8(tmp_path):
    path = tmp_path / 'a.jsonl'
    path.write_bytes(GOOD.encode() + b'\n{"problem": "caf\xe9", "answer": "5"}\n')
    with pytest.raises(ValueError, match=r'a\.jsonl, row 2: not UTF-8'):
        benchmark(str(path))
    problems = pa.array([b'p'] * 1500 + [b'caf\xe9', b'p']).view(pa.string())  # nothing checks text that is written
    pa.parquet.write_table(pa.table({'problem': problems, 'answer': ['5'] * 1502}), tmp_path / 'a.parquet')
    with pytest.raises(ValueError, match=r'a\.parquet, row 1501: not UTF-8'):
        benchmark(str(tmp_path / 'a.parquet'))


@pytest.mark.parametrize(
    ('rows', 'message'),
    [
        ([{'problem': 'p', 'title': '5'}], r"row 1: column 'answer' is missing; the row has problem, title"),
        ([{'title': 'p', 'answer': '5'}], r"row 1: column 'problem' is missing; the row has title, answer"),
        ([{'problem': 'p', 'answer': '5'}, {'problem': 'p', 'answer': None}], r'row 2: "answer" must be an answer'),
        ([{'problem': 'p', 'answer': float('nan')}], r'row 1: "answer" must be'),
    ],
)
def test_a_bad_parquet_file(tmp_path, rows, message):
    with pytest.raises(ValueError, match=rf'a\.parquet, {message}'):
        benchmark(write(tmp_path / 'a.parquet', rows))


@pytest.mark.parametrize('name', ['a.parquet', 'a.jsonl.gz'])
@pytest.mark.parametrize('damage', ['cut', 'garbage', 'empty'])
def test_a_damaged_file(tmp_path, name, damage):
    path = Path(write(tmp_path / name, ROWS * 100))
    data = path.read_bytes()
    path.write_bytes({'cut': data[: len(data) // 2], 'garbage': b'what is this' * 9, 'empty': b''}[damage])
    with pytest.raises(ValueError, match=rf'{name}: .*(again|no rows)'):
        benchmark(str(path))


def test_a_source_without_rows(tmp_path):
    schema = pa.schema({'problem': pa.string(), 'answer': pa.string()})
    pa.parquet.write_table(schema.empty_table(), tmp_path / 'a.parquet')
    for path in (str(tmp_path / 'a.parquet'), write(tmp_path / 'a.jsonl', []), write(tmp_path / 'a.jsonl.gz', [])):
        with pytest.raises(ValueError, match='no rows'):
            training_problems(path, limit=0, seed=0)


def test_a_source_that_is_not_there_or_of_an_unknown_kind(tmp_path):
    for name in ('a.parquet', 'a.jsonl', 'a.jsonl.gz'):
        for read in (benchmark, lambda p: training_problems(p, limit=0, seed=0)):
            with pytest.raises(FileNotFoundError, match=f'{name}: no such file'):
                read(str(tmp_path / name))
    (tmp_path / 'a.csv').write_text('problem,answer\n')
    (tmp_path / 'folder.jsonl').mkdir()
    for source in (tmp_path / 'a.csv', tmp_path, tmp_path / 'folder.jsonl'):
        with pytest.raises(ValueError, match=r'expected a file ending in \.parquet'):
            training_problems(str(source), limit=0, seed=0)
    with pytest.raises(ValueError, match=r"task\.train is 'generated'; expected a file .* or a hub data set"):
        training_problems('generated', limit=0, seed=0)


# ---- the hub ----------------------------------------------------------------------------------------------------------


def test_a_split_of_the_hub_is_trained_on_and_another_is_a_benchmark(hub_stub):
    train, test = (f'{{"question": "What is {n}?", "answer": "It is <<1+1=2>>2.\\n#### {n}"}}\n'.encode() for n in (7, 8))
    hub_stub.repos['datasets/openai/gsm8k'] = {'main': {'main/train.jsonl': train, 'main/test.jsonl': test}}
    assert training_problems('openai/gsm8k', limit=0, seed=0) == [{'problem': 'What is 7?', 'answers': ['7']}]
    assert benchmark('openai/gsm8k/main:test') == [{'problem': 'What is 8?', 'answers': ['8']}]


def test_one_list_of_json_is_read_as_lines_are(tmp_path, hub_stub):
    data = json.dumps(ROWS, indent=1).encode()
    hub_stub.repos['datasets/agentica-org/DeepScaleR-Preview-Dataset'] = {'main': {'deepscaler.json': data}}
    assert training_problems('agentica-org/DeepScaleR-Preview-Dataset', limit=0, seed=0) == PROBLEMS
    (tmp_path / 'cut.json').write_bytes(data[:-9])
    with pytest.raises(ValueError, match=r'cut\.json: not a JSON list'):
        training_problems(str(tmp_path / 'cut.json'), limit=0, seed=0)


def test_a_hub_that_cannot_be_reached(monkeypatch):
    monkeypatch.delenv('BAPO_DATA', raising=False)
    with pytest.raises(ConnectionError, match=r"task\.train='owner/name' is not a local file, .*HF_HUB_OFFLINE is set"):
        training_problems('owner/name', limit=0, seed=0)
    with pytest.raises(ConnectionError, match=r"'HuggingFaceH4/aime_2024:train'.*BAPO_DATA"):
        benchmark('aime24')
