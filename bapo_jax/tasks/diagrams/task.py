"""Diagrams: read two or three numbers off a drawn figure, and find the missing number by a single rule.

A ground truth is {'answer': int, 'images': [reference]}; problems.py has the problems. The prompt is the same
for all: only the picture shows which rule holds and its numbers. The answer is the integer in the last
<answer>...</answer>. An answer within <think>, closed or not, does not count.

The control asks the same questions with white pictures: task.train='blanked', and the benchmark
'diagrams_blanked'.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from PIL import Image

from bapo_jax.groups import Verdict
from bapo_jax.tasks.diagrams.pictures import sheet
from bapo_jax.tasks.diagrams.problems import (
    BENCHMARKS,
    benchmark,
    numbers_in,
    similar_ratio,
    training_problems,
)
from bapo_jax.tasks.geometry.problems import VISION_TOKENS
from bapo_jax.tasks.mathematics.text import after_thinking

__all__ = [
    'BENCHMARKS',
    'TEMPLATES',
    'VOTES',
    'benchmark',
    'check_ground_truth',
    'prompt_text',
    'sample_sheet',
    'training_problems',
    'verify',
    'verify_all',
    'with_demands',
    'worked_diagram',
]

_VISION = ''.join(VISION_TOKENS)
_QUESTION = (
    'Find the number that belongs at the question mark in this figure, which is not drawn to scale. It '
    'shows a triangle with angles in degrees, a right triangle with lengths, or two similar triangles with '
    'lengths. Give the number alone, in <answer> </answer> tags.'
)
TEMPLATES = {
    'compact': _VISION + '?\n',  # for small policies
    'words': _VISION + _QUESTION,  # as a user turn of the chat template if the tokenizer has one
}
VOTES = True  # equal answers agree, so maj@n is meaningful

_ANSWER = re.compile(r'\s*([0-9]{1,9})\s*°?\s*')


def prompt_text(ground_truth: dict, template: str, tokenizer: Any) -> str:
    """Returns the prompt text, with <|vision_start|><|image_pad|><|vision_end|> for the image."""
    check_ground_truth(ground_truth)
    if template not in TEMPLATES:
        raise ValueError(f'task.template is {template!r}; choose one of {", ".join(TEMPLATES)}')
    text = TEMPLATES[template]
    if template == 'compact' or not getattr(tokenizer, 'chat_template', None):
        return text
    return tokenizer.apply_chat_template(
        [{'role': 'user', 'content': text}], add_generation_prompt=True, tokenize=False
    )


def with_demands(ground_truth: dict, text: str) -> dict:
    """Returns the ground truth, with 'thinking' if the prompt opens <think>; all demand the same form."""
    return {**ground_truth, 'thinking': True} if text.rstrip().endswith('<think>') else ground_truth


def check_ground_truth(ground_truth: object) -> None:
    """Raises ValueError, naming the field, unless 'answer' is an int and 'images', if any, one reference."""
    answer = ground_truth.get('answer') if isinstance(ground_truth, dict) else None
    if type(answer) is not int or answer < 0:
        raise ValueError(
            f'ground_truth.answer must be a whole number of 0 or more, got {repr(ground_truth)[:100]}'
        )
    images, fields = ground_truth.get('images'), {'sha256', 'width', 'height'}
    one = (
        isinstance(images, list)
        and len(images) == 1
        and isinstance(images[0], dict)
        and fields <= images[0].keys()
    )
    if 'images' in ground_truth and not one:
        raise ValueError(
            f'ground_truth.images must be a list with one image reference, got {repr(images)[:100]}'
        )


def verify(response: str, ground_truth: dict) -> tuple[Verdict, str | None]:
    """Returns the verdict on a response, and its answer without leading zeros; None if it has none.

    CORRECT: the last <answer>...</answer> holds the number, with or without a degree sign. WRONG: another
    integer. UNPARSEABLE: no such tag, or anything else in it. No response text makes it raise. Raises
    ValueError if the ground truth is malformed.
    """
    check_ground_truth(ground_truth)
    text = after_thinking(response, opened=ground_truth.get('thinking', False)) or ''
    end = text.rfind('</answer>')
    start = text.rfind('<answer>', 0, max(end, 0))
    found = _ANSWER.fullmatch(text[start + len('<answer>') : end]) if start >= 0 else None
    if found is None:
        return Verdict.UNPARSEABLE, None
    answer = int(found[1])
    return (Verdict.CORRECT if answer == ground_truth['answer'] else Verdict.WRONG), str(answer)


def verify_all(
    responses: Sequence[str], ground_truths: Sequence[dict], budget_s: float = math.inf
) -> list[tuple[Verdict, str | None]]:
    """Returns `verify` of each response: hundreds of thousands per second, so `budget_s` is ignored."""
    return [
        verify(response, ground_truth)
        for response, ground_truth in zip(responses, ground_truths, strict=True)
    ]


def worked_diagram(ground_truth: dict) -> str:
    """Returns steps and answer: '57+64=121 180-121<answer>59</answer>'. Reads angles from left to right."""
    figure, answer = ground_truth['images'][0]['figure'], ground_truth['answer']
    numbers = numbers_in(figure)
    if figure['kind'] == 'angles':
        a, b = (n for _, n in sorted(zip(figure['corners'], numbers)) if n is not None)
        steps = f'{a}+{b}={a + b} 180-{a + b}'
    elif figure['kind'] == 'right':
        leg, hypotenuse, other = numbers
        if hypotenuse is None:
            steps = f'{leg}*{leg}+{other}*{other}'
        else:
            known = leg if other is None else other
            steps = f'{hypotenuse}*{hypotenuse}-{known}*{known}'
    else:
        ratio, asked = similar_ratio(numbers), numbers.index(None)
        small, large = next(
            (s, b) for s, b in zip(numbers[:2], numbers[2:]) if s is not None and b is not None
        )
        partner = numbers[(asked + 2) % 4]
        steps = f'{large}/{small}={ratio} {partner}{"*" if asked >= 2 else "/"}{ratio}'
    return f'{steps}<answer>{answer}</answer>'


def sample_sheet() -> Image.Image:
    """Draws the first six test problems, with steps and answers, for people; see docs/reference/tasks.md."""
    problems = benchmark('diagrams')[:6]
    captions = [
        f'{worked_diagram(problem).partition("<")[0]}    ? = {problem["answer"]}' for problem in problems
    ]
    return sheet([problem['images'][0]['figure'] for problem in problems], captions)
