"""Rollouts ahead of time: between two syncs α stays what it is, so later steps' prompts can be answered while a step trains.

With T seconds to train and G to generate, a step then costs max(T + G/v, G + T/v) on average instead of T + G: the first generation
after a sync has nothing to hide behind. What is asked, in which order, and what the selector knows when it is asked are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from bapo_jax.groups import Group, Prompt
from bapo_jax.prompts.selector import PromptSelector
from bapo_jax.rollout.collect import Collected


class Answered(NamedTuple):
    """A step's fresh groups, the groups of the hard prompts that went out with them, and where the prompt stream then stood."""

    fresh: list[Group]
    reevaluated: list[Group]
    generate_s: float
    verify_s: float
    selector: str  # state after these groups were observed: a run that stops after this step goes on from here


class Rollouts:
    """Asks one step after the other in a thread of its own. Before another policy is loaded, take whatever was begun."""

    def __init__(self, selector: PromptSelector, ask: Callable[[int, list[Prompt], Sequence[Prompt]], Collected]):
        """`ask(step, fresh prompts, hard prompts)` returns their groups in that order."""
        self._selector, self._ask = selector, ask
        self._thread = ThreadPoolExecutor(1, thread_name_prefix='rollouts')
        self._begun: dict[int, Future[Answered]] = {}

    def begin(self, step: int, hard: Sequence[Prompt] = ()) -> None:
        """Asks the fresh prompts of `step`, and `hard` with them, once the steps begun before are answered."""
        if step not in self._begun:
            self._begun[step] = self._thread.submit(self._answer, step, hard)
        elif hard:
            raise RuntimeError(f'step {step} was begun without its hard prompts')

    def take(self, step: int, hard: Sequence[Prompt] = ()) -> Answered:
        """Waits for the groups of `step`, begun now if it was not. Raises what the engine raised."""
        self.begin(step, hard)
        return self._begun.pop(step).result()

    def close(self) -> None:
        """Drops what nobody will take; what is under way ends first, by the engine's deadline at the latest."""
        self._thread.shutdown(cancel_futures=True)

    def _answer(self, step: int, hard: Sequence[Prompt]) -> Answered:
        prompts = self._selector.next()
        groups, generate_s, verify_s = self._ask(step, prompts, hard)
        fresh, reevaluated = groups[: len(prompts)], groups[len(prompts) :]
        self._selector.observe(fresh)
        return Answered(fresh, reevaluated, generate_s, verify_s, self._selector.state())
