"""Builds the prompt selector that a config names."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from ml_collections import ConfigDict

from bapo_jax.groups import Prompt
from bapo_jax.prompts.adaprefix import AdaPrefix
from bapo_jax.prompts.epochs import ShuffledEpochs
from bapo_jax.prompts.mopps import Mopps
from bapo_jax.prompts.prioritised import Prioritised
from bapo_jax.prompts.protocol import PromptSelector

SELECTORS = ('shuffled', 'mopps', 'prioritised', 'adaprefix')


def make_selector(
    config: ConfigDict, prompts: Sequence[Prompt], *, steps: int = 0,
    solve: Callable[[Prompt, np.random.Generator], np.ndarray | None] | None = None,
) -> PromptSelector:  # fmt: skip
    """The selector that the config names, for a run of `steps` steps. `solve` writes correct responses.

    Raises ValueError if it is unknown or there are too few prompts.
    """
    p, batch, seed = config.prompts, config.learner.batch_groups, config.seed
    if p.selector == 'shuffled':
        return ShuffledEpochs(prompts, batch, seed)
    if p.selector == 'mopps':
        return Mopps(prompts, batch, seed, **p.mopps)
    if p.selector == 'prioritised':
        return Prioritised(prompts, batch, seed, **p.prioritised)
    if p.selector == 'adaprefix':
        longest = config.rollout.max_response_tokens
        return AdaPrefix(prompts, batch, seed, steps=steps, longest=longest, solve=solve, **p.adaprefix)
    raise ValueError(f'prompts.selector={p.selector!r} is unknown; choose one of {", ".join(SELECTORS)}')
