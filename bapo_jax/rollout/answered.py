"""What a step asks for, what comes back, and what is not yet trained on."""

from __future__ import annotations

from concurrent.futures import Future
from typing import NamedTuple

from bapo_jax.groups import Group, Prompt, Response
from bapo_jax.rollout.engine import Draw
from bapo_jax.rollout.unfinished import Unfinished


class Wave(NamedTuple):
    """A wave of groups sent to the engine: continued, fresh, then hard ones."""

    prompts: list[Prompt]
    hard: int  # the number of hard ones
    draws: list[Draw]
    answers: list[Future[tuple[Response, ...]]]
    selector: str  # its state after choosing the fresh prompts


class Answered(NamedTuple):
    """A step's fresh groups, the groups of its hard prompts from the same wave, and the selector's state."""

    fresh: list[Group]
    reevaluated: list[Group]
    generate_s: float
    verify_s: float
    measures: dict[str, float]  # the selector's metrics
    selector: str  # its state after observing these groups; a run stopped after this step resumes from it
    unfinished: list[Unfinished] = []  # groups to be continued in a later step


class Pending(NamedTuple):
    """What was sampled and is not yet trained on."""

    ahead: dict[int, Answered] = {}  # steps that were requested ahead of their turn
    unfinished: list[Unfinished] = []
    ready: list[Group] = []  # finished groups of earlier steps, oldest first
