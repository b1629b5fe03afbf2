"""Process that runs a user's reward function. verifier_pool.py starts it for `custom_reward.rewards_of`."""

from __future__ import annotations

import functools
import sys
import traceback
from collections.abc import Callable
from typing import Any

from bapo_jax.machine import output, terminal
from bapo_jax.tasks.custom_reward import BadReward, find_reward, judge_one
from bapo_jax.tasks.worker_process import serve

_MOST_SHOWN = 10_000  # most characters of a traceback, from its end: a message may hold any text


def _answer(function: Callable, row: list[Any]) -> dict[str, Any]:
    """Returns `judge_one`'s result for a row, or {'bad': why it is no reward}, or {'raised': traceback}."""
    try:
        verdict, reward, answer = judge_one(function, *row)
        return {'verdict': verdict, 'reward': reward, 'answer': answer}
    except BadReward as error:
        return {'bad': str(error)}
    except (Exception, SystemExit):  # any error is the function's failure, not the response's
        return {'raised': traceback.format_exc()[-_MOST_SHOWN:]}


if __name__ == '__main__':
    # A user's prints must not fail a reward if nobody reads the trainer's output any more.
    output.guard_streams('stderr')
    terminal.guard()  # a function may print the response that it judges
    serve(functools.partial(_answer, find_reward(sys.argv[3])), quiet=False)
