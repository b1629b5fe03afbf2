"""Responses of models: mathematics through the verifier's own pool of processes, and Countdown."""

from __future__ import annotations

import ast
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

from bapo_jax.groups import Verdict
from bapo_jax.tasks import verifier_pool
from bapo_jax.tasks.countdown import task as countdown
from bapo_jax.tasks.geometry import task as geometry
from bapo_jax.tasks.mathematics import task as math_task
from bapo_jax.tasks.mathematics.answers import is_plain, quick_verdict
from bapo_jax.tasks.mathematics.text import after_thinking, last_box, tidy
from tests.fuzz import latex
from tests.fuzz.feed import ACCEPTED, CRASH, Outcome, Target, parsing, tried

OVERRAN = 'processor time used up'
GIVEN_UP = 'given up by sympy'
UNREADABLE = 'no accepted answer readable'
UNPARSEABLE = 'unparseable'


# ---- mathematics ------------------------------------------------------------------------------------------------------


class _Worker(verifier_pool._Worker):
    """Keeps the seconds of each request."""

    spent: dict[int, float] = {}

    def give(self, job: int, *args: Any) -> None:
        self.began, self.spent[job] = time.monotonic(), 0.0
        super().give(job, *args)

    def take(self) -> tuple[int, Any]:
        self.spent[self.job] = time.monotonic() - self.began
        return super().take()

    def kill(self) -> None:
        if self.job is not None:
            self.spent[self.job] = time.monotonic() - self.began
        super().kill()


class _Pool(verifier_pool.VerifierPool):
    """Keeps what a request cost, and what used up its processor time."""

    seconds: dict[str, float] = {}  # by the text of an answer, or an accepted one
    overran: set[Any] = set()  # accepted answers, and pairs of an answer and those

    def run(self, requests: Sequence[Any], *args: Any) -> list[Any]:
        outcomes = super().run(requests, *args)
        for job, (request, outcome) in enumerate(zip(requests, outcomes, strict=True)):
            text, accepted = request.get('answer'), tuple(request.get('accepted', [request.get('gold')]))
            for key in {text, *accepted} - {None}:
                self.seconds[key] = max(self.seconds.get(key, 0.0), _Worker.spent.get(job, 0.0))
            if outcome == verifier_pool.OVERRAN:
                self.overran |= {(text, accepted), accepted}
        return outcomes


@contextmanager
def mathematics(_: Path) -> Iterator[Target]:
    math_task._pool.cache_clear()
    with mock.patch.object(math_task, 'VerifierPool', _Pool), mock.patch.object(verifier_pool, '_Worker', _Worker):
        try:
            yield Target(_response, _judged, math_task.WALL_S, at_once=512)
        finally:
            math_task._pool().close()
            math_task._pool.cache_clear()


def _response(rng: Random) -> dict[str, Any]:
    """A response and its accepted answers; for a number in another style also the verdict that it must get."""
    if rng.random() < 0.2:
        gold, text, equal = latex.styled_pair(rng)
        return {'response': f'\\boxed{{{text}}}', 'accepted': [gold], 'boxed': True, 'verdict': 'correct' if equal else 'wrong'}
    text = latex.answer(rng)
    gold = text if (kind := rng.random()) < 0.2 else latex.answer(rng) if kind < 0.35 else latex.number(rng)
    accepted = [gold] if rng.random() < 0.9 else [gold, latex.expression(rng, 1)]
    return {'response': latex.response(rng, text), 'accepted': accepted, 'boxed': rng.random() < 0.8}


def _judged(inputs: Sequence[dict[str, Any]]) -> list[Outcome]:
    """As a run does: golds are tried first, then a step's responses are judged at once."""
    pool = math_task._pool()
    pool.overran.clear()
    pool.seconds.clear()
    try:
        unreadable = set(math_task.unreadable_answers([said['accepted'] for said in inputs]))
        truths = [{'answers': said['accepted'], 'boxed': said['boxed']} for said in inputs]
        verdicts = math_task.verify_all([said['response'] for said in inputs], truths)
    except Exception as e:
        if len(inputs) > 1:  # one of them
            return [outcome for said in inputs for outcome in _judged([said])]
        return [Outcome(CRASH, 0.0, f'{type(e).__name__}: {str(e)[:300]!a}')]
    return [
        _outcome(pool, said, *verdict, row in unreadable) for row, (said, verdict) in enumerate(zip(inputs, verdicts, strict=True))
    ]


def _outcome(pool: _Pool, said: dict[str, Any], verdict: Verdict, answer: str | None, unreadable: bool) -> Outcome:
    accepted = tuple(said['accepted'])
    seconds = max(pool.seconds.get(text, 0.0) for text in (answer, said['response'][-math_task.TAIL :], *accepted))
    if not isinstance(verdict, Verdict) or not isinstance(answer, str | None):
        return Outcome(CRASH, seconds, f'no verdict: {verdict!r}, {answer!r}')
    if said.get('verdict', verdict.name.lower()) != verdict.name.lower():
        return Outcome(CRASH, seconds, f'is judged {verdict.name}')
    if verdict == Verdict.INFRA_ERROR:
        if unreadable:
            return Outcome(UNREADABLE, seconds)
        if not pool.overran & {accepted, *((gold,) for gold in accepted)}:
            return Outcome(CRASH, seconds, 'an infrastructure error')
    if {(answer, accepted), (said['response'][-math_task.TAIL :], accepted)} & pool.overran:
        return Outcome(OVERRAN if seconds >= math_task.CPU_S else GIVEN_UP, seconds)
    return Outcome(UNPARSEABLE if verdict == Verdict.UNPARSEABLE else ACCEPTED, seconds)


# ---- what the trainer does with a response by itself -------------------------------------------------------------------


@contextmanager
def answer_text(_: Path) -> Iterator[Target]:
    yield parsing(_response, _read, 10.0)


def _read(said: dict[str, Any]) -> None:
    """Everything that takes linear time, on a text of some size."""
    response, accepted = said['response'], said['accepted']
    for text in (response, (response * 20)[:40_000]):
        answer = last_box(after_thinking(text) or '', stated=not said['boxed']) or text
        assert quick_verdict(answer, accepted) in (None, Verdict.CORRECT, Verdict.WRONG)
        assert not tidy(answer) or quick_verdict(answer, [answer]) in (None, Verdict.CORRECT)
        geometry.has_form(text)
        geometry.stated_quantity(answer)
        geometry.statement(answer)
    for gold in accepted:
        is_plain(gold)
        geometry.accepted_statement(gold)


# ---- Countdown --------------------------------------------------------------------------------------------------------

_PIECES = (
    '+', '-', '*', '/', '**', '//', '(', ')', '()', ' ', '\t', '\n', '0', '007', '.5', '1e9', '٣', '５', '²', '×', '÷', '−',
    '\ud800', '\u200b', '=', ',', '_', 'abs', '<answer>', '</answer>', '</think>', '<think>', 'Assistant:', '9' * 30, '(' * 90,
    '-' * 99, '[', ']',
)  # fmt: skip


@contextmanager
def countdown_answers(_: Path) -> Iterator[Target]:
    yield Target(_countdown, lambda inputs: [_countdown_outcome(said) for said in inputs], 10.0)


def _countdown(rng: Random) -> dict[str, Any]:
    numbers = [rng.randint(1, 99) for _ in range(rng.choice((2, 3, 4, 6)))]
    expression = _sum(rng, [str(n) for n in numbers])
    target = _value(expression) if rng.random() < 0.7 else rng.randint(10, 100)
    for _ in range(rng.choice((0, 0, 1, 2, 4))):
        at = rng.randrange(len(expression) + 1)
        expression = expression[:at] + rng.choice(_PIECES) + expression[at + rng.choice((0, 0, 1, 3)) :]
    if rng.random() < 0.02:
        depth = rng.choice((99, 101, 3000, 100_000))
        expression = '(' * depth + expression + ')' * depth
    response = rng.choice((
        '<answer>%s</answer>', '<answer> %s </answer>\n', 'So\n<answer>%s</answer>.', '<answer>1</answer> <answer>%s</answer>',
        '<answer>%s', '%s</answer>', '<think>7</think><answer>\n%s\n</answer>',
    )).replace('%s', expression)  # fmt: skip
    return {
        'response': response, 'numbers': numbers, 'target': target if type(target) is int else 24,
        'last_block': rng.random() < 0.3, 'thinking': rng.random() < 0.1,
    }  # fmt: skip


def _sum(rng: Random, terms: list[str]) -> str:
    while len(terms) > 1:
        a, b = (terms.pop(rng.randrange(len(terms))) for _ in range(2))
        joined = rng.choice(('{}+{}', '({}+{})', '({} - {})', '{}*{}', '({})*({})', '{}/{}', '(({})/({}))', '-{}+{}'))
        terms.append(joined.format(a, b))
    return terms[0]


def _countdown_outcome(said: dict[str, Any]) -> Outcome:
    truth = {name: said[name] for name in ('numbers', 'target', 'last_block', 'thinking')}
    found: list[tuple[Verdict, str | None]] = []
    outcome = tried(said, lambda _: found.append(countdown.verify(said['response'], truth)), 10.0)
    if not found:
        return outcome
    [(verdict, answer)] = found
    expected = _expected(answer, said['numbers'], said['target'])
    if expected not in (None, verdict):
        return outcome._replace(kind=CRASH, why=f'{answer!r} is judged {verdict.name}, and is {expected.name}')
    return outcome._replace(kind=UNPARSEABLE if verdict == Verdict.UNPARSEABLE else ACCEPTED)


def _expected(answer: str | None, numbers: list[int], target: int) -> Verdict | None:
    """The verdict on plain arithmetic, by Python's own parser; None where the answer has anything else in it, or is deep."""
    if answer is None:
        return Verdict.UNPARSEABLE
    plain = re.fullmatch(r'[0-9+*/() \t-]{1,500}', answer) and not re.search(r'\b0\d|\d{19}', answer)
    if not plain or len(re.findall(r'[(-]', answer)) > 60:
        return None
    value = _value(answer)
    if value == 'none':
        return Verdict.UNPARSEABLE
    used = sorted(map(int, re.findall(r'\d+', answer)))
    return Verdict.CORRECT if used == sorted(numbers) and value == target else Verdict.WRONG


_ARITHMETIC = (
    ast.Expression, ast.Constant, ast.UnaryOp, ast.USub, ast.UAdd, ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Div,
)  # fmt: skip


def _value(text: str) -> Fraction | int | str | None:
    """The value of plain arithmetic; None where it divides by 0, 'none' where it is none."""
    try:
        parsed = ast.parse(text.strip(), mode='eval')
    except SyntaxError:
        return 'none'
    if not all(isinstance(node, _ARITHMETIC) for node in ast.walk(parsed)):  # also behind a division by 0
        return 'none'
    try:
        value = _value_of(parsed.body)
    except ZeroDivisionError:
        return None
    return int(value) if value.denominator == 1 else value


def _value_of(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant):
        return Fraction(node.value)
    if isinstance(node, ast.UnaryOp):
        value = _value_of(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    left, right = _value_of(node.left), _value_of(node.right)
    if isinstance(node.op, ast.Add):
        return left + right
    if isinstance(node.op, ast.Sub):
        return left - right
    if isinstance(node.op, ast.Mult):
        return left * right
    return left / right
