"""Prompts that come with the first tokens of a response: the engine's input, and the whole response."""

from __future__ import annotations

import dataclasses

import numpy as np
from ml_collections import ConfigDict

from bapo_jax.groups import Author, Prompt, Response


def longest_read(config: ConfigDict) -> int:
    """The most tokens that an engine prefills in training: prompt and, if continued, given tokens."""
    r, p = config.rollout, config.replay
    return r.max_prompt_tokens + (r.max_response_tokens if p.use_x2 and p.reevaluate == 'continue' else 0)


def as_read(prompt: Prompt) -> Prompt:
    """The prompt with its given tokens appended, which an engine continues."""
    if prompt.given is None:
        return prompt
    return dataclasses.replace(prompt, tokens=np.concatenate([prompt.tokens, prompt.given]), given=None)


def continued(prompt: Prompt, own: Response, most_tokens: int) -> Response:
    """The given tokens, masked from the loss, followed by `own`, truncated to `most_tokens` in total."""
    if prompt.given is None:
        return own
    given, kept = len(prompt.given), most_tokens - len(prompt.given)
    cut = len(own.tokens) > kept
    return Response(
        tokens=np.concatenate([prompt.given, own.tokens[:kept]]),
        # No policy sampled the given tokens; the loss does not read their log-probs.
        logp=np.concatenate([np.zeros(given, np.float32), own.logp[:kept]]),
        finish='length' if cut else own.finish,
        version=own.version,
        author=Author.PREFIX,
        loss_mask=np.concatenate([np.zeros(given, bool), own.trained_on[:kept]]),
    )
