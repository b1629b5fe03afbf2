"""Lines 6-7 of Algorithm 1: samples responses, judges them and forms groups."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, NamedTuple

import numpy as np

from bapo_jax.groups import Author, Group, Prompt, Response, Verdict, binary_rewards
from bapo_jax.machine import events
from bapo_jax.rollout.engine import Draw, Engine, RolloutError, Sampling
from bapo_jax.rollout.unfinished import Unfinished, is_unfinished
from bapo_jax.rollout.vllm.replies import BadResponse
from bapo_jax.tasks import get_task
from bapo_jax.tasks.custom_reward import Rewards


class TooFewJudged(RolloutError):
    """More than a fifth of a step's responses have no verdict, so the rest would be a biased sample."""


class Collected(NamedTuple):
    """Groups, and the seconds spent waiting for responses and judging them; they sum to the total time."""

    groups: list[Group]
    generate_s: float
    verify_s: float
    unfinished: list[Unfinished] = []  # the other groups, which are to be continued and judged later


def collect(
    engine: Engine, tokenizer: Any, prompts: Sequence[Prompt], group_size: int, sampling: Sampling,
    draws: Sequence[Draw], rewards: Rewards | None,
) -> list[Group]:  # fmt: skip
    """Samples `group_size` responses to each prompt from the engine's policy and judges them.

    A group's step is its draw's. Raises the engine's error if any group failed, also for bad responses.
    """
    return judge(tokenizer, prompts, engine.generate(prompts, group_size, sampling, draws), draws, rewards)


def judge_as_they_come(
    answers: Sequence[Future[tuple[Response, ...]]], tokenizer: Any, prompts: Sequence[Prompt],
    draws: Sequence[Draw], rewards: Rewards | None, budget_s: float = math.inf,
) -> Collected:  # fmt: skip
    """Judges each prompt's responses as they arrive; the groups are in the order of the prompts.

    Groups with unfinished responses are not judged. `budget_s` is the total time for judging. A group for
    which the engine got only bad responses is left without any, and an event says why. If a group ends with
    another error, cancels the others and raises it.
    """
    started, verify_s, groups, unfinished = time.perf_counter(), 0.0, {}, {}
    to_come = {answer: i for i, answer in enumerate(answers)}
    try:
        while to_come:
            here = sorted(to_come.pop(answer) for answer in wait(to_come, return_when=FIRST_COMPLETED).done)
            judging = time.perf_counter()
            responses = {i: _responses(answers[i], prompts[i]) for i in here}
            cut = [i for i in here if any(map(is_unfinished, responses[i]))]
            unfinished |= {i: Unfinished(prompts[i], responses[i]) for i in cut}
            here = [i for i in here if i not in cut]
            of_here = ([of[i] for i in here] for of in (prompts, responses, draws))
            groups |= dict(zip(here, judge(tokenizer, *of_here, rewards, budget_s - verify_s), strict=True))
            verify_s += time.perf_counter() - judging
    finally:
        for answer in to_come:
            answer.cancel()
    return Collected(
        [groups[i] for i in sorted(groups)], time.perf_counter() - started - verify_s, verify_s,
        [unfinished[i] for i in sorted(unfinished)],
    )  # fmt: skip


def _responses(answer: Future[tuple[Response, ...]], prompt: Prompt) -> tuple[Response, ...]:
    """A group's responses; () if the engine gave the group up as bad."""
    try:
        return answer.result()
    except BadResponse as error:
        events.report('group lost', f'prompt {prompt.id} has no responses: {error}', prompt=prompt.id)
        return ()


def check_judged(groups: Sequence[Group], group_size: int, unfinished: int = 0) -> None:
    """Raises TooFewJudged if more than a fifth of the requested responses have no verdict.

    Those of `unfinished` more groups get theirs later.
    """
    lost, asked = sum(not g.responses for g in groups), (len(groups) + unfinished) * group_size
    failed = sum(v == Verdict.INFRA_ERROR for g in groups for v in g.verdicts)
    missing = lost * group_size + failed
    if 5 * missing > asked:
        raise TooFewJudged(
            f'{missing} of {asked} responses of step {groups[0].step} have no verdict (more than a fifth): '
            f'the engine or a tool gave up {lost} groups of {group_size}, and the verifier or the reward '
            f'function failed on {failed} responses. See events.jsonl for the reasons. If judging is slow, '
            'raise task.judging.step_s, task.judging.reward_s or task.judging.workers; if servers give bad '
            'responses, see docs/vllm.md'
        )


def judge(
    tokenizer: Any, prompts: Sequence[Prompt], responses: Sequence[tuple[Response, ...]],
    draws: Sequence[Draw], rewards: Rewards | None, budget_s: float = math.inf,
) -> list[Group]:  # fmt: skip
    """Judges the responses to each prompt, by what the environment did not write. One task has all prompts.

    `rewards` (tasks/custom_reward.py) gets verdict and reward from the user's function. If it is None, the
    task's verifier gives the verdict, and the reward is the paper's binary one. Responses not judged after
    `budget_s` seconds are INFRA_ERROR.
    """
    pairs = [(p, r) for p, group in zip(prompts, responses, strict=True) for r in group]
    texts = judged_texts(tokenizer, [r for _, r in pairs])
    if not pairs:
        verdicts, earned, extracted = (), np.empty(0, np.float32), ()
    elif rewards is None:
        task = get_task(prompts[0].task)
        verdicts, extracted = zip(
            *task.verify_all(texts, [p.ground_truth for p, _ in pairs], budget_s), strict=True
        )
        earned = binary_rewards(verdicts)
    else:
        extras = [{'prompt_id': p.id, 'tokens': len(r.tokens), 'finish': r.finish} for p, r in pairs]
        rows = [
            (p.task, text, p.ground_truth, extra)
            for text, (p, _), extra in zip(texts, pairs, extras, strict=True)
        ]
        verdicts, earned, extracted = zip(*rewards(rows, budget_s), strict=True)
        earned = np.array(earned, np.float32)
    groups, first = [], 0
    for prompt, group, draw in zip(prompts, responses, draws, strict=True):
        rows = slice(first, first := first + len(group))
        groups.append(
            Group(prompt, group, tuple(verdicts[rows]), earned[rows], draw.step, tuple(extracted[rows]))
        )
    return groups


def judged_texts(tokenizer: Any, responses: Sequence[Response]) -> list[str]:
    """The texts by which responses are judged: the environment's tokens are left out, as lines that break.

    So a tool's output is no answer, and the policy's words around it are not joined. If the environment
    opened the policy's next turn with <think>, the <think> is kept: the answer follows its end.
    """
    parts, first = [part for r in responses for part in _by_environment(r)], 0
    decoded = (
        tokenizer.batch_decode([tokens for tokens, _ in parts], skip_special_tokens=True) if parts else []
    )
    texts = []
    for response in responses:
        own = slice(first, first := first + len(_by_environment(response)))
        texts.append(
            '\n'.join(
                text if not replied else '<think>' * text.rstrip().endswith('<think>')
                for text, (_, replied) in zip(decoded[own], parts[own], strict=True)
            )
        )
    return texts


def _by_environment(response: Response) -> list[tuple[np.ndarray, bool]]:
    """A response's tokens in parts, and whether the environment wrote each."""
    spans = itertools.groupby(response.spans, key=lambda span: span.author == Author.ENVIRONMENT)
    return [(np.concatenate([span.tokens for span in part]), replied) for replied, part in spans]
