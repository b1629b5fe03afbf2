"""Rewards from a user's function, task.reward='module:function', which is checked before a run starts.

    def reward(data_source, response, ground_truth, extra): ...

`data_source` is the task's name, `response` the text without special tokens, and `ground_truth` the dict that
the task's module makes from the row. `extra` is {'prompt_id', 'tokens': count, 'finish': 'stop' or 'length'}.

A function with verl's argument names is called by keyword, as in verl. It may have them in any order and omit
all but `solution_str`; its other arguments keep their defaults:

    def compute_score(data_source, solution_str, ground_truth, extra_info): ...

`data_source` and `extra_info` come from the row, and `ground_truth` is the answer as in the row: text stays
text. If the row lacks them, they are the task's name, {} and the accepted answer or list of answers.
`extra_info` also gets the three entries of `extra`, unless the row uses the same name.

The function runs in task.judging.workers processes beside the trainer, each with one response at a time. They
have the trainer's environment, current directory and sys.path. The arguments are passed as JSON, so tuples
arrive as lists. State in the function's module is local to its process, and is lost if that process is
replaced. Prints go to stderr. The function may fork and start threads; whatever it leaves behind ends with
its process.

A response has task.judging.reward_s seconds of wall clock, and all responses of a step have
task.judging.step_s. A response that takes longer, or whose process ends, is retried once. If the function
fails, or the time is over, the verdict is INFRA_ERROR, which is no reward: the group is discarded. The run
ends if more than a fifth of a step's responses have no verdict.

The function returns the reward, a finite number, or {'score': reward, 'correct': True or False, 'pred':
text}; the last two are optional. The verdict is CORRECT if 'correct' is true; without 'correct', if 'acc',
verl's name, equals 1; without both, if the reward equals 1. Otherwise it is WRONG. A plain 0.5 is thus
partial credit for a wrong answer. The two numbers serve different purposes:

    k, the number of correct answers among G    drives filters, X2, X3, thresholds and accuracy
    the reward, a float                         drives advantages
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

from bapo_jax.groups import Verdict
from bapo_jax.machine import events
from bapo_jax.machine.ending import CONTINUES, Ending
from bapo_jax.own.module import find_own
from bapo_jax.tasks.verifier_pool import MACHINE_FAILED, VerifierPool

Outcome = tuple[Verdict, float, str | None]  # verdict, reward, and the answer if the function returns one
# Judges many responses, given as rows of a reward function's arguments and the total time in seconds.
Rewards = Callable[[Sequence[tuple[str, str, Any, dict[str, Any]]], float], list[Outcome]]

_LARGEST = float(np.finfo(np.float32).max)  # groups store rewards as float32


_VERLS = ('data_source', 'solution_str', 'ground_truth', 'extra_info')  # verl's names, in its order
_PLACES = {'data_source': 0, 'response': 1, 'solution_str': 1, 'ground_truth': 2, 'extra': 3, 'extra_info': 3}


class BadReward(Ending, ValueError):
    """A reward function returned something that is not a reward."""

    remedy = CONTINUES


def find_reward(name: str) -> Callable | None:
    """Returns the function named 'module:function', or None for ''.

    Raises ValueError if it is missing or takes other arguments.
    """
    if not name:
        return None
    function = find_own(name, 'task.reward', 'my_rewards:exact')
    try:
        signature = inspect.signature(function)
    except ValueError:  # a compiled function may have no readable signature
        return function
    if inspect.iscoroutinefunction(function):
        raise ValueError(
            f'task.reward={name!r} is an async function; wrap it in one that returns the reward, '
            'for example with asyncio.run'
        )
    if not _by_keyword(function):
        try:
            places = signature.bind(*range(4)).arguments
            for argument, place in places.items():
                if isinstance(place, int) and _PLACES.get(argument, place) != place:  # *args is a tuple
                    raise TypeError(f'{argument} is in another position')
        except TypeError as error:
            raise ValueError(
                f'task.reward={name!r} must take four arguments (data_source, response, ground_truth, '
                'extra), or by name some '
                f"of verl's {', '.join(_VERLS)}, including solution_str. It is defined with {signature} "
                f'({error})'
            ) from error
    return function


def rewards_of(task: ConfigDict) -> Rewards | None:
    """Returns the judge by task.reward, or None if the task's verifier judges.

    Its processes start with the first responses. Raises ValueError as `find_reward` does.
    """
    if find_reward(task.reward) is None:
        return None
    workers = task.judging.workers or len(os.sched_getaffinity(0))
    return functools.partial(_judge, task.reward, _pool(task.reward, workers, task.judging.reward_s))


@functools.cache
def _pool(name: str, workers: int, deadline_s: float) -> VerifierPool:
    # With this path a user's module is found as the trainer found it.
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    environment = {**os.environ, 'PYTHONPATH': path}
    return VerifierPool(
        'bapo_jax.tasks.reward_worker', name, workers=workers, wall_s=deadline_s, environment=environment
    )


def _judge(name: str, pool: VerifierPool, rows: Sequence[tuple], budget_s: float) -> list[Outcome]:
    """Returns the pool's outcomes. Failures are INFRA_ERROR with nan; an event has the last one's traceback.

    Raises BadReward if the function returned anything but a reward: a run cannot go on with that.
    """
    outcomes, raised = [], []
    for answer in pool.run(rows, budget_s):
        if answer == MACHINE_FAILED or 'raised' in answer:
            outcomes.append((Verdict.INFRA_ERROR, float('nan'), None))
            raised += [] if answer == MACHINE_FAILED else [answer['raised']]
        elif 'bad' in answer:
            raise BadReward(answer['bad'])
        else:
            outcomes.append((Verdict(answer['verdict']), answer['reward'], answer['answer']))
    if raised:
        message = (
            f'the reward function {name} failed on {len(raised)} of {len(rows)} responses; '
            f'the last error:\n{raised[-1]}'
        )
        events.report('reward failed', message, failed=len(raised), responses=len(rows))
    return outcomes


def judge_one(
    function: Callable, data_source: str, response: str, ground_truth: Any, extra: dict[str, Any]
) -> Outcome:
    """Returns a reward function's verdict, reward and answer (the 'pred' text, if any) for one response.

    Raises BadReward if the function returns anything but a reward, and whatever the function raises.
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
            f'the reward function {_name(function)} (task.reward) returned {str(outcome)[:100]!r}; return a '
            'finite number, '
            "or a dict with a finite number as 'score' and optionally True or False as 'correct' (or verl's "
            "'acc'). Without "
            "'correct', a score of 1 counts as correct"
        )
    answer = fields.get('pred')
    return (
        (Verdict.CORRECT if correct else Verdict.WRONG),
        reward,
        answer if isinstance(answer, str) else None,
    )


@functools.cache
def _by_keyword(function: Callable) -> tuple[str, ...]:
    """Returns the verl arguments that a function takes by name; () if it must be called by position."""
    try:
        signature = inspect.signature(function)
        takes_all = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
        names = tuple(name for name in _VERLS if takes_all or name in signature.parameters)
        signature.bind(**dict.fromkeys(names))
    except (TypeError, ValueError):  # it takes other arguments, or is compiled and has no signature
        return ()
    return names if 'solution_str' in names else ()


def _as_verl(data_source: str, response: str, ground_truth: Any, extra: dict[str, Any]) -> dict[str, Any]:
    """Returns verl's arguments for this row; `ground_truth` falls back to the accepted answers."""
    truth = ground_truth if isinstance(ground_truth, dict) else {}
    # mathematics keeps the row's own columns under 'row'; in `questions` the ground truth is the row itself
    row = {**truth, **(told if isinstance(told := truth.get('row'), dict) else {})}
    if isinstance(model := row.get('reward_model'), dict) and 'ground_truth' in model:
        accepted = model['ground_truth']
    elif 'ground_truth' in row:
        accepted = row['ground_truth']
    elif 'answers' in row:
        accepted = row['answers'][0] if len(row['answers']) == 1 else row['answers']
    else:
        accepted = row.get('answer', ground_truth)
    return {
        'data_source': row.get('data_source') or data_source,
        'solution_str': response,
        'ground_truth': accepted,
        'extra_info': {**extra, **(row.get('extra_info') or {})},
    }


def _finite(score: Any) -> float | None:
    """Returns a number of any type as a float; None if it is not a finite number or too large for float32."""
    if isinstance(score, (str, bytes)):  # float() would parse them
        return None
    try:
        number = float(score)
    except Exception:  # converting a user's type can fail in any way
        return None
    return number if abs(number) <= _LARGEST else None  # the comparison is false for nan


def _name(function: Callable) -> str:
    return f'{function.__module__}:{getattr(function, "__qualname__", function)}'
