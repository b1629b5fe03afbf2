"""Converts configs of earlier versions, so that their runs continue and their policies stay usable."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

MOVED = {  # old name -> new name
    'prompts.candidates': 'prompts.mopps.candidates',
    'prompts.target': 'prompts.mopps.target',
    'prompts.decay': 'prompts.mopps.decay',
    'rollout.mixture': 'rollout.mixture.share',
    'rollout.mixture_policies': 'rollout.mixture.policies',
    'rollout.python': 'rollout.server.python',
    'rollout.server_memory': 'rollout.server.memory',
    'rollout.server_args': 'rollout.server.args',
    'replay.reevaluate_after': 'replay.posterior.after',
    'replay.pool_within': 'replay.posterior.pool_within',
    'replay.retrieve': 'replay.repo.retrieve',
    'replay.retrieve_normalisation': 'replay.repo.normalisation',
    'replay.per_prompt': 'replay.repo.per_prompt',
    'replay.probe': 'log.failed_again.prompts',
    'replay.probe_every': 'log.failed_again.every',
    'learner.schedule': 'learner.schedule.kind',
    'learner.warmup_updates': 'learner.schedule.warmup_updates',
    'learner.decay_updates': 'learner.schedule.decay_updates',
    'learner.adam_b1': 'learner.adam.b1',
    'learner.adam_b2': 'learner.adam.b2',
    'learner.adam_eps': 'learner.adam.eps',
    'learner.first_moment_dtype': 'learner.adam.first_moment_dtype',
    'rollouts.every': 'log.rollouts_every',
    'theory.every': 'log.theory_every',
    'debug.ledger': 'log.ledger',
    'task.verify_s': 'task.judging.step_s',
    'task.reward_deadline_s': 'task.judging.reward_s',
    'task.reward_workers': 'task.judging.workers',
}
# Fields that were merged into one: (old names, their values, new name, its value). Other combinations of
# values keep their old names, and so differ from every config of this version.
_MERGED = (
    ('learner.shuffle learner.partial_mini_batch', (True, 'rebalance'), 'learner.mini_batches', 'even'),
    ('learner.shuffle learner.partial_mini_batch', (False, 'keep'), 'learner.mini_batches', 'released'),
    ('rollout.sync_phase rollout.reevaluation_syncs', ('paper', False), 'rollout.sync_phase', 'paper'),
    ('rollout.sync_phase rollout.reevaluation_syncs', ('code', True), 'rollout.sync_phase', 'code'),
    ('replay.shared_pool replay.r_tot', (False, 'ema'), 'replay.shared_pool', False),
    ('replay.shared_pool replay.r_tot', (True, 'buffer'), 'replay.shared_pool', True),
)
_PAIRS = (
    ('model.least_pixels', 'model.most_pixels', 'model.pixels'),
    ('critic.gamma', 'critic.gae_lambda', 'critic.gae'),
)
# Removed fields, and the value that is now built in.
_GONE = {
    'rollout.top_p': 1.0,
    'rollout.top_k': -1,
    'learner.final_share': 0.1,
    'learner.skip_limit': 5,
    'replay.retrieve_count': 0,
}
_ABSENT = object()


def as_now(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Converts a run's settings from its config.json to this version's names. Absent fields stay absent."""
    new = copy.deepcopy(dict(settings))
    for before, now in MOVED.items():
        value = _get(new, before)
        if value is not _ABSENT and not isinstance(value, dict):
            _drop(new, before)
            _set(new, now, value)
    for names, values, now, value in _MERGED:
        if tuple(_get(new, name) for name in names.split()) == values:
            for name in names.split():
                _drop(new, name)
            _set(new, now, value)
    for low, high, now in _PAIRS:
        pair = [_get(new, low), _get(new, high)]
        if _ABSENT not in pair:
            _drop(new, low)
            _drop(new, high)
            _set(new, now, pair)
    for name, value in _GONE.items():
        if _get(new, name) == value:
            _drop(new, name)
    return {name: part for name, part in new.items() if part != {} or settings.get(name) == {}}


def _get(tree: dict[str, Any], name: str) -> Any:
    for part in name.split('.'):
        if not isinstance(tree, dict) or part not in tree:
            return _ABSENT
        tree = tree[part]
    return tree


def _set(tree: dict[str, Any], name: str, value: Any) -> None:
    *sections, last = name.split('.')
    for section in sections:
        tree = tree.setdefault(section, {})
        if not isinstance(tree, dict):  # the file is damaged
            return
    tree[last] = value


def _drop(tree: dict[str, Any], name: str) -> None:
    *sections, last = name.split('.')
    for section in sections:
        tree = tree[section]
    del tree[last]
