"""Tries the user's replay (own/method.py) on two small steps, before a run starts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from bapo_jax.groups import X1, Batch, Begun, Group, Prompt, Verdict, binary_rewards, lanes_of, sampled
from bapo_jax.own.method import BadMethod, blamed, load_own
from bapo_jax.replay import PURPOSES
from bapo_jax.replay.failures import LAGS, Failures
from bapo_jax.replay.protocol import Replay

_PARTS = ('buffer', *(name for name in vars(Replay) if not name.startswith('_')))


def try_own_replay(name: str, config: Any) -> None:
    """Lets the replay named 'module:function' compose two steps; its state is restored in between.

    `config` is resolved. Raises ValueError if the function is missing or takes other arguments. Raises
    BadMethod if it or its replay fails, or returns something else than it must.
    """
    make = load_own('replay.kind', name)
    with blamed('replay.kind', name):
        first, second = _made(name, make, config), _made(name, make, config)
        _one_step(name, first, 1, _examples(config, step=1))
        state, others = first.state(), _others()
        if not state or not all(map(_can_be_saved, state.values())):
            raise BadMethod(
                f'state() of replay.kind={name!r} must return a dict of one array or more, of numbers or '
                'booleans and none empty: a checkpoint holds no others'
            )
        if taken := state.keys() & others.keys():
            raise BadMethod(
                f'state() of replay.kind={name!r} has an array {min(taken)!r}, but the checkpoint has one of '
                'this name for log.failed_again; rename it'
            )
        second.restore(state | others)
        again = second.state()
        if state.keys() != again.keys() or any(state[n].tobytes() != again[n].tobytes() for n in state):
            raise BadMethod(
                f'replay.kind={name!r} does not restore what it saved; make restore() undo state(), and '
                f'ignore arrays of others, such as {min(others)!r}'
            )
        _one_step(name, second, 2, _examples(config, step=2))


def _others() -> dict[str, np.ndarray]:
    """Arrays that a checkpoint holds beside those of the replay (run/diagnostics.py)."""
    return Failures((), asked=len(LAGS), every=1).state()


def _can_be_saved(array: Any) -> bool:
    return isinstance(array, np.ndarray) and array.size > 0 and array.dtype.kind in 'biuf'


def _made(name: str, make: Any, config: Any) -> Replay:
    replay = make(config, lambda step: True)
    if missing := [part for part in _PARTS if not hasattr(replay, part)]:
        raise BadMethod(
            f'replay.kind={name!r} returned {type(replay).__name__} without {", ".join(missing)}; add what '
            'Replay of bapo_jax/replay/protocol.py has'
        )
    return replay


def _one_step(name: str, replay: Replay, step: int, fresh: list[Group]) -> None:
    """Goes through the calls of a training step, and checks what they return."""

    def rng(purpose: str) -> np.random.Generator:
        return np.random.default_rng([step, PURPOSES.index(purpose)])

    hard = replay.hard_prompts(step, rng)
    if not all(isinstance(begun, Begun) for begun in hard):
        raise BadMethod(
            f'hard_prompts() of replay.kind={name!r} must return a list of Begun (bapo_jax/groups.py)'
        )
    again = [group for group in fresh if group.prompt.id in {begun.prompt.id for begun in hard}]
    batch = replay.compose(step, fresh, again, rng, _scores)
    if wrong := _wrong(batch, fresh):
        raise BadMethod(
            f'compose() of replay.kind={name!r} returned {wrong}; return a Batch of whole groups, for '
            'example with make_batch(groups, origins) of bapo_jax.groups'
        )
    lanes_of(batch)  # raises if there are too many origins
    told = [replay.metrics(step)]  # a step reads them before and after `add`
    if len(replay.times_trained(batch)) != len(batch.groups):
        raise BadMethod(f'times_trained() of replay.kind={name!r} must return one number for each group')
    replay.add(step, fresh, batch)
    told.append(replay.metrics(step))
    if not all(isinstance(metrics, dict) for metrics in told):
        raise BadMethod(f'metrics() of replay.kind={name!r} must return a dict of numbers by name')


def _wrong(batch: Batch, fresh: Sequence[Group]) -> str:
    """Says what is wrong with a batch; '' if nothing is."""
    if not isinstance(batch, Batch):
        return f'{type(batch).__name__}, no Batch'
    if not len(batch.groups) == len(batch.origins) == len(batch.normalisation):
        return f'{len(batch.groups)} groups with {len(batch.origins)} origins'
    if any(len(n) != g.size for g, n in zip(batch.groups, batch.normalisation)):
        return 'a normalisation that does not have one number for each response'
    if batch.weights and not (
        len(batch.weights) == len(batch.groups) and all(0 < w < math.inf for w in batch.weights)
    ):
        return 'weights that are not a positive number for each group'
    if any(g.infra_error for g in batch.groups):
        return 'a group with an infrastructure error (group.infra_error), which has no rewards'
    if any(all(g is not f for f in fresh) for g in batch.of_origin(X1)):
        return f'groups of origin {X1!r} that are not fresh'
    return ''


def _scores(batch: Batch) -> list[list[np.ndarray]]:
    return [[np.zeros(len(r.tokens), np.float32) for r in g.responses] for g in batch.groups]


def _examples(config: Any, step: int) -> list[Group]:
    """A mixed group, one that is all wrong, one that is all right, and one that could not be judged."""
    size = config.rollout.group_size
    right, wrong, failed = Verdict.CORRECT, Verdict.WRONG, Verdict.INFRA_ERROR
    rows = [right] + (size - 1) * [wrong], size * [wrong], size * [right], [failed] + (size - 1) * [wrong]
    tokens, logp = np.array([1, 2], np.int32), np.array([-0.5, -0.5], np.float32)
    responses = tuple(sampled(tokens, logp, 'stop', step - 1) for _ in range(size))
    return [
        Group(
            Prompt(i, 'example', tokens, {}), responses, tuple(row), binary_rewards(row), step, (None,) * size
        )
        for i, row in enumerate(rows[: config.learner.batch_groups])
    ]
