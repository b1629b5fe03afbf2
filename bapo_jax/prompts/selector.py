"""Builds the prompt selector that a config names."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from ml_collections import ConfigDict

from bapo_jax.groups import Prompt
from bapo_jax.prompts.adaprefix import AdaPrefix
from bapo_jax.prompts.dots import Dots, Embed
from bapo_jax.prompts.epochs import ShuffledEpochs
from bapo_jax.prompts.mixed import MixedLast
from bapo_jax.prompts.mopps import Mopps
from bapo_jax.prompts.ngrams import ngram_embeddings
from bapo_jax.prompts.prioritised import Prioritised
from bapo_jax.prompts.protocol import PromptSelector

SELECTORS = ('shuffled', 'mixed', 'mopps', 'prioritised', 'adaprefix', 'dots')


def make_selector(
    config: ConfigDict, prompts: Sequence[Prompt], batch: int, *, steps: int = 0,
    solve: Callable[[Prompt, np.random.Generator], np.ndarray | None] | None = None,
    embed: Embed = ngram_embeddings,
) -> PromptSelector:  # fmt: skip
    """The selector that the config names, for a run of `steps` steps with `batch` prompts each.

    `solve` writes correct responses; `embed` embeds prompts. Both are only called if the selector needs them.
    Raises ValueError if it is unknown or there are too few prompts.
    """
    p, seed = config.prompts, config.seed
    if p.selector == 'shuffled':
        return ShuffledEpochs(prompts, batch, seed)
    if p.selector == 'mixed':
        return MixedLast(prompts, batch, seed)
    if p.selector == 'mopps':
        return Mopps(prompts, batch, seed, **p.mopps)
    if p.selector == 'prioritised':
        return Prioritised(prompts, batch, seed, **p.prioritised)
    if p.selector == 'adaprefix':
        longest = config.rollout.max_response_tokens
        return AdaPrefix(prompts, batch, seed, steps=steps, longest=longest, solve=solve, **p.adaprefix)
    if p.selector == 'dots':
        fields = {name: value for name, value in p.dots.items() if name != 'embeddings'}
        return Dots(prompts, batch, seed, embed=embed, **fields)
    raise ValueError(f'prompts.selector={p.selector!r} is unknown; choose one of {", ".join(SELECTORS)}')
