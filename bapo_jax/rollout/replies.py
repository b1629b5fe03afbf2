"""What goes over the wire to a vLLM server and back: one request a group, and a reply that is read and checked. Pure functions.

vLLM 0.32 answers POST /inference/v1/generate in JSON alone: an object a token, which has the log-prob twice, 140 bytes in all.
Base64 arrays exist there for prompts' log-probs and for routed experts. /v1/completions is terser, but names no policy versions.
The gRPC server is another program, without the routes that load a policy.

So a step of 2,048 responses of 8,192 tokens is 2.4 GB of JSON. msgspec reads it in 3 s: it makes objects of the named fields
alone, and gc=False keeps these out of the garbage collector's sight. Parsers that make dicts (json, orjson) take ten times as long,
and pyarrow's takes 8 s.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import groupby, zip_longest
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np

from bapo_jax.groups import Prompt, Response
from bapo_jax.rollout.engine import RolloutError, Sampling, trained_tokens
from bapo_jax.tasks.sight import Sight

ROUTE = '/inference/v1/generate'
_NOT_FINITE = -9999.0  # what vLLM writes for nan and -inf, and where it has no log-prob


class BadResponse(RolloutError):
    """A response is not trainable: of another policy, incomplete, or with impossible tokens or log-probs."""


class Asked(NamedTuple):
    """What a reply must answer."""

    group_size: int
    max_tokens: int
    version: int  # of the policy
    vocab_size: int
    image_token: int | None = None  # of a model that reads images
    prompt: np.ndarray | None = None  # the tokens that the server must have read; None: it reads those that it was sent


class _Sampled(msgspec.Struct, gc=False):
    logprob: float


class _LogProbs(msgspec.Struct):
    content: list[_Sampled]  # one a token


class _Span(msgspec.Struct):
    version: str


class _Choice(msgspec.Struct):  # the fields in the order of the wire: they are found faster
    index: int
    finish_reason: str
    token_ids: list[Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)]]
    weight_versions: list[_Span] | None
    logprobs: _LogProbs


class _Reply(msgspec.Struct):
    choices: list[_Choice]
    prompt_token_ids: list[int] | None = None


_decoder = msgspec.json.Decoder(_Reply)
_logprob = operator.attrgetter('logprob')


def request(
    prompt: Prompt, group_size: int, sampling: Sampling, stop_tokens: list[int], sight: Sight | None = None
) -> dict[str, Any]:
    """The body that asks for a prompt's whole group.

    A prompt with images needs `sight`. They are read, resized and sent, each with one token in its place. The server makes that as
    many as the image has features, and its reply states the prompt that it read. Raises as `open_image` does.
    """
    images = prompt.images
    body = {
        'token_ids': (sight.collapsed(prompt.tokens, images) if images else prompt.tokens).tolist(),
        'sampling_params': {
            'n': group_size,
            'temperature': sampling.temperature,
            'top_p': sampling.top_p,
            'max_tokens': sampling.max_tokens,
            'logprobs': 0,  # of the sampled token alone
            'stop_token_ids': stop_tokens,
            'detokenize': False,
        },
    }
    if images:
        body['content_parts'] = [{'type': 'image_url', 'url': sight.data_url(image)} for image in images]
        body['return_token_ids'] = True
    return body


def read_group(body: bytes, asked: Asked, server: str) -> tuple[Response, ...]:
    """The responses in a reply, in the order of their index.

    Raises BadResponse, naming `server`, unless they are complete, plausible and of the requested version. Raises RolloutError where
    the server read another prompt than the trainer's.
    """
    try:
        reply = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as e:  # not JSON, or a field that is missing or of another type
        raise BadResponse(f'{server}: a reply cannot be read: {e}') from e

    if asked.prompt is not None:
        check_prompt(reply.prompt_token_ids, asked.prompt, asked.image_token, server)

    def need(condition: bool, what: str) -> None:
        if not condition:
            raise BadResponse(f'{server}: a response {what}')

    choices = sorted(reply.choices, key=lambda choice: choice.index)
    need(len(choices) == asked.group_size, f'group has {len(choices)} members where {asked.group_size} were asked for')
    responses = []
    for choice in choices:
        tokens = np.array(choice.token_ids, np.int32)
        logp = np.fromiter(map(_logprob, choice.logprobs.content), np.float32, len(choice.logprobs.content))
        versions = sorted({span.version for span in choice.weight_versions or ()})
        need(versions == [str(asked.version)], f'is of policy {versions} where {asked.version} was asked for')
        most = asked.max_tokens
        need(1 <= len(tokens) <= most, f'has {len(tokens)} tokens where 1 to {most} were asked for')
        need(len(logp) == len(tokens), f'has {len(tokens)} tokens and {len(logp)} log-probs')
        need(bool(tokens.min() >= 0 and tokens.max() < asked.vocab_size), 'has a token outside the vocabulary')
        need(bool(logp.min() > _NOT_FINITE and logp.max() <= 0), 'has a log-prob that is not finite or above 0')
        need(choice.finish_reason in ('stop', 'length'), f'ended with {choice.finish_reason!r}')
        mask = trained_tokens(tokens, asked.image_token)
        responses.append(Response(tokens, logp, choice.finish_reason, asked.version, loss_mask=mask))
    return tuple(responses)


def check_prompt(read: list[int] | None, prompt: np.ndarray, image_token: int | None, server: str) -> None:
    """Raises RolloutError, which says what differs, unless the server `read` the tokens of `prompt`."""
    if read is None:
        raise RolloutError(f'{server}: the reply does not state the prompt that was read; serve with vLLM 0.32 or later')
    want = prompt.tolist()
    if read == want:
        return
    theirs, ours = _features(read, image_token), _features(want, image_token)
    if theirs != ours:
        raise RolloutError(
            f"{server}: a prompt's images have {theirs} features there and {ours} here, so the server resizes them again. Give it "
            'the limits of model.least_pixels and model.most_pixels (docs/vllm.md), and the same preprocessor_config.json'
        )
    at, there, here = next((i, a, b) for i, (a, b) in enumerate(zip_longest(read, want)) if a != b)
    raise RolloutError(
        f'{server}: token {at} of a prompt is {there} there and {here} here; serve the model directory that the run trains'
    )


def _features(tokens: Sequence[int], image_token: int | None) -> list[int]:
    """How many features each image has: the lengths of the runs of `image_token`."""
    return [len(list(run)) for token, run in groupby(tokens) if token == image_token]
