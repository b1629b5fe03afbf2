"""A user's own questions, from a file. A ground truth is the row: `question`, `answer` and any other columns.

`question` is a text, or a chat of {"role", "content"} messages; the policy reads nothing else. `answer` may
be any JSON value but null; a list holds the accepted answers. Rows of verl, TRL and other public formats get
both columns from their own (shapes.py).

A response is correct if its last line after the thinking is an accepted answer. If the question demands an
answer form (demands.py), the answer in that form counts instead. task.reward can judge in any other way, and
gets the whole row: docs/your_data.md. `with_demands` adds

    prompt_demands          the form that the question demands
    prompt_opens_thinking   true if the prompt opens <think>, so the answer follows </think>
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import logging

from bapo_jax.groups import Verdict
from bapo_jax.tasks import repeats
from bapo_jax.tasks.demands import demanded, stated
from bapo_jax.tasks.jsonl import shown
from bapo_jax.tasks.mathematics.text import after_thinking
from bapo_jax.tasks.rows import FILE_ENDINGS, rows_of
from bapo_jax.tasks.shapes import is_blank, read_row, refuse_choices
from bapo_jax.tasks.turns import chat, refuse_markers

BENCHMARKS: dict[str, str] = {}  # only files
TEMPLATES = {
    'chat': "the question in the tokenizer's chat template, with its default for thinking",
    'no_thinking': 'the same with an empty thinking block, as with enable_thinking=False',
    'text': 'the question as it stands, for a base model',
}
VOTES = True  # equal answers agree, so maj@n is meaningful


def training_problems(source: str, *, limit: int, seed: int) -> list[dict]:
    """Checks all rows of a file and returns the first `limit`, in order; all if it is 0. `seed` is not used.

    Before the limit is applied, rows without an answer and repeats of a question with its answer are left
    out, and warnings count them. Raises ValueError or FileNotFoundError, naming file, row, column and remedy.
    """
    rows = repeats.left_out(_read(source, 'task.train', blank_answers=True), source)
    return rows[:limit] if limit else rows


def benchmark(name: str) -> list[dict]:
    """Returns all rows of a file. Raises as `training_problems` does, and for a row without an answer."""
    return _read(name, 'evaluate.benchmarks')


def _read(name: str, field: str, blank_answers: bool = False) -> list[dict]:
    """Returns a file's rows. With `blank_answers`, drops those without an answer; a warning counts them."""
    path = Path(name)
    if not path.name.endswith(FILE_ENDINGS):
        raise ValueError(
            f'{field} is {name!r}; the task questions only reads files; '
            f'give one ending in {" or ".join(FILE_ENDINGS)}'
        )
    questions, blank = [], []
    for where, row in rows_of(path, '"question" and "answer"'):
        question = _question(row, where, blank_answers)
        if question is None:
            blank.append(where)
        else:
            questions.append(question)
    if blank and not questions:
        raise ValueError(f'{path}: none of its {len(blank)} rows has an answer; fill in the column "answer"')
    if blank:
        rows = len(questions) + len(blank)
        logging.warning(
            '%d of %d rows have no answer and are left out; the first is %s', len(blank), rows, blank[0]
        )
    return questions


def _question(row: dict, where: str, blank_answers: bool) -> dict | None:
    """Returns the row with its question and answer; None if it has no answer and `blank_answers` allows that.

    Raises ValueError, naming column and remedy, if the row cannot be used.
    """
    if 'reward_model' in row or not {'question', 'answer'} <= row.keys():
        chat, answer, _ = read_row(row, where, 'question')
        row = {**row, 'question': chat if len(chat) > 1 else chat[0]['content'], 'answer': answer}
    if blank_answers and is_blank(row['answer']):
        return None
    refuse_choices(row, row['answer'], where)
    try:
        if is_blank(row['answer']):
            raise ValueError(
                f'"answer" must be an answer or a list of accepted answers, got {shown(row["answer"])}'
            )
        check_ground_truth(row)
    except ValueError as error:
        raise ValueError(f'{where}: {error}; correct or drop the row') from None
    for column, value in row.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError):  # images and times in parquet files
            raise ValueError(
                f'{where}: column {column!r} has a value that JSON cannot hold, {shown(value)}; '
                'drop or convert it'
            ) from None
    return row


def prompt_text(ground_truth: dict, template: str, tokenizer: Any) -> str:
    """Returns the question as the policy reads it.

    Raises ValueError if the template does not fit the tokenizer or the question.
    """
    question = ground_truth['question']
    if template == 'text':
        if not isinstance(question, str):
            raise ValueError(
                f"task.template is 'text', but a question is a chat, {shown(question)}; choose 'chat'"
            )
        refuse_markers(tokenizer, question)
        return question
    chat_template = getattr(tokenizer, 'chat_template', None)
    if not chat_template:
        raise ValueError(
            f'task.template is {template!r}, but the tokenizer has no chat template; '
            "choose 'text', or set model.path to a chat model"
        )
    if template == 'no_thinking' and 'enable_thinking' not in str(chat_template):
        raise ValueError(
            f"task.template is {template!r}, but the tokenizer's chat template has no enable_thinking; "
            "choose 'chat'"
        )
    messages = [{'role': 'user', 'content': question}] if isinstance(question, str) else question
    switch = {'enable_thinking': False} if template == 'no_thinking' else {}
    return chat(tokenizer, messages, **switch)


def with_demands(ground_truth: dict, text: str) -> dict:
    """Returns the ground truth with the form that the prompt `text` demands, unless it is the last line."""
    form, opened = demanded(text), text.rstrip().endswith('<think>')
    return (
        ground_truth
        | ({'prompt_demands': form} if form else {})
        | ({'prompt_opens_thinking': True} if opened else {})
    )


def check_ground_truth(ground_truth: object) -> None:
    """Raises ValueError, naming the column, unless there is a question and an answer."""
    row = ground_truth if isinstance(ground_truth, dict) else {}
    question, answer = row.get('question'), row.get('answer')
    if not (isinstance(question, str) and question.strip() or _is_chat(question)):
        raise ValueError(
            f'"question" must be a string or a list of {{"role", "content"}} messages, got {shown(question)}'
        )
    if answer is None or answer == []:
        raise ValueError(f'"answer" must be an answer or a list of accepted answers, got {shown(answer)}')


def _is_chat(question: object) -> bool:
    return bool(question) and isinstance(question, list) and all(
        isinstance(message, dict)
        and isinstance(message.get('role'), str)
        and isinstance(message.get('content'), str)
        for message in question
    )  # fmt: skip


def verify(response: str, ground_truth: dict) -> tuple[Verdict, str | None]:
    """Returns CORRECT if the answer is accepted, UNPARSEABLE if there is none, else WRONG; and the answer.

    The answer is the last line that is not blank, or the text in the form that the prompt demands. Text
    within <think>, closed or not, does not count.

    Texts are compared without surrounding blanks, other answers as JSON: 4 is not 4.0. Raises ValueError if
    the ground truth is malformed.
    """
    check_ground_truth(ground_truth)
    text = after_thinking(response, opened=ground_truth.get('prompt_opens_thinking') is True)
    form = ground_truth.get('prompt_demands')
    if text is None:
        line = None
    else:
        line = stated(text, form) if form else text.strip().rpartition('\n')[2].strip()
    if not line:
        return Verdict.UNPARSEABLE, None
    answer = ground_truth['answer']
    right = any(_is_said(line, accepted) for accepted in (answer if isinstance(answer, list) else [answer]))
    return (Verdict.CORRECT if right else Verdict.WRONG), line


def _is_said(line: str, accepted: Any) -> bool:
    if isinstance(accepted, str):
        return line == accepted.strip()
    try:
        said = json.dumps(json.loads(line), sort_keys=True)
    except (ValueError, RecursionError):  # a response may be anything
        return False
    return said == json.dumps(accepted, sort_keys=True)


def verify_all(
    responses: Sequence[str], ground_truths: Sequence[dict], budget_s: float = math.inf
) -> list[tuple[Verdict, str | None]]:
    """Returns `verify` of each response: hundreds of thousands per second, so `budget_s` is ignored."""
    return [
        verify(response, ground_truth)
        for response, ground_truth in zip(responses, ground_truths, strict=True)
    ]
