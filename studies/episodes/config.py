"""Countdown with a calculator, from a small policy that calls it: the arms of the study.

    python -m bapo_jax.train --config=studies/episodes/config.py:tool --workdir=runs/episodes/tool_0 --config.seed=0
    python -m bapo_jax.train --config=studies/episodes/config.py:alone --workdir=runs/episodes/alone_0 --config.seed=0

`tool` calls the calculator at most three times: problems of four numbers need three steps. `alone` is the control:
the same weights, questions and steps, but the end of a call is no stop token and nobody replies, so that the policy
writes the results itself.
"""

from pathlib import Path

from configs import quickstart

BASES = Path('runs/episodes')  # make.py writes them
TOKENS = 56


def get_config(arm: str = 'tool'):
    c = quickstart.get_config('bapo_guarded')
    c.model.path = str(BASES / f'base_{arm}')
    c.task.turns = {'tool': 3, 'alone': 0}[arm]
    c.rollout.max_response_tokens = c.learner.slot_tokens = TOKENS
    c.learner.row_tokens = 16 + 4 * TOKENS
    return c
