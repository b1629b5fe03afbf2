"""Prompts that come with the first tokens of a response: how an engine reads them, and what becomes of its answers."""

from __future__ import annotations

import dataclasses

import numpy as np
from ml_collections import ConfigDict

from bapo_jax.groups import Author, Prompt, Response


def longest_read(config: ConfigDict) -> int:
    """Tokens of the longest prompt that an engine reads in training: with given tokens behind it, where a row continues responses."""
    r, p = config.rollout, config.replay
    return r.max_prompt_tokens + (r.max_response_tokens if p.use_x2 and p.reevaluate == 'continue' else 0)


def as_read(prompt: Prompt) -> Prompt:
    """The prompt for an engine, which continues what it reads: the given tokens stand behind the question."""
    if prompt.given is None:
        return prompt
    return dataclasses.replace(prompt, tokens=np.concatenate([prompt.tokens, prompt.given]), given=None)


def continued(prompt: Prompt, own: Response, most_tokens: int) -> Response:
    """The whole response to a prompt: the given tokens, masked from the loss, and `own`, cut where both exceed `most_tokens`."""
    if prompt.given is None:
        return own
    given, kept = len(prompt.given), most_tokens - len(prompt.given)
    cut = len(own.tokens) > kept
    return Response(
        tokens=np.concatenate([prompt.given, own.tokens[:kept]]),
        logp=np.concatenate([np.zeros(given, np.float32), own.logp[:kept]]),  # no policy sampled them; the loss does not read these
        finish='length' if cut else own.finish,
        version=own.version,
        author=Author.PREFIX,
        loss_mask=np.concatenate([np.zeros(given, bool), own.trained_on[:kept]]),
    )
