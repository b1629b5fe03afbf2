"""Diagrams: read two or three numbers off a drawn figure, and find the missing one by one rule.

A ground truth is {'answer': int, 'images': [reference]}; diagrams_data.py has the problems. The prompt is the same for all of them:
which rule holds and its numbers are in the picture alone. The answer is the whole number in the last <answer>...</answer>.

An answer within a <think>, also one that is never closed, does not count.

The control asks the same questions of white pictures: task.train='blanked', and the benchmark 'diagrams_blanked'.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from PIL import Image

from bapo_jax.groups import Verdict
from bapo_jax.tasks.diagrams_data import BENCHMARKS, benchmark, numbers_of, similar_ratio, training_problems
from bapo_jax.tasks.figures import sheet
from bapo_jax.tasks.geometry_data import VISION_TOKENS
from bapo_jax.tasks.math_text import after_thinking

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
    'worked_solution',
]

_VISION = ''.join(VISION_TOKENS)
_QUESTION = (
    'Find the number that belongs at the question mark in this figure, which is not drawn to scale. It shows a triangle with '
    'angles in degrees, a right triangle with lengths, or two similar triangles with lengths. Give the number alone, in '
    '<answer> </answer> tags.'
)
TEMPLATES = {
    'compact': _VISION + '?\n',  # for small policies
    'words': _VISION + _QUESTION,  # as a user turn of the chat template where the tokenizer has one
}
VOTES = True  # equal answers agree, so maj@n is meaningful

_ANSWER = re.compile(r'\s*([0-9]{1,9})\s*°?\s*')


def prompt_text(ground_truth: dict, template: str, tokenizer: Any) -> str:
    """The question as the policy reads it, with <|vision_start|><|image_pad|><|vision_end|> for the image."""
    check_ground_truth(ground_truth)
    if template not in TEMPLATES:
        raise ValueError(f'task.template is {template!r}; choose one of {", ".join(TEMPLATES)}')
    text = TEMPLATES[template]
    if template == 'compact' or not getattr(tokenizer, 'chat_template', None):
        return text
    return tokenizer.apply_chat_template([{'role': 'user', 'content': text}], add_generation_prompt=True, tokenize=False)


def with_demands(ground_truth: dict, text: str) -> dict:
    """The ground truth, with 'thinking' where the prompt has opened <think>; every prompt demands the same form."""
    return {**ground_truth, 'thinking': True} if text.rstrip().endswith('<think>') else ground_truth


def check_ground_truth(ground_truth: object) -> None:
    """Raises ValueError, naming the field, unless it is {'answer': int}, with one reference in 'images' if it has these."""
    answer = ground_truth.get('answer') if isinstance(ground_truth, dict) else None
    if type(answer) is not int or answer < 0:
        raise ValueError(f'ground_truth.answer must be a whole number of 0 or more, got {repr(ground_truth)[:100]}')
    images, fields = ground_truth.get('images'), {'sha256', 'width', 'height'}
    one = isinstance(images, list) and len(images) == 1 and isinstance(images[0], dict) and fields <= images[0].keys()
    if 'images' in ground_truth and not one:
        raise ValueError(f'ground_truth.images must be a list of one reference to an image, got {repr(images)[:100]}')


def verify(response: str, ground_truth: dict) -> tuple[Verdict, str | None]:
    """The verdict on a response, and its answer without leading zeros; None where it has none.

    CORRECT: the last <answer>...</answer> holds the very number, degrees or not. WRONG: another whole number. UNPARSEABLE: no such
    tag, or anything else in it. No response text makes it raise; a malformed ground truth raises ValueError.
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
    """`verify` of each response; hundreds of thousands a second, so `budget_s` is not looked at."""
    return [verify(response, ground_truth) for response, ground_truth in zip(responses, ground_truths, strict=True)]


def worked_solution(ground_truth: dict) -> str:
    """What was read and the rule, then the answer: '57+64=121 180-121<answer>59</answer>'. Numbers are read from left to right."""
    figure, answer = ground_truth['images'][0]['figure'], ground_truth['answer']
    numbers = numbers_of(figure)
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
        small, large = next((s, b) for s, b in zip(numbers[:2], numbers[2:]) if s is not None and b is not None)
        partner = numbers[(asked + 2) % 4]
        steps = f'{large}/{small}={ratio} {partner}{"*" if asked >= 2 else "/"}{ratio}'
    return f'{steps}<answer>{answer}</answer>'


def sample_sheet() -> Image.Image:
    """The first six test problems, their steps and their answers, for people; docs/diagrams.md has the command."""
    problems = benchmark('diagrams')[:6]
    captions = [f'{worked_solution(problem).partition("<")[0]}    ? = {problem["answer"]}' for problem in problems]
    return sheet([problem['images'][0]['figure'] for problem in problems], captions)
