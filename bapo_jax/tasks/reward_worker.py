"""A process that runs a user's reward function: `custom_reward.rewards_of` starts it by way of verifier_pool.py."""

from __future__ import annotations

import functools
import sys
import traceback
from collections.abc import Callable
from typing import Any

from bapo_jax import output, terminal
from bapo_jax.tasks.custom_reward import BadReward, find_reward, judge_one
from bapo_jax.tasks.verifier_pool import serve

_MOST_SHOWN = 10_000  # characters of a traceback, its end; a message may hold any text


def _answer(function: Callable, row: list[Any]) -> dict[str, Any]:
    """What `judge_one` says of a row; or under 'bad' why it is no reward, or under 'raised' the traceback."""
    try:
        verdict, reward, answer = judge_one(function, *row)
        return {'verdict': verdict, 'reward': reward, 'answer': answer}
    except BadReward as error:
        return {'bad': str(error)}
    except (Exception, SystemExit):  # whatever it is, it is the function's failure and not the response's
        return {'raised': traceback.format_exc()[-_MOST_SHOWN:]}


if __name__ == '__main__':
    output.guard('stderr')  # what a user prints must not fail a reward where nobody reads the trainer's output any more
    terminal.guard()  # a function may print the response that it judges
    serve(functools.partial(_answer, find_reward(sys.argv[3])), quiet=False)
