"""Generated arithmetic for small chat models: two-digit sums and differences, and products up to 12 × 12.

A ground truth is {'a': int, 'sign': '+', '-' or '×', 'b': int}. The answer is the last number in a response,
since a small model writes '41 - 12 = 29', a sentence, or just the number.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Sequence
from typing import Any

from bapo_jax.groups import Verdict
from bapo_jax.tasks.jsonl import shown
from bapo_jax.tasks.mathematics.text import after_thinking
from bapo_jax.tasks.turns import chat

BENCHMARKS = {'arithmetic': '200 questions that are never trained on'}
TEMPLATES = {'chat': 'What is {a} {sign} {b}? Reply with the number.'}
VOTES = True  # equal answers agree

_VALUE = {'+': lambda a, b: a + b, '-': lambda a, b: a - b, '×': lambda a, b: a * b}
_TEST, _PRODUCTS = 200, 30  # questions in the test set, and products among them, of 121 that exist
_MOST = 5000  # most training questions
_NUMBER = re.compile(r'-?\d+(?:,\d{3})*(?:\.\d+)?')  # as people write them: 1,089 and 29.0


def _questions(count: int, products: int, seed: int, held_out: Sequence[dict] = ()) -> list[dict]:
    """Returns `count` distinct questions in random order, `products` of them products.

    None of them is in `held_out`, in either order of its numbers.
    """
    rng, found = random.Random(seed), {}
    taken = {(sign, *sorted((q['a'], q['b']))) for q in held_out for sign in q['sign']}
    while len(found) < count:
        sign = '×' if len(found) < products else rng.choice('+-')
        least, most = (2, 12) if sign == '×' else (10, 99)
        a, b = rng.randint(least, most), rng.randint(least, most)
        a, b = (b, a) if sign == '-' and a < b else (a, b)
        if (sign, *sorted((a, b))) not in taken:
            found[a, sign, b] = {'a': a, 'sign': sign, 'b': b}
    return rng.sample(list(found.values()), count)


def training_problems(source: str, *, limit: int, seed: int) -> list[dict]:
    """Returns `limit` questions, drawn with `seed`, that are in no benchmark. `source` must be 'generated'.

    Raises ValueError if `source` is another or `limit` is out of range.
    """
    if source != 'generated':
        raise ValueError(
            f'task.train is {source!r}, but arithmetic only has generated questions; set task.train=generated'
        )
    if not 0 < limit <= _MOST:
        raise ValueError(f'task.limit is {limit}; set it to a number of questions from 1 to {_MOST}')
    return _questions(limit, min(_PRODUCTS, limit // 8), seed, benchmark('arithmetic'))


def benchmark(name: str) -> list[dict]:
    """Returns the questions of a test set. Raises ValueError if the name is unknown."""
    if name not in BENCHMARKS:
        raise ValueError(f'unknown arithmetic benchmark {name!r}; choose one of {", ".join(BENCHMARKS)}')
    return _questions(_TEST, _PRODUCTS, seed=44)


def prompt_text(ground_truth: dict, template: str, tokenizer: Any) -> str:
    """Returns the question in the chat template. Raises ValueError if the tokenizer has none."""
    check_ground_truth(ground_truth)
    if template not in TEMPLATES:
        raise ValueError(f'task.template is {template!r}; choose one of {", ".join(TEMPLATES)}')
    if not getattr(tokenizer, 'chat_template', None):
        raise ValueError(
            "task.template is 'chat', but the tokenizer has no chat template; set model.path to a chat model"
        )
    return chat(tokenizer, [{'role': 'user', 'content': TEMPLATES[template].format(**ground_truth)}])


def with_demands(ground_truth: dict, text: str) -> dict:
    """Returns the ground truth, with 'thinking' if the prompt opens <think>: the answer follows </think>."""
    return ground_truth | {'thinking': True} if text.rstrip().endswith('<think>') else ground_truth


def check_ground_truth(ground_truth: object) -> None:
    """Raises ValueError, naming the field, unless there are two numbers and a sign."""
    row = ground_truth if isinstance(ground_truth, dict) else {}
    for name in ('a', 'b'):
        if type(row.get(name)) is not int:
            raise ValueError(f'"{name}" must be a whole number, got {shown(row.get(name))}')
    if row.get('sign') not in tuple(_VALUE):
        raise ValueError(f'"sign" must be one of {" ".join(_VALUE)}, got {shown(row.get("sign"))}')


def verify(response: str, ground_truth: dict) -> tuple[Verdict, str | None]:
    """Returns the verdict on the last number in a response, and that number; UNPARSEABLE if there is none."""
    check_ground_truth(ground_truth)
    text = after_thinking(response, opened=ground_truth.get('thinking', False))
    numbers = _NUMBER.findall(text or '')
    if not numbers:
        return Verdict.UNPARSEABLE, None
    value = _VALUE[ground_truth['sign']](ground_truth['a'], ground_truth['b'])
    right = len(numbers[-1]) < 30 and float(numbers[-1].replace(',', '')) == value
    return (Verdict.CORRECT if right else Verdict.WRONG), numbers[-1]


def verify_all(
    responses: Sequence[str], ground_truths: Sequence[dict], budget_s: float = math.inf
) -> list[tuple[Verdict, str | None]]:
    """Returns `verify` of each response: thousands per second, so `budget_s` is ignored."""
    return [
        verify(response, ground_truth)
        for response, ground_truth in zip(responses, ground_truths, strict=True)
    ]
