"""Which files of replay/ build a row's batch."""

from __future__ import annotations

from typing import Any

from bapo_jax.replay.bapo import Bapo
from bapo_jax.replay.continuations import Continuations, Solve
from bapo_jax.replay.posterior import Posterior
from bapo_jax.replay.repo import Repo
from bapo_jax.replay.retries import Retries, Uniform

KINDS = ('bapo', 'repo')
REEVALUATE = ('uniform', 'posterior', 'continue')
GIVEN_BY = ('policy', 'solver')


def make_replay(config: Any, batch_groups: int, reevaluation_due: Any, retries: Retries | None = None) -> Bapo | Repo:
    """The replay that `config.kind` names. `config` is `replay` of a resolved config; bapo.py explains the others."""
    if config.kind == 'repo':
        return Repo(config, batch_groups)
    return Bapo(config, batch_groups, reevaluation_due, retries)


def make_retries(config: Any, prompts: int, solve: Solve | None) -> Retries:
    """What `config.replay.reevaluate` names. `config` is resolved; so many `prompts` are trained on; `solve` writes right responses."""
    p, most = config.replay, config.replay.max_reevaluate
    if p.reevaluate == 'posterior':
        after = p.reevaluate_after or max(1, prompts // config.learner.batch_groups)
        return Posterior(most, config.rollout.group_size, after, p.pool_within)
    if p.reevaluate == 'continue':
        return Continuations(most, config.rollout.max_response_tokens, solve)
    return Uniform(most)
