"""Lines 6-7 of Algorithm 1: samples responses, judges them, and makes groups."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, NamedTuple

import numpy as np

from bapo_jax.groups import Group, Prompt, Response, binary_rewards
from bapo_jax.rollout.engine import Draw, Engine, Sampling
from bapo_jax.tasks import custom_reward, get_task


class Collected(NamedTuple):
    """Groups, and the seconds of waiting for responses and of judging them; the two add up to all the time it took."""

    groups: list[Group]
    generate_s: float
    verify_s: float


class Judged(NamedTuple):
    """Groups, and for each of them the answers that the verifier extracted, one a response (None where it found none)."""

    groups: list[Group]
    answers: list[tuple[str | None, ...]]


def collect(
    engine: Engine, tokenizer: Any, prompts: Sequence[Prompt], group_size: int, sampling: Sampling, draws: Sequence[Draw],
    reward: Callable | None,
) -> Collected:  # fmt: skip
    """Samples `group_size` responses to each prompt from the engine's policy and judges them. A group's step is its draw's."""
    return judge_as_they_come(engine.ask(prompts, group_size, sampling, draws), tokenizer, prompts, draws, reward)


def judge_as_they_come(
    answers: Sequence[Future[tuple[Response, ...]]], tokenizer: Any, prompts: Sequence[Prompt], draws: Sequence[Draw],
    reward: Callable | None,
) -> Collected:  # fmt: skip
    """Judges each prompt's responses once they are there, while others are still to come; the groups are in the prompts' order.

    Where one ends with an error, cancels the others and raises it.
    """
    started, verify_s, groups = time.perf_counter(), 0.0, {}
    to_come = {answer: i for i, answer in enumerate(answers)}
    try:
        while to_come:
            here = sorted(to_come.pop(answer) for answer in wait(to_come, return_when=FIRST_COMPLETED).done)
            judging = time.perf_counter()
            responses = [answers[i].result() for i in here]
            judged = judge(tokenizer, [prompts[i] for i in here], responses, [draws[i] for i in here], reward)
            groups |= dict(zip(here, judged.groups, strict=True))
            verify_s += time.perf_counter() - judging
    finally:
        for answer in to_come:
            answer.cancel()
    return Collected([groups[i] for i in range(len(answers))], time.perf_counter() - started - verify_s, verify_s)


def judge(
    tokenizer: Any, prompts: Sequence[Prompt], responses: Sequence[tuple[Response, ...]], draws: Sequence[Draw],
    reward: Callable | None,
) -> Judged:  # fmt: skip
    """Judges the responses to each prompt. All prompts are of one task.

    The user's `reward` (tasks/custom_reward.py) gives verdict and reward. Where it is None, the task's verifier gives the verdict,
    and the reward is the paper's binary one.
    """
    if not prompts:
        return Judged([], [])
    task, pairs = prompts[0].task, [(p, r) for p, group in zip(prompts, responses, strict=True) for r in group]
    texts = tokenizer.batch_decode([r.tokens for _, r in pairs], skip_special_tokens=True)
    if reward is None:
        verdicts, extracted = zip(*get_task(task).verify_all(texts, [p.ground_truth for p, _ in pairs]), strict=True)
        rewards = binary_rewards(verdicts)
    else:
        extras = [{'prompt_id': p.id, 'tokens': len(r.tokens), 'finish': r.finish} for p, r in pairs]
        rows = zip(texts, pairs, extras, strict=True)
        judged = [custom_reward.judge_one(reward, task, text, p.ground_truth, extra) for text, (p, _), extra in rows]
        verdicts, rewards, extracted = zip(*judged, strict=True)
        rewards = np.array(rewards, np.float32)
    groups, answers, first = [], [], 0
    for prompt, group, draw in zip(prompts, responses, draws, strict=True):
        rows = slice(first, first := first + len(group))
        groups.append(Group(prompt, group, tuple(verdicts[rows]), rewards[rows], draw.step))
        answers.append(tuple(extracted[rows]))
    return Judged(groups, answers)
