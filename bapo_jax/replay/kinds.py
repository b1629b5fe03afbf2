"""Builds the replay and the retries that a config names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bapo_jax.own.method import is_own, load_own
from bapo_jax.replay.arpo import Arpo
from bapo_jax.replay.bapo import Bapo
from bapo_jax.replay.continuations import Continuations, Solve
from bapo_jax.replay.exgrpo import Exgrpo
from bapo_jax.replay.fifo import Fifo
from bapo_jax.replay.freshper import Freshper
from bapo_jax.replay.luffy import Luffy
from bapo_jax.replay.posterior import Posterior
from bapo_jax.replay.protocol import Replay
from bapo_jax.replay.relift import Relift
from bapo_jax.replay.repo import Repo
from bapo_jax.replay.retries import Delayed, Retries, Uniform
from bapo_jax.replay.rollout_replay import RolloutReplay

# Kinds whose replay takes the place of all of BAPO's parts: made of (the section `replay`, B).
OTHER_KINDS = {
    'repo': Repo,
    'arpo': Arpo,
    'fifo': Fifo,
    'freshper': Freshper,
    'exgrpo': Exgrpo,
    'rollout_replay': RolloutReplay,
    'luffy': Luffy,
    'relift': Relift,
}
# Those that `receive` traces; and those whose batches have tokens of traces.
TRACED = ('luffy', 'relift')
WITH_TRACES = (*TRACED, 'exgrpo')
KINDS = ('bapo', *OTHER_KINDS)
REEVALUATE = ('uniform', 'delayed', 'posterior', 'continue')
GIVEN_BY = ('policy', 'solver')


def make_replay(
    config: Any, prompts: int, reevaluation_due: Callable[[int], bool], solve: Solve | None
) -> Replay:
    """Returns the replay that `config.replay.kind` names, for a resolved config.

    `prompts` is the number of training prompts; `solve` writes correct responses. `reevaluation_due(step)` is
    the condition of line 12. The user's own kind 'module:function' gets the config and that condition.
    """
    if is_own(config.replay.kind):
        return load_own('replay.kind', config.replay.kind)(config, reevaluation_due)
    if config.replay.kind in OTHER_KINDS:
        return OTHER_KINDS[config.replay.kind](config.replay, config.learner.batch_groups)
    return Bapo(
        config.replay, config.learner.batch_groups, reevaluation_due, make_retries(config, prompts, solve)
    )


def make_retries(config: Any, prompts: int, solve: Solve | None) -> Retries:
    """Returns the retries that `config.replay.reevaluate` names; arguments are as in `make_replay`."""
    p, most = config.replay, config.replay.max_reevaluate
    if p.reevaluate == 'posterior':
        after = p.posterior.after or max(1, prompts // config.learner.batch_groups)
        return Posterior(most, config.rollout.group_size, after, p.posterior.pool_within)
    if p.reevaluate == 'continue':
        return Continuations(most, config.rollout.max_response_tokens, solve)
    if p.reevaluate == 'delayed':
        return Delayed(most, p.reevaluate_every)
    return Uniform(most)
