"""Rewards by a user's function, task.reward='module:function', found and checked before a run starts.

    def reward(data_source, response, ground_truth, extra): ...

The signature is verl's. `data_source` is the task's name, `response` the text without special tokens, `ground_truth` what the
task's module makes of the row (a dict). `extra` is {'prompt_id', 'tokens': how many, 'finish': 'stop' or 'length'}. The function
runs in the trainer's process, one response after the other.

It returns the reward, a finite number, or {'score': reward, 'correct': True or False, 'pred': text}, the last two optional. The
verdict is CORRECT where 'correct' is true, or, without 'correct', where the reward equals 1; otherwise WRONG. A plain 0.5 is thus
partial credit for a wrong answer. The two numbers serve different ends:

    k, the correct answers of G    drives filters, X2, X3, thresholds and accuracy
    the reward, a float            drives advantages
"""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Callable
from typing import Any

import numpy as np

from bapo_jax.groups import Verdict

_log = logging.getLogger(__name__)

_LARGEST = float(np.finfo(np.float32).max)  # groups keep rewards in float32


class BadReward(ValueError):
    """A reward function returned something that is no reward."""


def find_reward(name: str) -> Callable | None:
    """The function called 'module:function', None for ''. Raises ValueError where it is missing or takes other arguments."""
    if not name:
        return None
    module_name, colon, function_name = name.partition(':')
    if not (module_name and colon and function_name):
        raise ValueError(f"task.reward={name!r}; expected 'module:function', such as my_rewards:exact")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a user's module can fail in any way while it is imported
        raise ValueError(
            f'task.reward={name!r}: importing {module_name} failed ({type(error).__name__}: {error}); its directory must be on '
            'PYTHONPATH, or the current one'
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ValueError(f'task.reward={name!r}: {module_name} has no function {function_name}')
    try:
        signature = inspect.signature(function)
    except ValueError:  # a compiled function may have no signature to read
        return function
    try:
        signature.bind('data_source', 'response', 'ground_truth', {})
    except TypeError as error:
        raise ValueError(
            f'task.reward={name!r} must take (data_source, response, ground_truth, extra), but {error}; '
            f'it is defined with {signature}'
        ) from error
    return function


def judge_one(
    function: Callable, data_source: str, response: str, ground_truth: Any, extra: dict[str, Any]
) -> tuple[Verdict, float, str | None]:
    """The verdict, the reward and the answer (the text under 'pred', if any) of a reward function on one response.

    Where the function raises, the verdict is INFRA_ERROR, the reward nan, and the traceback is logged: the failure is not the
    response's. Raises BadReward where the function returns anything but a reward; a run cannot go on with that.
    """
    try:
        outcome = function(data_source, response, ground_truth, extra)
    except Exception:  # whatever it is, it is the function's failure and not the response's
        _log.exception('the reward function %s failed on a response of %d characters', _name(function), len(response))
        return Verdict.INFRA_ERROR, float('nan'), None
    fields = outcome if isinstance(outcome, dict) else {'score': outcome}
    reward = _finite(fields.get('score'))
    correct = fields.get('correct', reward == 1)
    if reward is None or not isinstance(correct, (bool, np.bool_)):
        raise BadReward(
            f'the reward function {_name(function)} (task.reward) returned {str(outcome)[:100]!r}; expected a finite number, or a '
            "dict with one as 'score' and, where it judges itself, 'correct': True or False; without it a score of 1 is correct"
        )
    answer = fields.get('pred')
    return (Verdict.CORRECT if correct else Verdict.WRONG), reward, answer if isinstance(answer, str) else None


def _finite(score: Any) -> float | None:
    """A number of any type as a float; None where it is no number, not finite, or too large for float32."""
    if isinstance(score, (str, bytes)):  # float('1') would read them
        return None
    try:
        number = float(score)
    except Exception:  # a user's type can fail in any way when it is converted
        return None
    return number if abs(number) <= _LARGEST else None  # false for nan


def _name(function: Callable) -> str:
    return f'{function.__module__}:{getattr(function, "__qualname__", function)}'
