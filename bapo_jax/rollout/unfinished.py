"""Partial rollouts (Kimi k1.5, arXiv 2501.12599): a later step continues what a budget of tokens cuts.

The policy of that step adds to them, so a response has tokens of several policies, each with its own
log-probs and version. A group is judged and trained on once all of its responses have finished.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any, NamedTuple

from bapo_jax.groups import UNFINISHED, Begun, Group, Prompt, Response
from bapo_jax.rollout.engine import Draw, Engine, Sampling


class Unfinished(NamedTuple):
    """A group of which some responses are to be continued."""

    prompt: Prompt
    responses: tuple[Response, ...]

    def rest(self) -> list[int]:
        """The indices of the responses to be continued."""
        return [j for j, response in enumerate(self.responses) if is_unfinished(response)]


def is_unfinished(response: Response) -> bool:
    return response.finish == UNFINISHED


def budget_of(rollout: Any) -> int:
    """The most tokens that a response gets in a step, from a config's rollout section; 0: up to the limit."""
    share = rollout.step_share
    return 0 if share == 1 else math.ceil(share * rollout.max_response_tokens)


def first_of(finished: Sequence[Group], most: int) -> tuple[list[Group], list[Group]]:
    """Divides groups, oldest first, into at most `most` for a step, each prompt once, and the rest."""
    taken: dict[int, Group] = {}
    rest = []
    for group in finished:
        if group.prompt.id in taken or len(taken) == most:
            rest.append(group)
        else:
            taken[group.prompt.id] = group
    return list(taken.values()), rest


def check_room(groups: Iterable[Unfinished], limit: int) -> None:
    """Raises ValueError if a response to be continued has `limit` tokens already: the limit was lowered."""
    longest = max((len(g.responses[j].tokens) for g in groups for j in g.rest()), default=0)
    if longest >= limit:
        raise ValueError(
            f'rollout.max_response_tokens={limit} leaves no token to a saved response of {longest} tokens '
            f'that is to be continued; set it to at least {longest + 1}'
        )


def ask_rest(
    engine: Engine, groups: Sequence[Unfinished], most: int, sampling: Sampling, draw: Draw
) -> list[Future[tuple[Response, ...]]]:
    """Asks the engine to continue the groups; returns a future for all responses of each, in order.

    `most` is the most tokens to add to a response, 0 for no budget; `draw` is that of the fresh groups.
    Groups of one prompt get draws of their own, since the keys of a draw tell prompts apart, but not groups.
    """
    places = [(i, j) for i, group in enumerate(groups) for j in group.rest()]
    begun = [Begun(groups[i].prompt, groups[i].responses[j].spans, j, most) for i, j in places]
    ids = [group.prompt.id for group in groups]
    draws = [draw.again(1, ids[:i].count(ids[i])) for i, _ in places]
    parts: list[dict[int, Future]] = [{} for _ in groups]
    for (i, j), future in zip(places, engine.ask(begun, 1, sampling, draws), strict=True):
        parts[i][j] = future
    return [_whole(group, of_group) for group, of_group in zip(groups, parts, strict=True)]


def _whole(group: Unfinished, parts: dict[int, Future]) -> Future[tuple[Response, ...]]:
    """A future for the group's responses, with those that `parts` give in their places."""
    whole: Future = Future()
    lock, to_come = threading.Lock(), set(parts)  # parts may end in several threads, or have ended already

    def look(j: int) -> None:
        """Ends `whole` with the last part to end, unless it was cancelled."""
        with lock:
            to_come.discard(j)
            last = not to_come
        if not last or not whole.set_running_or_notify_cancel():
            return
        failed = next((part for part in parts.values() if part.cancelled() or part.exception()), None)
        if failed is None:
            new = {j: part.result()[0] for j, part in parts.items()}
            whole.set_result(tuple(new.get(j, old) for j, old in enumerate(group.responses)))
        elif failed.cancelled():
            whole.set_exception(CancelledError())
        else:
            whole.set_exception(failed.exception())

    def give_up(_: Future) -> None:
        for part in parts.values():
            part.cancel()

    whole.add_done_callback(give_up)
    for j, part in parts.items():
        part.add_done_callback(lambda _, j=j: look(j))
    return whole
