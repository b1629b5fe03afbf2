"""Countdown: reach the target with + - * /, using each given number exactly once.

A ground truth is {'numbers': [int, ...], 'target': int}. `verify` judges by the rule of TinyZero and of the
BAPO release: the last <answer> of the last line, each number once, the paper's binary reward. They call
eval(), while `verify` parses a grammar and computes exactly. `**`, `//`, decimals and anything else beyond
plain arithmetic are not answers.

Chat models write the answer over several lines, where that rule finds none. The templates 'chat' and
'examples' have another rule, which `with_demands` notes in the ground truth:

    last_block    the last closed <answer> block counts, anywhere and over any number of lines
    thinking      the chat template opens <think>, so the answer follows </think>

Under both rules a <think> that is never closed contains no answer. The exception is the <think> at the end of
TinyZero's own prompt, since the published reward does not require its end.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

from bapo_jax.groups import Verdict
from bapo_jax.tasks.countdown.problems import BENCHMARKS, MAX_DIGITS, benchmark, is_numbers, training_problems
from bapo_jax.tasks.countdown.solutions import worked_solution
from bapo_jax.tasks.demands import last_block
from bapo_jax.tasks.mathematics.text import after_thinking

__all__ = [
    'BENCHMARKS',
    'SOLUTIONS',
    'TEMPLATES',
    'TOOL_TEMPLATES',
    'VOTES',
    'benchmark',
    'check_ground_truth',
    'prompt_text',
    'reply',
    'training_problems',
    'verify',
    'verify_all',
    'with_demands',
]

# The prompt of TinyZero (`base`), word for word: published results depend on it.
_TINYZERO = (
    'A conversation between User and Assistant. The user asks a question, and the Assistant solves it. The '
    'assistant first thinks about the reasoning process in the mind and then provides the user with the '
    'answer.\nUser: Using the numbers {numbers}, create an equation that equals {target}. You can use basic '
    'arithmetic operations (+, -, *, /) and each number can only be used once. Show your work in <think> '
    '</think> tags. And return the final answer in <answer> </answer> tags, for example <answer> (1 + 2) / '
    '3 </answer>.\nAssistant: Let me solve this step by step.\n<think>'
)
_TINYZERO_ENDS = 'Let me solve this step by step.\n<think>'
_LAST_BLOCK = (
    'End with the expression alone in <answer> </answer> tags, for example <answer>(1 + 2) / 3</answer>.'
)
# Earlier turns of the template 'examples'
_SOLVED = (
    ([3, 5], 8, '3 + 5'),
    ([61, 24], 37, '61 - 24'),
    ([4, 7, 13], 41, '4 * 7 + 13'),
    ([92, 46], 46, '92 - 46'),
)
TEMPLATES = {
    'tinyzero': _TINYZERO,  # unchanged, for base models
    # as a user turn of the model's chat template, as in verl, MoPPS and the BAPO release
    'tinyzero_chat': _TINYZERO,
    'chat': (  # for chat models, through their chat template; the last <answer> block counts
        'Using each of the numbers {numbers} exactly once, write an arithmetic expression that equals '
        f'{{target}}. You can use +, -, *, / and parentheses. Think step by step. {_LAST_BLOCK}'
    ),
    # As 'chat', after turns with such answers: small models follow examples better than instructions
    'examples': 'Write {target} with the numbers {numbers}, each exactly once.',
    # As 'chat', with a calculator
    'calculator': (
        'Using each of the numbers {numbers} exactly once, write an arithmetic expression that equals '
        '{target}. You can use +, -, *, / and parentheses. You have a calculator: end a message with an '
        'expression in <calc> </calc> tags, for example <calc>(7 + 2) * 5</calc>, and you get its value. '
        f'Think step by step. {_LAST_BLOCK}'
    ),
    'compact': '{spaced}={target}\n',  # a dozen tokens, for the small policies of the quickstart
}

TOOL_TEMPLATES = ('calculator',)

# No maj@n. Correct expressions differ, and their values are not votes either: the question states the wanted
# value, so one of n expressions can be picked without counting, which is pass@n.
VOTES = False

MAX_ANSWER_LENGTH = 1000  # characters
MAX_DEPTH = 100  # nested parentheses and signs


def prompt_text(ground_truth: dict, template: str, tokenizer: Any) -> str:
    """Returns the question as the policy reads it.

    All but 'tinyzero' and 'compact' use the tokenizer's chat template. Raises ValueError if it has none.
    """
    check_ground_truth(ground_truth)
    if template not in TEMPLATES:
        raise ValueError(f'task.template is {template!r}; choose one of {", ".join(TEMPLATES)}')
    numbers = ground_truth['numbers']
    text = TEMPLATES[template].format(
        numbers=numbers, spaced=' '.join(map(str, numbers)), target=ground_truth['target']
    )
    if template in ('tinyzero', 'compact'):
        return text
    if not getattr(tokenizer, 'chat_template', None):
        raise ValueError(
            f"task.template is {template!r}, but the tokenizer has no chat template; choose 'tinyzero'"
        )
    turns = [*(_solved_turns() if template == 'examples' else ()), {'role': 'user', 'content': text}]
    return tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)


def _solved_turns() -> Iterator[dict[str, str]]:
    for numbers, target, expression in _SOLVED:
        yield {'role': 'user', 'content': TEMPLATES['examples'].format(numbers=numbers, target=target)}
        yield {'role': 'assistant', 'content': f'<answer>{expression}</answer>'}


def verify(response: str, ground_truth: dict) -> tuple[Verdict, str | None]:
    """Returns the verdict on a response, and the answer found in it (None if there is none).

    CORRECT: the answer uses each given number exactly once and equals the target exactly. WRONG: it is any
    other expression. UNPARSEABLE: there is no answer tag, or it holds no expression. Takes time linear in the
    response. No response text makes it raise. Raises ValueError if the ground truth is malformed.
    """
    check_ground_truth(ground_truth)
    text = after_thinking(response, opened=ground_truth.get('thinking', False))
    if text is None:
        answer = None
    elif ground_truth.get('last_block'):
        answer = ' '.join(block.split()) if (block := last_block(text)) is not None else None
    else:
        answer = find_answer(response)
    if answer is None:
        return Verdict.UNPARSEABLE, None
    try:
        postfix = parse(answer)
    except ValueError:
        return Verdict.UNPARSEABLE, answer
    # Numbers are compared first, so only the problem's own numbers enter the arithmetic.
    if sorted(token for token in postfix if isinstance(token, int)) != sorted(ground_truth['numbers']):
        return Verdict.WRONG, answer
    target = ground_truth['target']
    value = value_of(postfix)
    return (
        Verdict.CORRECT if value is not None and value == Fraction(str(target)) else Verdict.WRONG
    ), answer


def reply(ground_truth: dict, turn: str) -> str | None:
    """Returns what the calculator shows if a turn ends with <calc>EXPRESSION</calc>; else None.

    It shows an exact value, as an integer or a fraction, or 'error', on a line of its own.
    """
    expression, closed, after = turn.rstrip().rpartition('<calc>')[2].partition('</calc>')
    if not closed or after or '<calc>' not in turn:
        return None
    try:
        value = value_of(parse(expression.strip()))
    except ValueError:
        value = None
    return f'{"error" if value is None else value}\n'


def verify_all(
    responses: Sequence[str], ground_truths: Sequence[dict], budget_s: float = math.inf
) -> list[tuple[Verdict, str | None]]:
    """Returns `verify` of each response. It judges thousands per second, so `budget_s` is ignored."""
    return [
        verify(response, ground_truth)
        for response, ground_truth in zip(responses, ground_truths, strict=True)
    ]


def with_demands(ground_truth: dict, text: str) -> dict:
    """Returns the ground truth with the form that the prompt demands, if not the last line's <answer>."""
    opened = text.rstrip().endswith('<think>')
    if _LAST_BLOCK in text or next(_solved_turns())['content'] in text:
        return {**ground_truth, 'last_block': True, 'thinking': opened}
    # The <think> at the end of TinyZero's own prompt is ignored: base models seldom close it
    return (
        {**ground_truth, 'thinking': True} if opened and not text.endswith(_TINYZERO_ENDS) else ground_truth
    )


def find_answer(response: str) -> str | None:
    """Returns the text of the last line's last <answer>...</answer>, after the first 'Assistant:' if any.

    Trailing white space does not begin a new line.
    """
    before, found, after = response.partition('Assistant:')
    return last_block((after if found else before).rstrip().rpartition('\n')[2])


def parse(text: str) -> list[int | str]:
    """Returns an expression in postfix order: ints, '+', '-', '*', '/', and 'neg' for a minus sign.

        sum     = product (('+' | '-') product)*
        product = factor (('*' | '/') factor)*
        factor  = ('+' | '-') factor | '(' sum ')' | number

    A number is ASCII digits without a leading zero. Blanks and tabs may separate tokens. The limits on
    length, depth and digits are far above any problem's needs. Raises ValueError if it is not an expression.
    """
    if len(text) > MAX_ANSWER_LENGTH:
        raise ValueError(f'longer than {MAX_ANSWER_LENGTH} characters')
    tokens = re.findall(r'[0-9]+|[^ \t]', text) + ['end']
    postfix: list[int | str] = []
    position = _parse_sum(tokens, 0, 0, postfix)
    if tokens[position] != 'end':
        raise ValueError(f'unexpected {tokens[position]!r}')
    return postfix


def _parse_sum(tokens: list[str], position: int, depth: int, postfix: list[int | str]) -> int:
    """Each _parse function reads from `position`, appends to `postfix` and returns the next position."""
    position = _parse_product(tokens, position, depth, postfix)
    while (operator := tokens[position]) in ('+', '-'):
        position = _parse_product(tokens, position + 1, depth, postfix)
        postfix.append(operator)
    return position


def _parse_product(tokens: list[str], position: int, depth: int, postfix: list[int | str]) -> int:
    position = _parse_factor(tokens, position, depth, postfix)
    while (operator := tokens[position]) in ('*', '/'):
        position = _parse_factor(tokens, position + 1, depth, postfix)
        postfix.append(operator)
    return position


def _parse_factor(tokens: list[str], position: int, depth: int, postfix: list[int | str]) -> int:
    if depth > MAX_DEPTH:  # keeps the recursion far from Python's limit
        raise ValueError(f'nested deeper than {MAX_DEPTH}')
    token = tokens[position]
    if token in ('+', '-'):
        position = _parse_factor(tokens, position + 1, depth + 1, postfix)
        if token == '-':
            postfix.append('neg')
        return position
    if token == '(':
        position = _parse_sum(tokens, position + 1, depth + 1, postfix)
        if tokens[position] != ')':
            raise ValueError(f'expected ")", found {tokens[position]!r}')
        return position + 1
    if re.fullmatch(rf'0|[1-9][0-9]{{0,{MAX_DIGITS - 1}}}', token):
        postfix.append(int(token))
        return position + 1
    raise ValueError(f'unexpected {token!r}')


def value_of(postfix: Sequence[int | str]) -> Fraction | None:
    """Returns the exact value of what `parse` returned; None if it divides by zero."""
    stack: list[Fraction] = []
    for token in postfix:
        if isinstance(token, int):
            stack.append(Fraction(token))
        elif token == 'neg':
            stack.append(-stack.pop())
        else:
            right, left = stack.pop(), stack.pop()
            if token == '+':
                stack.append(left + right)
            elif token == '-':
                stack.append(left - right)
            elif token == '*':
                stack.append(left * right)
            elif right == 0:
                return None
            else:
                stack.append(left / right)
    return stack.pop()


# By template, the function that writes a correct response in its style.
SOLUTIONS = {'compact': worked_solution}


def check_ground_truth(ground_truth: object) -> None:
    """Raises ValueError, naming the field, unless it is {'numbers': [int, ...], 'target': number}.

    A question whose target is not an integer is judged like any other. 'last_block' and 'thinking' are bools.
    """
    if not isinstance(ground_truth, dict):
        raise ValueError(
            f'ground_truth must be an object with "numbers" and "target", got {repr(ground_truth)[:100]}'
        )
    for field in ('numbers', 'target'):
        if field not in ground_truth:
            raise ValueError(f'ground_truth.{field} is missing; add it')
    numbers, target = ground_truth['numbers'], ground_truth['target']
    if not is_numbers(numbers):
        raise ValueError(
            'ground_truth.numbers must be a non-empty list of non-negative integers, got '
            f'{repr(numbers)[:100]}'
        )
    if type(target) not in (int, float) or not abs(target) < 10**MAX_DIGITS:
        raise ValueError(
            f'ground_truth.target must be a number of at most {MAX_DIGITS} digits, got {repr(target)[:100]}'
        )
    for field in ('last_block', 'thinking'):
        if not isinstance(ground_truth.get(field, False), bool):
            raise ValueError(
                f'ground_truth.{field} must be true or false, got {repr(ground_truth[field])[:100]}'
            )
