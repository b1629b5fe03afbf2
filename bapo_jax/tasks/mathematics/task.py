r"""Mathematics questions, whose answers are verified, in \boxed{} or the form that the question demands.

A ground truth is {'problem': str, 'answers': [str, ...]}, plus the fields of the row that problems.py keeps.
`with_demands` adds what the prompt demands of a response:

    boxed       an answer outside a box does not count
    form        'line', 'hashes' or 'block' (demands.py): an answer in another form does not count
    thinking    the prompt ends in <think>, so the answer follows </think>

`verify` also accepts a bare answer or a list of answers, as in `python -m bapo_jax.grade math`. The prompt is
unknown then, and a response without a box is judged by the last answer that it states.
"""

from __future__ import annotations

import functools
import math
import os
import time
from collections.abc import Collection, Sequence
from typing import Any

from absl import logging

from bapo_jax.groups import Verdict
from bapo_jax.tasks.demands import FORMS, demanded, stated
from bapo_jax.tasks.jsonl import short
from bapo_jax.tasks.mathematics import problems as math_problems
from bapo_jax.tasks.mathematics.answers import MAX_LENGTH, is_plain, quick_verdict
from bapo_jax.tasks.mathematics.problems import BENCHMARKS, SUFFIX
from bapo_jax.tasks.mathematics.text import after_thinking, last_box
from bapo_jax.tasks.python_tool import OFFER, block_for, check_reply
from bapo_jax.tasks.turns import chat
from bapo_jax.tasks.verifier_pool import MACHINE_FAILED, OVERRAN, VerifierPool

__all__ = [
    'BENCHMARKS', 'TEMPLATES', 'TOOL_TEMPLATES', 'benchmark', 'check_ground_truth', 'check_reply',
    'prompt_text', 'reply', 'training_problems', 'verify', 'verify_all', 'with_demands',
]  # fmt: skip

VOTES = True  # responses with equal answers agree, so maj@n is meaningful

# The prompt format that each kind of model was trained on, always in the tokenizer's own chat template.
TEMPLATES = {
    'r1': f'{{problem}}{SUFFIX}, with <think> opened even if the chat template does not '
    '(R1 and its distillations)',
    'qwen3': f'{{problem}}{SUFFIX}, with thinking',
    'qwen3_no_thinking': f'{{problem}}{SUFFIX}, with an empty thinking block, '
    'as enable_thinking=False gives it',
    'qwen2.5_math': 'system: Please reason step by step, and put your final answer within \\boxed{}.',
    'chat': f'{{problem}}{SUFFIX}',
    'python': f'{{problem}}{SUFFIX}{OFFER}',
    'as_is': 'the question unchanged, in a chat template if the tokenizer has one; '
    'answers are judged in the form that it asks for',
}
TOOL_TEMPLATES = ('python',)
_SYSTEM = {'qwen2.5_math': 'Please reason step by step, and put your final answer within \\boxed{}.'}
_REQUEST = {'python': SUFFIX + OFFER, 'qwen2.5_math': ''}
_SWITCH = {'qwen3': True, 'qwen3_no_thinking': False}

CPU_S = 4.0  # CPU time limit per answer; the slowest honest answer known takes half a second
WALL_S = 30.0  # wall-clock limit per answer; a worker that exceeds it did not get the CPU
WORKER_BYTES = 2 << 30  # address space limit of a worker; sympy takes about 400 MB of it
MAX_WORKERS = 16
_IN_WORDS = {'line': '"Answer:"', 'hashes': '"####"', 'block': '<answer>'}
KEPT = 'are kept: a response with the same text is correct, any other an infrastructure error'
MOST_NAMED = 10  # most unreadable accepted answers that a warning shows
TAIL = 4000  # characters at the end of a response that are searched for an unboxed answer


def training_problems(source: str, *, limit: int, seed: int) -> list[dict]:
    """Returns those of `math_problems.training_problems` whose accepted answers can be read.

    A warning counts and names the others. Raises ValueError if no problem is left.
    """
    problems = math_problems.training_problems(source, limit=limit, seed=seed)
    return readable(problems, [problem['answers'] for problem in problems], source)


def benchmark(name: str) -> list[dict]:
    """Returns the problems of `math_problems.benchmark`; a warning names those with unreadable answers."""
    problems = math_problems.benchmark(name)
    report_unreadable(problems, [problem['answers'] for problem in problems], name, KEPT)
    return problems


def readable(problems: list[dict], compared: Sequence[Sequence[str]], source: str) -> list[dict]:
    """Returns the problems with a readable accepted answer; a warning counts and names the others.

    `compared` has the accepted answers of each problem. Raises ValueError if no problem is left.
    """
    unreadable = report_unreadable(problems, compared, source, 'are left out of training')
    if len(unreadable) == len(problems):
        raise ValueError(
            f'{source}: none of its {len(problems)} answers can be parsed (the first is '
            f'{_shown(problems[0])}); write them in LaTeX'
        )
    return [problem for row, problem in enumerate(problems) if row not in unreadable]


def report_unreadable(
    problems: Sequence[dict], compared: Sequence[Sequence[str]], source: str, consequence: str
) -> set[int]:
    """Returns the indices of problems whose accepted answers cannot be read.

    A warning counts and names them, and states the `consequence`.
    """
    unreadable = unreadable_answers(compared)
    if unreadable:
        named = '; '.join(f'problem {row + 1}: {_shown(problems[row])}' for row in unreadable[:MOST_NAMED])
        more = (
            f'; and problems {", ".join(str(row + 1) for row in unreadable[MOST_NAMED:])}'
            if unreadable[MOST_NAMED:]
            else ''
        )
        logging.warning(
            '%s: %d of %d problems have no accepted answer that can be parsed, and %s. %s%s',
            source, len(unreadable), len(problems), consequence, named, more,
        )  # fmt: skip
    return set(unreadable)


def _shown(problem: dict) -> str:
    return ' | '.join(map(short, problem['answers']))


def unreadable_answers(rows: Sequence[Sequence[str]]) -> list[int]:
    """Returns the indices of rows without a readable accepted answer; no response could be judged by them.

    Numbers and words take microseconds. The other answers go to the pool, each once. An answer whose check
    overruns or fails counts as readable, since that depends on the machine.
    """
    tried = {
        answer: sum(map(len, row)) <= MAX_LENGTH for row in rows for answer in row if not is_plain(answer)
    }
    requests = [answer for answer, short_enough in tried.items() if short_enough]
    for answer, outcome in zip(
        requests, _pool().run([{'gold': a} for a in requests]) if requests else [], strict=True
    ):
        tried[answer] = outcome is not False
    return [i for i, row in enumerate(rows) if not any(tried.get(answer, True) for answer in row)]


def prompt_text(ground_truth: dict, template: str, tokenizer: Any) -> str:
    """Returns the policy's prompt. Raises ValueError if the tokenizer's template cannot render `template`."""
    check_ground_truth(ground_truth)
    if template not in TEMPLATES:
        raise ValueError(f'task.template is {template!r}; choose one of {", ".join(TEMPLATES)}')
    chat_template = getattr(tokenizer, 'chat_template', None)
    if not chat_template and template == 'as_is' and not ground_truth.get('before'):
        return ground_truth['problem']
    if not chat_template:
        raise ValueError(
            f'task.template is {template!r}, but the tokenizer has no chat template; set model.path to a '
            'chat model'
        )
    if template in _SWITCH and 'enable_thinking' not in str(chat_template):
        raise ValueError(
            f"task.template is {template!r}, but the tokenizer's chat template has no enable_thinking; "
            "choose 'chat'"
        )
    messages = [*ground_truth.get('before', ()), {'role': 'user', 'content': ground_truth['problem']}]
    if template != 'as_is':
        messages = _with_request(messages, template)
    switch = {'enable_thinking': _SWITCH[template]} if template in _SWITCH else {}
    text = chat(tokenizer, messages, **switch)
    # The first R1 tokenizers left <think> to the model.
    if template == 'r1' and not text.rstrip().endswith('<think>'):
        text += '<think>\n'
    return text


def _with_request(messages: list[dict], template: str) -> list[dict]:
    """Returns the chat with the template's own request for a boxed answer.

    Raises ValueError if the question demands another form, or if row and template both have a system message.
    """
    refuse_other_demand(messages, template)
    question = without_request(messages[-1]['content'], SUFFIX)
    messages = [
        *messages[:-1],
        {'role': 'user', 'content': question + _REQUEST.get(template, SUFFIX)},
    ]
    if template not in _SYSTEM:
        return messages
    if any(message['role'] == 'system' for message in messages):
        raise ValueError(
            f"task.template={template!r} adds a system message, but a row already has one; choose 'as_is'"
        )
    return [{'role': 'system', 'content': _SYSTEM[template]}, *messages]


def refuse_other_demand(messages: Sequence[dict], template: str) -> None:
    """Raises ValueError if a question demands another answer form than the box that `template` asks for."""
    form = demanded('\n'.join(message['content'] for message in messages))
    if form not in ('', 'box'):
        raise ValueError(
            f'task.template={template!r} asks for \\boxed{{}}, but a question itself asks for '
            f'{_IN_WORDS[form]}: '
            f"{short(messages[-1]['content'][-100:])}; choose task.template='as_is', which leaves questions "
            'unchanged'
        )


def without_request(question: str, request: str) -> str:
    """Removes the template's request from a question: verl's files contain it, and it must not come twice."""
    return question.strip().removesuffix(request.strip()).rstrip()


def with_demands(ground_truth: dict, text: str) -> dict:
    """Returns the ground truth with the demands of the prompt `text`: 'boxed' or 'form', and 'thinking'."""
    form = demanded(text)
    other = {'form': form} if form not in ('', 'box') else {}
    return {**ground_truth, 'boxed': form == 'box', **other, 'thinking': text.rstrip().endswith('<think>')}


def reply(ground_truth: Any, turn: str) -> str | None:
    """Returns what the Python code at the end of a turn prints (python_tool.py); None if there is none."""
    return block_for(turn)


def verify(response: str, ground_truth: Any) -> tuple[Verdict, str | None]:
    """Returns the result of `verify_all` for one response."""
    return verify_all([response], [ground_truth])[0]


def verify_all(
    responses: Sequence[str], ground_truths: Sequence[Any], budget_s: float = math.inf
) -> list[tuple[Verdict, str | None]]:
    """Returns, for each response, the verdict and the answer found in it (None if there is none).

    CORRECT       the answer equals an accepted one
    WRONG         it does not, or the comparison used up `CPU_S` seconds of CPU time or the worker's memory,
                  or sympy failed
    UNPARSEABLE   there is no answer where the prompt demands it (after the thinking, in a closed box), or it
                  cannot be read
    INFRA_ERROR   the verifier failed: no accepted answer can be read; twice, a worker died or hit the
                  wall-clock limit before its CPU limit; or the answer was unjudged after `budget_s` seconds
                  for all responses

    No response text makes it raise. Raises ValueError if a ground truth is malformed.

    An answer takes microseconds if it equals an accepted one as text, or if both are plain numbers. The
    others go to a pool with one process per core; the first of them starts the pool, which takes two seconds.
    Equal answers to the same question are judged once.
    """
    for ground_truth in ground_truths:
        check_ground_truth(ground_truth)
    verdicts: list[tuple[Verdict, str | None]] = []
    requests: dict[tuple[str, tuple[str, ...], bool], list[int]] = {}
    for row, (response, ground_truth) in enumerate(zip(responses, ground_truths, strict=True)):
        accepted, boxed, form, thinking = _terms(ground_truth)
        text = after_thinking(response, opened=thinking)
        if text is None:
            answer = None
        else:
            answer = stated(text, form) if form else last_box(text, stated=not boxed)
        verdicts.append((Verdict.UNPARSEABLE, answer))
        if answer is not None:
            if (verdict := quick_verdict(answer, accepted)) is not None:
                verdicts[row] = verdict, answer
            elif sum(map(len, accepted)) > MAX_LENGTH:
                verdicts[row] = Verdict.INFRA_ERROR, answer
            elif len(answer) <= MAX_LENGTH:
                requests.setdefault((answer, accepted, True), []).append(row)
        elif text and not (boxed or form) and '\\boxed' not in text and sum(map(len, accepted)) <= MAX_LENGTH:
            requests.setdefault((text[-TAIL:], accepted, False), []).append(row)
    for (answer, accepted, in_box), outcome in zip(requests, _judge(list(requests), budget_s), strict=True):
        for row in requests[answer, accepted, in_box]:
            verdicts[row] = outcome
    return verdicts


def check_ground_truth(ground_truth: object) -> None:
    """Raises ValueError, naming the field, unless it is a string, list of strings, or dict with 'answers'."""
    where, answers = 'ground_truth', ground_truth
    if isinstance(ground_truth, dict):
        if 'answers' not in ground_truth:
            raise ValueError('ground_truth.answers is missing; add it')
        where, answers = 'ground_truth.answers', ground_truth['answers']
        for field in ('boxed', 'thinking'):
            if not isinstance(ground_truth.get(field, False), bool):
                raise ValueError(
                    f'ground_truth.{field} must be true or false, got {str(ground_truth[field])[:100]}'
                )
        if ground_truth.get('form', 'box') not in FORMS:
            raise ValueError(
                f'ground_truth.form must be one of {", ".join(FORMS)}, got {str(ground_truth["form"])[:100]}'
            )
    if not isinstance(answers, str) and not (
        isinstance(answers, list) and answers and all(isinstance(a, str) for a in answers)
    ):
        raise ValueError(f'{where} must be a string or a non-empty list of strings, got {str(answers)[:100]}')


def _terms(ground_truth: Any) -> tuple[tuple[str, ...], bool, str, bool]:
    """Returns the accepted answers and the values of 'boxed', 'form' and 'thinking', or their defaults."""
    terms = ground_truth if isinstance(ground_truth, dict) else {'answers': ground_truth}
    answers = terms['answers']
    accepted = (answers,) if isinstance(answers, str) else tuple(answers)
    return accepted, terms.get('boxed', False), terms.get('form', ''), terms.get('thinking', False)


def _judge(
    requests: Sequence[tuple[str, tuple[str, ...], bool]], budget_s: float
) -> list[tuple[Verdict, str | None]]:
    """Returns the pool's verdicts on requests (text, accepted answers, boxed).

    The text is a boxed answer, or else the end of a response.
    """
    if not requests:
        return []
    until = time.monotonic() + budget_s
    rows = [{'answer': answer, 'accepted': accepted, 'boxed': boxed} for answer, accepted, boxed in requests]
    outcomes = _pool().run(rows, budget_s)
    light = _light(
        {accepted for (_, accepted, _), outcome in zip(requests, outcomes) if outcome == OVERRAN}, until
    )
    verdicts = []
    for (answer, accepted, boxed), outcome in zip(requests, outcomes, strict=True):
        shown = answer if boxed else None
        if outcome == MACHINE_FAILED:
            verdicts.append((Verdict.INFRA_ERROR, shown))
        elif outcome == OVERRAN:
            verdicts.append((Verdict.WRONG if accepted in light else Verdict.INFRA_ERROR, shown))
        else:
            verdicts.append((Verdict(outcome[0]), outcome[1]))
    return verdicts


def _light(accepted: Collection[tuple[str, ...]], until: float) -> set[tuple[str, ...]]:
    """Returns the accepted answers that can be compared with a harmless answer in time.

    If others time out, no response is to blame.
    """
    rows = [{'answer': '0', 'accepted': answers, 'boxed': True} for answers in accepted]
    outcomes = _pool().run(rows, until - time.monotonic()) if rows else []
    return {
        answers
        for answers, outcome in zip(accepted, outcomes, strict=True)
        if outcome not in (OVERRAN, MACHINE_FAILED)
    }


@functools.cache
def _pool() -> VerifierPool:
    workers = min(len(os.sched_getaffinity(0)), MAX_WORKERS)
    limits = {'cpu_s': CPU_S, 'wall_s': WALL_S, 'memory_bytes': WORKER_BYTES, 'network': False}
    return VerifierPool('bapo_jax.tasks.mathematics.worker', workers=workers, **limits)
