"""Lines 6-7 of Algorithm 1: responses from whoever answers, judged, as groups."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from bapo_jax.groups import Group, Prompt, Verdict
from bapo_jax.rollout.engine import Draw, Engine, Sampling
from bapo_jax.tasks import get_task


class Collected(NamedTuple):
    groups: list[Group]
    generate_s: float
    verify_s: float


def collect(
    engine: Engine, tokenizer: Any, prompts: Sequence[Prompt], group_size: int, sampling: Sampling, draws: Sequence[Draw]
) -> Collected:
    """`group_size` judged responses to each prompt, from the policy the engine holds, stamped with the step of its draw."""
    started = time.perf_counter()
    answers = engine.generate(prompts, group_size, sampling, draws) if prompts else []
    generated = time.perf_counter()
    texts = iter(tokenizer.batch_decode([r.tokens for responses in answers for r in responses], skip_special_tokens=True))
    groups = []
    for prompt, responses, draw in zip(prompts, answers, draws, strict=True):
        verdicts = tuple(_verdict(prompt, next(texts)) for _ in responses)
        groups.append(Group(prompt, responses, verdicts, draw.step))
    return Collected(groups, generated - started, time.perf_counter() - generated)


def _verdict(prompt: Prompt, text: str) -> Verdict:
    return get_task(prompt.task).verify(text, prompt.ground_truth)[0]
