"""Countdown with a second try: the environment says that a turn's answer is wrong, and the policy answers again."""

from bapo_jax.groups import Verdict
from bapo_jax.tasks.countdown.task import *  # noqa: F403
from bapo_jax.tasks.countdown.task import verify

NO = ' no '


def reply(ground_truth, turn):
    return None if verify(turn, ground_truth)[0] == Verdict.CORRECT else NO
