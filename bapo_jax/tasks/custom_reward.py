"""Rewards by a user's function, task.reward='module:function', found and checked before a run starts.

    def reward(data_source, response, ground_truth, extra): ...

`data_source` is the task's name, `response` the text without special tokens, `ground_truth` what the task's module makes of the row
(a dict). `extra` is {'prompt_id', 'tokens': how many, 'finish': 'stop' or 'length'}.

A function with verl's names of arguments runs as it does there, called by keyword. It may have them in any order, and leave out
all but `solution_str`; its other arguments keep their defaults:

    def compute_score(data_source, solution_str, ground_truth, extra_info): ...

`data_source` and `extra_info` are the row's, `ground_truth` is the answer as the row has it, a text where that is a text. Where
the row has none of them they are the task's name, {} and the accepted answer or list of answers. To `extra_info` come the three of
`extra`, under names that the row does not use.

The function runs in task.reward_workers processes beside the trainer's, each with one response at a time. They have the trainer's
environment, current directory and sys.path. The arguments cross as JSON, so tuples arrive as lists. What the function keeps in its
module it sees of its own process alone, and loses where that process is replaced. Its prints go to standard error. It may fork and
start threads; what it leaves behind ends with its process.

A response has task.reward_deadline_s seconds of wall clock, and all responses of a step have task.verify_s. A response that takes
longer, or whose process ends, is tried once more. Where the function fails, or time is over, the verdict is INFRA_ERROR, which is no
reward: the group is discarded. More than a fifth of a step's responses without a verdict end the run.

It returns the reward, a finite number, or {'score': reward, 'correct': True or False, 'pred': text}, the last two optional. The
verdict is CORRECT where 'correct' is true; without 'correct', where 'acc' equals 1, which is verl's name; without both, where the
reward equals 1. Otherwise it is WRONG. A plain 0.5 is thus partial credit for a wrong answer. The two numbers serve different ends:

    k, the correct answers of G    drives filters, X2, X3, thresholds and accuracy
    the reward, a float            drives advantages
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from bapo_jax import events
from bapo_jax.groups import Verdict
from bapo_jax.tasks.own_module import import_own
from bapo_jax.tasks.verifier_pool import FAILED, VerifierPool

Outcome = tuple[Verdict, float, str | None]  # the verdict, the reward, and the answer if the function names one
# Judges many responses, rows of a reward function's arguments, in so many seconds for all of them.
Rewards = Callable[[Sequence[tuple[str, str, Any, dict[str, Any]]], float], list[Outcome]]

_LARGEST = float(np.finfo(np.float32).max)  # groups keep rewards in float32


_VERLS = ('data_source', 'solution_str', 'ground_truth', 'extra_info')  # verl's names, in its order
_PLACES = {'data_source': 0, 'response': 1, 'solution_str': 1, 'ground_truth': 2, 'extra': 3, 'extra_info': 3}


class BadReward(ValueError):
    """A reward function returned something that is no reward."""


def find_reward(name: str) -> Callable | None:
    """The function called 'module:function', None for ''. Raises ValueError where it is missing or takes other arguments."""
    if not name:
        return None
    module_name, colon, function_name = name.partition(':')
    if not (module_name and colon and function_name):
        raise ValueError(f"task.reward={name!r}; expected 'module:function', such as my_rewards:exact")
    module = import_own(module_name, f'task.reward={name!r}')
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ValueError(f'task.reward={name!r}: {module_name} has no function {function_name}; add it, or name another')
    try:
        signature = inspect.signature(function)
    except ValueError:  # a compiled function may have no signature to read
        return function
    if inspect.iscoroutinefunction(function):
        raise ValueError(f'task.reward={name!r} is async; give a function that returns its reward, such as one with asyncio.run')
    if not _by_keyword(function):
        try:
            places = signature.bind(*range(4)).arguments
            for argument, place in places.items():
                if isinstance(place, int) and _PLACES.get(argument, place) != place:  # *arguments hold a tuple
                    raise TypeError(f'{argument} stands in another place')
        except TypeError as error:
            raise ValueError(
                f'task.reward={name!r} must take (data_source, response, ground_truth, extra), or of verl\'s '
                f'{", ".join(_VERLS)} by name at least solution_str, but {error}; it is defined with {signature}'
            ) from error
    return function


def rewards_of(task: ConfigDict) -> Rewards | None:
    """What judges by task.reward, in processes that start with the first responses; None where the task's verifier judges.

    Raises ValueError as `find_reward` does.
    """
    if find_reward(task.reward) is None:
        return None
    workers = task.reward_workers or len(os.sched_getaffinity(0))
    return functools.partial(_judge, task.reward, _pool(task.reward, workers, task.reward_deadline_s))


@functools.cache
def _pool(name: str, workers: int, deadline_s: float) -> VerifierPool:
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)  # a user's module is found as the trainer found it
    environment = {**os.environ, 'PYTHONPATH': path}
    return VerifierPool('bapo_jax.tasks.reward_worker', name, workers=workers, wall_s=deadline_s, environment=environment)


def _judge(name: str, pool: VerifierPool, rows: Sequence[tuple], budget_s: float) -> list[Outcome]:
    """The pool's outcomes. INFRA_ERROR and nan where the function failed; an event has the last failure's traceback.

    Raises BadReward where the function returned anything but a reward: a run cannot go on with that.
    """
    outcomes, raised = [], []
    for answer in pool.run(rows, budget_s):
        if answer == FAILED or 'raised' in answer:
            outcomes.append((Verdict.INFRA_ERROR, float('nan'), None))
            raised += [] if answer == FAILED else [answer['raised']]
        elif 'bad' in answer:
            raise BadReward(answer['bad'])
        else:
            outcomes.append((Verdict(answer['verdict']), answer['reward'], answer['answer']))
    if raised:
        message = f'the reward function {name} failed on {len(raised)} of {len(rows)} responses; the last time:\n{raised[-1]}'
        events.report('reward failed', message, failed=len(raised), responses=len(rows))
    return outcomes


def judge_one(function: Callable, data_source: str, response: str, ground_truth: Any, extra: dict[str, Any]) -> Outcome:
    """The verdict, the reward and the answer (the text under 'pred', if any) of a reward function on one response.

    Raises BadReward where the function returns anything but a reward, and what the function raises.
    """
    if names := _by_keyword(function):
        arguments = _as_verl(data_source, response, ground_truth, extra)
        outcome = function(**{name: arguments[name] for name in names})
    else:
        outcome = function(data_source, response, ground_truth, extra)
    fields = outcome if isinstance(outcome, dict) else {'score': outcome}
    reward = _finite(fields.get('score'))
    correct = fields.get('correct', _finite(fields.get('acc', reward)) == 1)
    if reward is None or not isinstance(correct, (bool, np.bool_)):
        raise BadReward(
            f'the reward function {_name(function)} (task.reward) returned {str(outcome)[:100]!r}; expected a finite number, or a '
            "dict with one as 'score' and, where it judges itself, 'correct': True or False (or verl's 'acc'); without it a score of 1 "
            'is correct'
        )
    answer = fields.get('pred')
    return (Verdict.CORRECT if correct else Verdict.WRONG), reward, answer if isinstance(answer, str) else None


@functools.cache
def _by_keyword(function: Callable) -> tuple[str, ...]:
    """Those of verl's arguments that a function takes by their names; none where it is to be called by position."""
    try:
        signature = inspect.signature(function)
        takes_all = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
        names = tuple(name for name in _VERLS if takes_all or name in signature.parameters)
        signature.bind(**dict.fromkeys(names))
    except (TypeError, ValueError):  # it takes others, or is compiled and has no signature
        return ()
    return names if 'solution_str' in names else ()


def _as_verl(data_source: str, response: str, ground_truth: Any, extra: dict[str, Any]) -> dict[str, Any]:
    """The arguments that verl would pass of the same row: what the task kept of it, or, of other rows, the accepted answers."""
    truth = ground_truth if isinstance(ground_truth, dict) else {}
    row = {**truth, **truth.get('row', {})}  # mathematics keeps the row's own there; of `questions` the ground truth is the row
    if isinstance(model := row.get('reward_model'), dict) and 'ground_truth' in model:
        accepted = model['ground_truth']
    elif 'ground_truth' in row:
        accepted = row['ground_truth']
    elif 'answers' in row:
        accepted = row['answers'][0] if len(row['answers']) == 1 else row['answers']
    else:
        accepted = row.get('answer', ground_truth)
    return {
        'data_source': row.get('data_source') or data_source, 'solution_str': response, 'ground_truth': accepted,
        'extra_info': {**extra, **(row.get('extra_info') or {})},
    }  # fmt: skip


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
