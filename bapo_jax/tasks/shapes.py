r"""Reads the question and accepted answer from a row of a public data set, in the formats that trainers use.

    the question    `problem`, `question` or `query`, a text; `prompt`, a text or a chat (verl, TRL, slime);
                    `messages` (OpenAI) or `conversations` (ShareGPT) before the last answer, after `system`;
                    `0` (Open-Reasoner-Zero)
    the answer      `reward_model.ground_truth` (verl); or the first of `answer`, `final_answer`,
                    `expected_answer`, `gt_answer`, `ground_truth`, `label`; or the result of `solution`,
                    `response` or the chat's last answer

Column names are case-insensitive. The result of a worked solution is its last \boxed{}, or the text after its
last #### or after 'the answer is'; a `solution` of a few characters is the answer itself. A text that is
JSON, such as '"5"' or '["5", "five"]', is decoded.

docs/reference/tasks.md has a table of data sets; tests/tasks/test_shapes.py reads one of each.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from bapo_jax.tasks.jsonl import short, shown
from bapo_jax.tasks.mathematics.text import last_box

_QUESTION = ('problem', 'question', 'query')
_ANSWER = ('answer', 'final_answer', 'expected_answer', 'gt_answer', 'ground_truth', 'label')
_WORKED = ('solution', 'response', 'generated_solution')
_CHAT = ('messages', 'conversations')
_CHOICES = ('choices', 'options')
_BESIDE = ('data_source', 'extra_info')  # what verl passes to a reward function
COLUMNS = frozenset(
    (
        *_QUESTION,
        *_ANSWER,
        *_WORKED,
        *_CHAT,
        *_CHOICES,
        *_BESIDE,
        'system',
        'prompt',
        'reward_model',
        '0',
        '1',
    )
)

_ROLES = {'human': 'user', 'gpt': 'assistant', 'model': 'assistant', 'bot': 'assistant'}  # ShareGPT's names
_NO_ANSWER = ('', 'proof', 'notfound')  # in NuminaMath-1.5 and OpenR1-Math, for problems without an answer
_PROVED = ('qed', 'q.e.d', '∎', '□', '■')  # the end of a proof, not a result
_PROSE_WORDS = 25  # an answer with at least this many words is a worked solution
_SHORT = 60  # most characters of a `solution` that is the answer itself
_SAID = re.compile(r'[Tt]he (?:final )?answer is:?\s*([^\n]+)')
_WORD = re.compile(r'(?<![\\A-Za-z])[A-Za-z]{2,}')


class QuestionRow(NamedTuple):
    """A question and its accepted answer."""

    chat: list[dict[str, str]]  # {'role', 'content'} messages, the last one the user's
    answer: Any  # as in the row, or the result of a worked solution; None if there is none
    column: str  # the column of the answer


def reads(column: str) -> bool:
    """Whether `read_row` uses a column of this name."""
    return column.casefold() in COLUMNS


def read_row(row: Mapping[str, Any], where: str, missing: str = 'problem') -> QuestionRow:
    """Returns the question and answer of a row.

    Raises ValueError, naming column and remedy, if the row has another shape. `missing` is the column to name
    if there is no question.
    """
    names = {name.casefold(): name for name in reversed(row)}
    column = _question_column(names)
    if column is None:
        raise ValueError(
            f'{where}: column {missing!r} is missing; the row has {short(", ".join(row))}; rename or add it'
        )
    value, worked = row[column], None
    if column == '0':
        chat = _chat([value], where, column)
    elif column.casefold() in _QUESTION:
        if not isinstance(value, str) or not value.strip():
            raise ValueError(
                f'{where}: the problem must be a string, got {shown(value)}; correct or drop the row'
            )
        chat = [{'role': 'user', 'content': value.strip()}]
    else:
        chat = _chat(value, where, column)
        if column.casefold() in _CHAT and chat and chat[-1]['role'] == 'assistant':
            worked = column, chat.pop()['content']
        if (
            isinstance(system := row.get('system'), str)
            and system.strip()
            and chat[:1]
            and chat[0]['role'] != 'system'
        ):
            chat.insert(0, {'role': 'system', 'content': system})
    if not chat or chat[-1]['role'] != 'user' or not chat[-1]['content'].strip():
        raise ValueError(
            f'{where}: the last message of {column!r} must be the problem, from the user, got '
            f'{shown(value)}; correct or drop the row'
        )
    answer, column = _answer(row, names, worked, where)
    refuse_choices(row, answer, where)
    return QuestionRow(chat, answer, column)


def refuse_choices(row: Mapping[str, Any], answer: Any, where: str) -> None:
    """Raises ValueError, with the remedy, if an answer only says which of a row's choices is correct."""
    choices = next(
        (name for name in row if name.casefold() in _CHOICES and _is_place(answer, row[name])), None
    )
    if choices is not None:
        raise ValueError(
            f'{where}: multiple-choice questions with a column {choices!r} are not supported; write the '
            'choices into the question, '
            'give the letter or text of the right one as the answer, and remove the column'
        )


def _is_place(answer: Any, choices: Any) -> bool:
    """Whether an answer is the index or letter of a choice (MMLU) and not the choice's text (Geometry3K)."""
    texts = choices.get('text') if isinstance(choices, dict) else choices
    if not isinstance(texts, list) or answer in texts:
        return False
    return (
        isinstance(answer, int)
        or isinstance(answer, str)
        and len(answer.strip()) == 1
        and answer.strip().isalpha()
    )


def _question_column(names: Mapping[str, str]) -> str | None:
    if '0' in names and '1' in names:
        return '0'
    order = ('prompt', *_QUESTION, *_CHAT) if 'reward_model' in names else (*_QUESTION, 'prompt', *_CHAT)
    return next((names[name] for name in order if name in names), None)


def _chat(value: Any, where: str, column: str) -> list[dict[str, str]]:
    """Returns OpenAI or ShareGPT messages as role and content; text is the user's. Images become <image>."""
    chat = []
    for message in (
        [{'role': 'user', 'content': value}]
        if isinstance(value, str)
        else value
        if isinstance(value, list)
        else [None]
    ):
        message = message if isinstance(message, dict) else {}
        role, content = (
            message.get('role') or message.get('from'),
            message.get('content', message.get('value')),
        )
        if isinstance(content, list):  # parts, as in OpenAI's and TRL's messages with images
            parts = [part if isinstance(part, dict) else {} for part in content]
            content = ''.join(
                '<image>' if part.get('type') == 'image' else str(part.get('text')) for part in parts
            )
        if not isinstance(role, str) or not isinstance(content, str):
            raise ValueError(
                f'{where}: the problem must be a string, or {column!r} a list of {{"role", "content"}} '
                f'messages, got {shown(value)}; correct or drop the row'
            )
        chat.append({'role': _ROLES.get(role, role), 'content': content})
    return chat


def _answer(
    row: Mapping[str, Any], names: Mapping[str, str], worked: tuple[str, str] | None, where: str
) -> tuple[Any, str]:
    if '0' in names and '1' in names:
        truth = row['1'].get('ground_truth') if isinstance(row['1'], dict) else None
        return (truth.get('value') if isinstance(truth, dict) else None), '1.ground_truth.value'
    if 'reward_model' in names:
        model = row[names['reward_model']]
        if not isinstance(model, dict) or 'ground_truth' not in model:
            raise ValueError(
                f'{where}: "reward_model" must be an object with "ground_truth", got {shown(model)}; correct '
                'or drop the row'
            )
        return opened(model['ground_truth']), 'reward_model.ground_truth'
    for name in _ANSWER:
        if name in names:
            return opened(row[names[name]]), names[name]
    for name in _WORKED:
        if name in names:
            text = row[names[name]]
            return (result(text, itself=name == 'solution') if isinstance(text, str) else text), names[name]
    if worked is not None:
        column, text = worked
        return result(text), column
    raise ValueError(
        f"{where}: column 'answer' is missing; the row has {short(', '.join(row))}; rename or add it"
    )


def opened(answer: Any) -> Any:
    """Decodes a JSON text that holds a text or a list of texts; returns anything else unchanged."""
    if isinstance(answer, str) and answer.strip()[:1] in ('"', '['):
        try:
            held = json.loads(answer)
        except (ValueError, RecursionError):
            return answer
        if isinstance(held, str) or (
            isinstance(held, list) and held and all(isinstance(a, str) for a in held)
        ):
            return held
    return answer


def result(text: str, *, itself: bool = False) -> str | None:
    """Returns a worked solution's result, None if it has none. With `itself`, a short text is the result."""
    if box := last_box(text):
        return box
    if '####' in text:
        return text.rpartition('####')[2].strip().partition('\n')[0].strip() or None
    if said := _SAID.findall(text):
        return said[-1].strip().rstrip('.') or None
    short_enough = itself and '\n' not in text.strip() and len(text.strip()) <= _SHORT
    return text.strip() or None if short_enough else None


def answer_text(answer: Any) -> str | None:
    """Returns an accepted answer as text: 142.0 as '142', a GSM8K solution as the text after its ####.

    None if it is not an answer.
    """
    if isinstance(answer, str):
        if '####' in answer or '\\boxed' in answer:
            return result(answer)
        return None if is_none(answer) else answer.strip()
    if isinstance(answer, int) and not isinstance(answer, bool):
        return str(answer)
    if not isinstance(answer, float) or not math.isfinite(answer):
        return None
    return str(int(answer)) if answer == int(answer) else repr(answer)


def is_none(answer: Any) -> bool:
    """Whether a row has no answer that mathematics can judge.

    That is an answer that `is_blank`, the end of a proof, a JSON object (the tests of a program), or prose
    that marks no result.
    """
    if not isinstance(answer, str):
        return answer is None
    text = answer.strip()
    if '####' in text or '\\boxed' in text:
        return result(text) is None
    is_prose = len(_WORD.findall(text)) >= _PROSE_WORDS
    return is_blank(text) or text.casefold().rstrip('.') in _PROVED or _is_object(text) or is_prose


def is_blank(answer: Any) -> bool:
    """Whether a row has no answer for any kind of question: null, blank, 'proof' or 'notfound'."""
    return answer is None or isinstance(answer, str) and answer.strip().casefold() in _NO_ANSWER


def _is_object(text: str) -> bool:
    """Whether a text is a JSON object with fields; {} is a set."""
    if not text.startswith('{'):
        return False
    try:
        return bool(json.loads(text))
    except (ValueError, RecursionError):
        return False


def beside(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the columns that verl passes to a reward function with the response; {} if the row has none."""
    told = {name: row[name] for name in _BESIDE if row.get(name) is not None}
    if isinstance(model := row.get('reward_model'), dict) and 'ground_truth' in model:
        told['ground_truth'] = model['ground_truth']
    return json.loads(json.dumps(told, default=str))
