"""Builds the prompt selector that a config names."""

from __future__ import annotations

from collections.abc import Sequence

from ml_collections import ConfigDict

from bapo_jax.groups import Prompt
from bapo_jax.prompts.epochs import ShuffledEpochs
from bapo_jax.prompts.mopps import Mopps
from bapo_jax.prompts.prioritised import Prioritised
from bapo_jax.prompts.protocol import PromptSelector

SELECTORS = ('shuffled', 'mopps', 'prioritised')


def make_selector(config: ConfigDict, prompts: Sequence[Prompt]) -> PromptSelector:
    """The selector that the config names. Raises ValueError if it is unknown or there are too few prompts."""
    p, batch, seed = config.prompts, config.learner.batch_groups, config.seed
    if p.selector == 'shuffled':
        return ShuffledEpochs(prompts, batch, seed)
    if p.selector == 'mopps':
        return Mopps(prompts, batch, seed, **p.mopps)
    if p.selector == 'prioritised':
        return Prioritised(prompts, batch, seed, **p.prioritised)
    raise ValueError(f'prompts.selector={p.selector!r} is unknown; choose one of {", ".join(SELECTORS)}')
