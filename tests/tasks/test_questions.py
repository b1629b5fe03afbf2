"""Questions of a user's own: every row is checked, the policy reads them as they are, and the last line is the answer."""

import json
import signal

import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bapo_jax import tasks
from bapo_jax.groups import Verdict
from bapo_jax.models.tokenizer import character_tokenizer
from bapo_jax.tasks import questions

CHAT = [{'role': 'system', 'content': 'Be brief.'}, {'role': 'user', 'content': 'Why?'}]


def verdict(response, answer):
    return questions.verify(response, {'question': 'Why?', 'answer': answer})


def written(path, *rows):
    path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
    return str(path)


@pytest.mark.parametrize('response, answer', [
    ('So.', 'So.'), ('I think\n so \n\n', ' so'), ('4', 4), ('b', ['a', 'b']), ('{"n": [1, 2], "a": null}', {'a': None, 'n': [1, 2]}),
    ('[1, 2]', [[1, 2]]), ('true', True), ('4', ['4']),
])  # fmt: skip
def test_right_answers(response, answer):
    assert verdict(response, answer) == (Verdict.CORRECT, response.strip().split('\n')[-1].strip())


@pytest.mark.parametrize('response, answer', [
    ('so\nbut no', 'so'), ('So', 'so'), ('so so', 'so'), ('4.0', 4), ('true', 1), ('1', [[1]]), ('[' * 100_000, 4), ('9' * 10_000, 4),
    ('{"a": 1', {'a': 1}),
])  # fmt: skip
def test_wrong_answers(response, answer):
    assert verdict(response, answer)[0] is Verdict.WRONG


@pytest.mark.parametrize('response', ['', ' \n\t\n'])
def test_no_answer(response):
    assert verdict(response, 'so') == (Verdict.UNPARSEABLE, None)


@pytest.mark.parametrize('response, opened, expected', [
    ('<think>\nIt may be\nso', False, Verdict.UNPARSEABLE),  # cut while it thinks
    ('It may be\nso', True, Verdict.UNPARSEABLE),
    ('no\n</think>\nso', True, Verdict.CORRECT),
    ('<think>no</think>\nso', False, Verdict.CORRECT),
    ('<think>so\n</think>', False, Verdict.UNPARSEABLE),
    ('so\n<think>so', False, Verdict.UNPARSEABLE),
])  # fmt: skip
def test_what_is_thought_is_no_answer(response, opened, expected):
    truth = questions.with_demands({'question': 'Why?', 'answer': 'so'}, 'Why?<assistant>' + '<think>\n' * opened)
    assert questions.verify(response, truth)[0] is expected


@pytest.mark.parametrize('demand, response', [
    ('Put it in <answer> </answer> tags.', '<answer> so </answer>\nThat is all.'),
    ('The answer comes after "####".', 'Well, #### so\nDone.'),
    ('End with "Answer:" and it.', '**Answer:** so\nDone.'),
    (r'Put it in \boxed{}.', r'It is \boxed{so}, I think.'),
])  # fmt: skip
def test_what_the_question_demands_is_judged(demand, response):
    truth = {'question': f'Why? {demand}', 'answer': 'so'}
    asked = questions.with_demands(truth, questions.prompt_text(truth, 'text', None))
    assert questions.verify(response, asked) == (Verdict.CORRECT, 'so')
    assert questions.verify('so', asked) == (Verdict.UNPARSEABLE, None)
    assert questions.verify(response, truth)[0] is Verdict.WRONG  # where nothing is demanded, the last line is


@given(st.text(), st.recursive(st.booleans() | st.integers() | st.text(), st.lists))
def test_no_response_makes_it_raise(response, answer):
    assert verdict(response, answer or 0)[0] in Verdict


def test_a_row_is_the_ground_truth_and_the_limit_takes_the_first(tmp_path):
    rows = [{'question': f'{i}?', 'answer': i, 'hint': [i]} for i in range(3)]
    path = written(tmp_path / 'q.jsonl', *rows)
    assert questions.training_problems(path, limit=0, seed=1) == questions.benchmark(path) == rows
    assert questions.training_problems(path, limit=2, seed=1) == rows[:2]


@pytest.mark.parametrize('row, message', [
    ({'answer': 1}, r"row 2: column 'question' is missing; the row has answer; rename or add it"),
    ({'question': 'Why?', 'reply': 1}, r"row 2: column 'answer' is missing; the row has question, reply; rename or add it"),
    ({'question': ' ', 'answer': 1}, r'row 2: "question" must be a string or a list .* got . .; correct or drop the row'),
    ({'question': [{'role': 'user'}], 'answer': 1}, r'row 2: "question" must be a string or a list of {"role", "content"} messages, got'),
    ({'question': 'Why?', 'answer': 1, 'choices': ['a', 'b']}, "row 2: multiple-choice questions with a column 'choices' are not supported"),
    ({'question': 'Why?', 'answer': []}, r'row 2: "answer" must be an answer'),
])  # fmt: skip
def test_a_bad_row_is_named(tmp_path, row, message):
    path = written(tmp_path / 'q.jsonl', {'question': 'Why?', 'answer': 1}, row)
    with pytest.raises(ValueError, match=message):
        questions.training_problems(path, limit=1, seed=1)


@pytest.mark.parametrize('answer', [None, '', ' \n', 'proof', 'NotFound'])
def test_a_row_without_an_answer_is_left_out_of_training_and_refused_in_a_benchmark(tmp_path, answer, caplog):
    for row in ({'question': 'Why?', 'answer': answer}, {'prompt': 'Why?', 'reward_model': {'ground_truth': answer}}):
        path = written(tmp_path / 'q.jsonl', row, {'question': 'Who?', 'answer': 1})
        assert questions.training_problems(path, limit=0, seed=1) == [{'question': 'Who?', 'answer': 1}]
        assert '1 of 2 rows have no answer and are left out' in caplog.text
        with pytest.raises(ValueError, match='row 1: "answer" must be an answer or a list of accepted answers, got .*; correct or drop'):
            questions.benchmark(path)
        with pytest.raises(ValueError, match='q.jsonl: none of its 1 rows has an answer; fill in the column'):
            questions.training_problems(written(tmp_path / 'q.jsonl', row), limit=0, seed=1)


def test_a_column_of_a_parquet_file_that_no_checkpoint_could_keep_is_named(tmp_path):
    pa.parquet.write_table(pa.table({'question': ['Why?'], 'answer': ['so'], 'picture': [b'PNG']}), tmp_path / 'q.parquet')
    with pytest.raises(ValueError, match=r"q\.parquet, row 1: column 'picture' has a value that JSON cannot hold, b'PNG'; drop or convert it"):
        questions.benchmark(str(tmp_path / 'q.parquet'))


def test_what_is_no_file_of_questions_is_named(tmp_path):
    with pytest.raises(ValueError, match="task.train is 'generated'; the task questions only reads files; give one ending in .parquet or .jsonl"):
        questions.training_problems('generated', limit=0, seed=1)
    with pytest.raises(ValueError, match="evaluate.benchmarks is 'cd34'"):
        questions.benchmark('cd34')
    with pytest.raises(FileNotFoundError, match='none.jsonl: no such file; check the path'):
        questions.benchmark(str(tmp_path / 'none.jsonl'))
    with pytest.raises(ValueError, match='q.jsonl: no rows; expected columns "question" and "answer"'):
        questions.benchmark(written(tmp_path / 'q.jsonl'))


def tokenizer(template):
    def apply(messages, *, add_generation_prompt, tokenize, **switch):
        assert add_generation_prompt and not tokenize
        return json.dumps([messages, switch])

    fake = type('Tokenizer', (), {'chat_template': template})()
    fake.apply_chat_template = apply
    return fake


def test_the_policy_reads_the_question_and_nothing_besides():
    text, chat, thinks = {'question': 'Why?'}, {'question': CHAT}, tokenizer('{% if enable_thinking %}')
    assert questions.prompt_text(text, 'text', tokenizer(None)) == 'Why?'
    assert json.loads(questions.prompt_text(text, 'chat', thinks)) == [CHAT[1:], {}]
    assert json.loads(questions.prompt_text(chat, 'chat', tokenizer('x'))) == [CHAT, {}]
    assert json.loads(questions.prompt_text(chat, 'no_thinking', thinks)) == [CHAT, {'enable_thinking': False}]


@pytest.mark.parametrize('question, template, chat_template, message', [
    (CHAT, 'text', 'x', "a question is a chat, .*; choose 'chat'"),
    ('Why?', 'chat', None, "the tokenizer has no chat template; choose 'text', or set model.path to a chat model"),
    ('Why?', 'no_thinking', 'x', "chat template has no enable_thinking; choose 'chat'"),
])  # fmt: skip
def test_a_template_that_does_not_fit_is_refused(question, template, chat_template, message):
    with pytest.raises(ValueError, match=message):
        questions.prompt_text({'question': question}, template, tokenizer(chat_template))


@pytest.mark.parametrize(
    ('template', 'message'),
    [
        ('{{ raise_exception("roles must alternate") }}', 'TemplateError: roles must alternate'),
        ('{{ messages[3].content.x.y }}', 'UndefinedError'),
        ('{{ 1 / 0 }}', 'ZeroDivisionError'),
        ('{% for %}', 'TemplateSyntaxError'),
        ('{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}', r'TimeoutError: it did not finish within 0\.2 s'),
    ],
)
def test_a_chat_template_that_fails_or_never_ends_is_refused_with_its_words(template, message, monkeypatch):
    monkeypatch.setattr(tasks, '_RENDER_S', 0.2)
    with pytest.raises(ValueError, match=f"task.template='chat': the chat template of model.path fails on a question .*{message}.*; fix "):
        tasks.encode_prompts('questions', [{'question': 'q', 'answer': 1}], character_tokenizer(template), template='chat')
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0) and signal.getsignal(signal.SIGALRM) == signal.SIG_DFL
