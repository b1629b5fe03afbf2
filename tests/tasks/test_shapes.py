"""The shapes of public data sets: each is read, asked as its authors ask, and judged right and wrong; docs/reference/tasks.md lists them."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
from public_rows import BOXED, GEO, REFUSED, SHAPES, table

from bapo_jax.groups import Verdict
from bapo_jax.tasks import demands, get_task, shapes
from bapo_jax.tasks.mathematics import task as math_task

DOCS = Path(__file__).resolve().parents[2] / 'docs' / 'reference' / 'tasks.md'


class Tokenizer:
    chat_template = 'messages'

    def apply_chat_template(self, messages, add_generation_prompt, tokenize):
        assert add_generation_prompt is True and tokenize is False
        return rendered([(message['role'], message['content']) for message in messages])


def rendered(chat):
    return ''.join(f'<|{role}|>{content}' for role, content in chat) + '<|assistant|>'


def written(folder, row, ending):
    path = folder / f'rows{ending}'
    if ending == '.parquet':
        pa.parquet.write_table(pa.Table.from_pylist([row]), path)
    else:  # with the mark that Windows writes first
        path.write_bytes(b'\xef\xbb\xbf' + (json.dumps([row]) if ending == '.json' else json.dumps(row) + '\n').encode())
    return str(path)


@pytest.mark.parametrize('shape', SHAPES, ids=lambda shape: shape.name)
def test_a_public_row_is_read_asked_and_judged_as_its_authors_do(tmp_path, shape):
    task = get_task(shape.task)
    endings = ['.json'] if isinstance(shape.row, list) else ['.parquet'] if 'images' in shape.row else ['.parquet', '.jsonl']
    for ending in endings:
        path = written(tmp_path, shape.row, ending)
        for [truth] in (task.training_problems(path, limit=0, seed=0), task.benchmark(path)):
            text = task.prompt_text(truth, shape.template, Tokenizer())
            if shape.chat:
                assert text == rendered(shape.chat)
            truth = json.loads(json.dumps(task.with_demands(truth, text)))  # as a checkpoint keeps it
            task.check_ground_truth(truth)
            assert task.verify(shape.right, truth)[0] is Verdict.CORRECT
            assert task.verify(shape.wrong, truth)[0] is Verdict.WRONG
            assert task.verify(f'<think>So.</think> {shape.right}', truth)[0] is Verdict.CORRECT
            assert task.verify(f'<think>{shape.right}', truth) == (Verdict.UNPARSEABLE, None)  # cut while it thinks
            truth = task.with_demands(truth, text + '<think>\n')
            assert task.verify(shape.right, truth) == (Verdict.UNPARSEABLE, None)
            assert task.verify(f'So.\n</think> {shape.right}', truth)[0] is Verdict.CORRECT


@pytest.mark.parametrize('refused', REFUSED, ids=lambda refused: refused.name)
def test_a_shape_that_no_task_reads_is_refused_with_what_to_do(tmp_path, refused):
    for ending in ('.parquet', '.jsonl'):
        with pytest.raises(ValueError, match=refused.message):
            get_task('math').training_problems(written(tmp_path, refused.row, ending), limit=0, seed=0)


def test_the_page_lists_these_shapes():
    assert table() in DOCS.read_text('utf-8')
    assert len(SHAPES) >= 20


@pytest.mark.parametrize('template', ['chat', 'r1', 'qwen2.5_math'])
def test_no_second_demand_is_put_to_a_question_that_has_one(template):
    demanding = (('The answer after "####".', '"####"'), ('End with "Answer:"', '"Answer:"'), ('In <answer> tags.', '<answer>'))
    for question, form in demanding:
        with pytest.raises(ValueError, match=rf"asks for .*boxed.*, but a question itself asks for {form}.*task.template='as_is'"):
            math_task.prompt_text({'problem': question, 'answers': ['5']}, template, Tokenizer())


@pytest.mark.parametrize('task, template, request_', [('math', 'chat', BOXED), ('geometry', 'paper', GEO)])
def test_the_request_of_a_template_does_not_come_twice(task, template, request_):
    """verl's files have it already."""
    truths = [{'problem': 'p' + more, 'answers': ['5']} for more in ('', request_, request_ + '\n')]
    assert {get_task(task).prompt_text(truth, template, Tokenizer()) for truth in truths} == {rendered([('user', 'p' + request_)])}


def test_a_system_message_is_kept_and_never_a_second_one():
    truth = {'problem': 'p', 'answers': ['5'], 'before': [{'role': 'system', 'content': 'Be brief.'}]}
    assert math_task.prompt_text(truth, 'chat', Tokenizer()).startswith('<|system|>Be brief.<|user|>p Let')
    with pytest.raises(ValueError, match="'qwen2.5_math' adds a system message, but a row already has one; choose 'as_is'"):
        math_task.prompt_text(truth, 'qwen2.5_math', Tokenizer())


def test_without_a_chat_template_a_question_is_asked_as_it_stands():
    class Base:
        chat_template = None

    assert math_task.prompt_text({'problem': ' p\n', 'answers': ['5']}, 'as_is', Base()) == ' p\n'
    with pytest.raises(ValueError, match='no chat template'):
        math_task.prompt_text({'problem': 'p', 'answers': ['5'], 'before': [{'role': 'system', 'content': 's'}]}, 'as_is', Base())


@pytest.mark.parametrize('prompt, form', [
    ('What is 1+1?', ''), ('#### Problem 3\nWhat is 1+1?', ''), ('Tom: the answer: 5. Why?', ''),
    ('See \\boxed{} and <answer>.', 'block'),
    ('Remember to put your answer on its own line after "Answer:", and you do not need to use a \\boxed command.', 'line'),
    ('Use the format:\nAnswer: your answer', 'line'), ('End with “Answer:” and the number', 'line'), ('after `####`', 'hashes'),
    ('Prove it with Answer: 5', ''), ('**Answer:** 5, or 6?', ''),  # of problems that were copied with what stood beside them
    ('within \\boxed{}', 'box'),
])  # fmt: skip
def test_what_a_prompt_demands(prompt, form):
    assert demands.demanded(prompt) == form


@pytest.mark.parametrize('form, text, answer', [
    ('line', 'Answer: 5\nAnswer: 6', '6'), ('line', '**Answer**: 5 km', '5 km'), ('line', 'The answer: \\boxed{5} m', '5'),
    ('line', 'Answer:\n\n$5$', '$5$'), ('line', '5', None), ('line', 'Answer:', None),
    ('hashes', '#### 4\n#### 5\nDone.', '5'), ('hashes', '####5', '5'), ('hashes', '### 5', None), ('hashes', 'so ####', None),
    ('block', '<answer>4</answer> <answer>\n 5\n</answer>', '5'), ('block', '<answer> \\boxed{5} </answer>', '5'),
    ('block', '<answer>5', None), ('block', '<answer> </answer>', None), ('box', '\\boxed{5}', '5'), ('box', '#### 5', None),
])  # fmt: skip
def test_the_answer_of_a_form(form, text, answer):
    assert demands.stated(text, form) == answer


@pytest.mark.parametrize('form', demands.FORMS)
def test_answers_are_found_in_linear_time(form):
    """None of these ends within a test's patience where the time is quadratic."""
    n = 3 * 10**4
    for text in ('answer' + ' ' * n, '<answer>' * n, 'answer:' + '\n' * n, '\\boxed{' * n, 'form ' * n):
        assert demands.stated(text, form) is None and demands.demanded('so ' + text.lower()) in ('', 'block', 'box')


@pytest.mark.parametrize('answer, held', [
    ('"42"', '42'), ('["42", "6*7"]', ['42', '6*7']), ('[1, 2]', '[1, 2]'), ('[1,2)', '[1,2)'), ('"', '"'), ('[]', '[]'), (5, 5),
    ('{"a": 1}', '{"a": 1}'), ('["a", 1]', '["a", 1]'),
])  # fmt: skip
def test_a_text_of_json_is_the_texts_that_it_holds(answer, held):
    assert shapes.opened(answer) == held


@pytest.mark.parametrize('text, result', [
    ('so \\boxed{41}, no, \\boxed{42}.', '42'), ('so\n#### 1,042\nThe answer is: 5', '1,042'), ('The answer is: 42.', '42'),
    ('x. #### 42', '42'), ('It is trivial.', None), ('', None),
])  # fmt: skip
def test_what_a_worked_solution_arrives_at(text, result):
    assert shapes.result(text) == result


@pytest.mark.parametrize('answer, none', [
    ('QED', True), ('q.e.d.', True), ('∎', True), ('{"inputs": ["1"], "outputs": ["2"]}', True), ('{}', False), ('{1, 2}', False),
    ('{"', False), ('5', False),
])  # fmt: skip
def test_what_is_no_mathematics_is_no_answer(answer, none):
    assert shapes.is_none(answer) is none
    assert (shapes.answer_text(shapes.read_row({'prompt': 'p', 'solution': answer}, 'row 1').answer) is None) is none


def test_a_chat_without_a_result_is_named_by_its_own_column():
    chat = [{'from': 'human', 'value': 'p'}, {'from': 'gpt', 'value': 'So it is.'}]
    assert shapes.read_row({'conversations': chat}, 'row 1')[1:] == (None, 'conversations')
