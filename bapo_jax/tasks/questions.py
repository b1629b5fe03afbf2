"""Questions of one's own, from a file. A ground truth is the row: `question`, `answer`, and whatever other columns it has.

`question` is a text, or a chat of {"role", "content"} messages. The policy reads it and nothing besides. `answer` may be any JSON
value but null; a list holds accepted answers. Rows of verl, TRL and other public shapes get both columns from theirs (shapes.py).

A response is right where its last line after the thinking is such an answer; or, where the question demands a form of answer
(demands.py), what stands in that form. task.reward judges in any other way, and gets the whole row: docs/own_data.md.
`with_demands` adds

    prompt_demands          the form that the question demands
    prompt_opens_thinking   true where the prompt has opened <think>, so the answer follows </think>
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
from bapo_jax.tasks.math_text import after_thinking
from bapo_jax.tasks.rows import FILE_ENDINGS, rows_of
from bapo_jax.tasks.shapes import is_blank, read_row, refuse_choices
from bapo_jax.tasks.turns import chat, refuse_markers

BENCHMARKS: dict[str, str] = {}  # there are files alone
TEMPLATES = {
    'chat': "the question in the tokenizer's chat template; a model that can think does as the template has it by default",
    'no_thinking': 'the same with an empty thinking block, as enable_thinking=False gives it',
    'text': 'the question as it stands, for a base model',
}
VOTES = True  # equal answers agree, so maj@n is meaningful


def training_problems(source: str, *, limit: int, seed: int) -> list[dict]:
    """The first `limit` rows of a file in its order, all where `limit` is 0; `seed` is not used. All rows are checked.

    Rows without an answer, and rows that repeat a question and its answer, are left out before the limit, and warnings count
    them. Raises ValueError or FileNotFoundError, which name file, row, column and the remedy.
    """
    rows = repeats.left_out(_read(source, 'task.train', blank_answers=True), source)
    return rows[:limit] if limit else rows


def benchmark(name: str) -> list[dict]:
    """All rows of a file. Raises as `training_problems` does, and for a row without an answer."""
    return _read(name, 'evaluate.benchmarks')


def _read(name: str, field: str, blank_answers: bool = False) -> list[dict]:
    """The rows of a file; with `blank_answers` those without an answer are left out, and a warning counts them."""
    path = Path(name)
    if not path.name.endswith(FILE_ENDINGS):
        raise ValueError(f'{field} is {name!r}; the task questions reads files alone: give one ending in {" or ".join(FILE_ENDINGS)}')
    questions, blank = [], []
    for where, row in rows_of(path, '"question" and "answer"'):
        question = _question(row, where, blank_answers)
        if question is None:
            blank.append(where)
        else:
            questions.append(question)
    if blank and not questions:
        raise ValueError(f'{path}: none of its {len(blank)} rows has an answer; give a file whose "answer" is filled in')
    if blank:
        rows = len(questions) + len(blank)
        logging.warning('%d of %d rows have no answer and are left out, the first of them %s', len(blank), rows, blank[0])
    return questions


def _question(row: dict, where: str, blank_answers: bool) -> dict | None:
    """The row with its question and answer; None where it has no answer and `blank_answers` allows that.

    Raises ValueError, naming column and remedy.
    """
    if 'reward_model' in row or not {'question', 'answer'} <= row.keys():
        chat, answer, _ = read_row(row, where, 'question')
        row = {**row, 'question': chat if len(chat) > 1 else chat[0]['content'], 'answer': answer}
    if blank_answers and is_blank(row['answer']):
        return None
    refuse_choices(row, row['answer'], where)
    try:
        if is_blank(row['answer']):
            raise ValueError(f'"answer" must be an answer or a list of accepted ones, got {shown(row["answer"])}')
        check_ground_truth(row)
    except ValueError as error:
        raise ValueError(f'{where}: {error}; mend or drop the row') from None
    for column, value in row.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError):  # pictures and times in parquet files
            raise ValueError(f'{where}: column {column!r} holds what is no JSON, {shown(value)}; drop or convert it') from None
    return row


def prompt_text(ground_truth: dict, template: str, tokenizer: Any) -> str:
    """The question as the policy reads it. Raises ValueError where template and tokenizer, or template and question, do not fit."""
    question = ground_truth['question']
    if template == 'text':
        if not isinstance(question, str):
            raise ValueError(f"task.template is 'text', and a question is a chat, {shown(question)}; choose 'chat'")
        refuse_markers(tokenizer, question)
        return question
    chat_template = getattr(tokenizer, 'chat_template', None)
    if not chat_template:
        raise ValueError(f"task.template is {template!r}, but the tokenizer has no chat template; choose 'text', or a chat model")
    if template == 'no_thinking' and 'enable_thinking' not in str(chat_template):
        raise ValueError(f"task.template is {template!r}, but the tokenizer's chat template has no enable_thinking; choose 'chat'")
    messages = [{'role': 'user', 'content': question}] if isinstance(question, str) else question
    switch = {'enable_thinking': False} if template == 'no_thinking' else {}
    return chat(tokenizer, messages, **switch)


def with_demands(ground_truth: dict, text: str) -> dict:
    """The ground truth, and what the prompt `text` demands of a response's form where that is not the last line."""
    form, opened = demanded(text), text.rstrip().endswith('<think>')
    return ground_truth | ({'prompt_demands': form} if form else {}) | ({'prompt_opens_thinking': True} if opened else {})


def check_ground_truth(ground_truth: object) -> None:
    """Raises ValueError, naming the column, unless there are a question and an answer."""
    row = ground_truth if isinstance(ground_truth, dict) else {}
    question, answer = row.get('question'), row.get('answer')
    if not (isinstance(question, str) and question.strip() or _is_chat(question)):
        raise ValueError(f'"question" must be a text or a list of {{"role", "content"}} texts, got {shown(question)}')
    if answer is None or answer == []:
        raise ValueError(f'"answer" must be an answer or a list of accepted ones, got {shown(answer)}')


def _is_chat(question: object) -> bool:
    return bool(question) and isinstance(question, list) and all(
        isinstance(message, dict) and isinstance(message.get('role'), str) and isinstance(message.get('content'), str)
        for message in question
    )  # fmt: skip


def verify(response: str, ground_truth: dict) -> tuple[Verdict, str | None]:
    """CORRECT where the answer is an accepted one, UNPARSEABLE where there is none, WRONG otherwise.

    The answer is the last line that is not blank, or what stands in the form that the prompt demands. Within a <think>, also
    one that is never closed, none counts.

    Texts are compared without the blanks around them, other answers as JSON: 4 is not 4.0. A malformed ground truth raises
    ValueError.
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
    """`verify` of each response; hundreds of thousands a second, so `budget_s` is not looked at."""
    return [verify(response, ground_truth) for response, ground_truth in zip(responses, ground_truths, strict=True)]
