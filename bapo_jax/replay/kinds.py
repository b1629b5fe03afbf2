"""Which file of replay/ builds a row's batch."""

from __future__ import annotations

from typing import Any

from bapo_jax.replay.bapo import Bapo
from bapo_jax.replay.repo import Repo

KINDS = ('bapo', 'repo')


def make_replay(config: Any, batch_groups: int, reevaluation_due: Any) -> Bapo | Repo:
    """The replay that `config.kind` names. `config` is `replay` of a resolved config; bapo.py explains the others."""
    if config.kind == 'repo':
        return Repo(config, batch_groups)
    return Bapo(config, batch_groups, reevaluation_due)
