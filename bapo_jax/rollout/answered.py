"""What a step asks for and of which policies, what comes back, and what is not yet trained on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

import numpy as np

from bapo_jax.groups import Batch, Group, Prompt, Response
from bapo_jax.rollout.engine import Draw
from bapo_jax.rollout.unfinished import Unfinished


class Policies(Protocol):
    """The policies of a run: θ after `step` steps, and α."""

    step: int
    theta: Any  # its `params` are those of π_θ
    alpha: Any
    alpha_version: int
    recent: list[tuple[int, Any]]  # (version, parameters) of rollout policies before α, newest first
    before: Any  # α before the last sync, until the servers have answered the probe; else None
    synced_after: int  # the step after which α last became π_θ

    def sync(self) -> None:
        """Sets α to π_θ."""

    def policies(self) -> Mapping[str, Any]:
        """Parameters by role."""


# Takes (parameters by role, a batch). Yields the log-probs of all response tokens as sampled, under α, and
# under the previous α if there is one; float32 [tokens] each, in the same order.
LogProbs = Callable[[Mapping[str, Any], Batch], Iterable[np.ndarray]]


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
