"""What goes over the wire to a vLLM server and back: one request a group, and a reply that is read and checked. Pure functions.

vLLM 0.32 answers POST /inference/v1/generate in JSON alone: an object a token, which has the log-prob twice, 140 bytes in all.
Base64 arrays exist there for prompts' log-probs and for routed experts. /v1/completions is terser, but names no policy versions.
The gRPC server is another program, without the routes that load a policy.

So a step of 2,048 responses of 8,192 tokens is 2.4 GB of JSON. msgspec reads it in 3 s: it makes objects of the named fields
alone, and gc=False keeps these out of the garbage collector's sight. Parsers that make dicts (json, orjson) take ten times as long,
and pyarrow's takes 8 s.
"""

from __future__ import annotations

import email.utils
import operator
import re
import time
from collections.abc import Callable, Sequence
from itertools import groupby, zip_longest
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np

from bapo_jax.groups import Prompt, Response
from bapo_jax.rollout.engine import RolloutError, Sampling, trained_tokens
from bapo_jax.rollout.published import NAME, OTHER_TRAINER, number_of
from bapo_jax.tasks.sight import Sight

ROUTE = '/inference/v1/generate'
# vLLM counts these at each of its iterations, one line for each engine of a server.
_TOKENS, _SEQUENCES, _ITERATIONS = (
    re.compile(rb'^vllm:' + name + rb'(?:\{.*\})? (\d+(?:\.\d+)?(?:e\+\d+)?)$', re.MULTILINE)
    for name in (rb'(?:prompt|generation)_tokens_total', rb'num_requests_(?:running|waiting)', rb'iteration_tokens_total_count')
)
_MOST_A_TOKEN = 1024  # bytes of a reply; seven times what vLLM writes for a token of a response
_MOST_BESIDE = 2**20  # what is not of tokens
_NOT_FINITE = -9999.0  # what vLLM writes for nan and -inf, and where it has no log-prob


class BadResponse(RolloutError):
    """A response is not trainable: of another policy, incomplete, or with impossible tokens or log-probs."""


class OtherPolicy(RolloutError):
    """A response is of a policy that another trainer loaded. Asking again would not help."""


class Asked(NamedTuple):
    """What a reply must answer."""

    group_size: int
    max_tokens: int  # what the server can write at most: what was asked for, or what its model length leaves beside the prompt
    policy: str  # its name
    vocab_size: int
    stop_tokens: tuple[int, ...]
    image_token: int | None = None  # of a model that reads images
    prompt: np.ndarray | None = None  # the tokens that the server must have read; None: it reads those that it was sent


class Load(NamedTuple):
    """A server's work, by its metrics; None for what it does not count."""

    sequences: float | None = None  # that run or wait: one for each response of a group
    tokens: float = 0.0  # read and written since it started; 0 where it counts none
    iterations: float | None = None  # that gave tokens, since it started; None of several engines: a request is at one of them


_Count = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class _Sampled(msgspec.Struct, gc=False):
    logprob: float


class _LogProbs(msgspec.Struct):
    content: list[_Sampled]  # one a token


class _Span(msgspec.Struct):
    version: str
    start: _Count
    end: _Count


class _Choice(msgspec.Struct):  # the fields in the order of the wire: they are found faster
    index: _Count
    finish_reason: str
    token_ids: list[Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)]]
    weight_versions: list[_Span] | None
    logprobs: _LogProbs


class _Reply(msgspec.Struct):
    choices: list[_Choice]
    prompt_token_ids: list[int] | None = None


class _Results(msgspec.Struct):
    results: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1)]


class _Success(msgspec.Struct):
    success: bool


class _Served(msgspec.Struct):
    max_model_len: _Count


class _Models(msgspec.Struct):
    data: Annotated[list[_Served], msgspec.Meta(min_length=1)]


_group, _results, _success, _models = map(msgspec.json.Decoder, (_Reply, _Results, _Success, _Models))
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


def most_bytes(asked: Asked, prompt_tokens: int) -> int:
    """The most bytes that a sound reply can have."""
    return _MOST_BESIDE + _MOST_A_TOKEN * (asked.group_size * asked.max_tokens + prompt_tokens)


def read_group(body: bytes, asked: Asked, server: str) -> tuple[Response, ...]:
    """The responses in a reply, in the order of their index.

    Raises BadResponse, naming `server`, unless they are complete, plausible and of the requested policy. Raises OtherPolicy where
    another trainer has loaded one, and RolloutError where the server read another prompt than the trainer's.
    """
    reply = _decoded(_group, body, server)
    if asked.prompt is not None:
        check_prompt(reply.prompt_token_ids, asked.prompt, asked.image_token, server)

    def need(condition: bool, what: str) -> None:
        if not condition:
            raise BadResponse(f'{server}: a response {what[:500]}')

    choices = sorted(reply.choices, key=lambda choice: choice.index)
    need(len(choices) == asked.group_size, f'group has {len(choices)} members where {asked.group_size} were asked for')
    numbers = [choice.index for choice in choices]
    need(numbers == list(range(asked.group_size)), f'group has the indices {numbers[:9]}, which are not those of its members')
    return tuple(_response(choice, asked, need, server) for choice in choices)


def _response(choice: _Choice, asked: Asked, need: Callable[[bool, str], None], server: str) -> Response:
    """One member of a group; `need` raises where its condition fails."""
    tokens = np.array(choice.token_ids, np.int32)
    with np.errstate(over='ignore'):  # what is too large for float32 becomes infinite, and is refused
        logp = np.fromiter(map(_logprob, choice.logprobs.content), np.float32, len(choice.logprobs.content))
    spans, finish, most = choice.weight_versions or [], choice.finish_reason, asked.max_tokens
    versions = sorted({span.version for span in spans})
    if any(NAME.fullmatch(version) and version != asked.policy for version in versions):
        raise OtherPolicy(f'{server}: a response is of policy {versions} where {asked.policy} was asked for. {OTHER_TRAINER}')
    need(versions == [asked.policy], f'is of policy {versions} where {asked.policy} was asked for')
    need(1 <= len(tokens) <= most, f'has {len(tokens)} tokens where 1 to {most} were asked for')
    need(len(logp) == len(tokens), f'has {len(tokens)} tokens and {len(logp)} log-probs')
    # vLLM begins a span where the version changes: tokens of one version are one span.
    of_tokens = [(span.start, span.end) for span in spans]
    need(of_tokens == [(0, len(tokens))], f'has {len(tokens)} tokens, and states the policy of the tokens {of_tokens} alone')
    need(bool(tokens.min() >= 0 and tokens.max() < asked.vocab_size), 'has a token outside the vocabulary')
    need(bool(logp.min() > _NOT_FINITE and logp.max() <= 0), 'has a log-prob that is not finite or above 0')
    need(finish in ('stop', 'length'), f'ended with {finish!r}')
    # vLLM ends a response at its first stop token, else at the most tokens.
    stops = np.flatnonzero(np.isin(tokens, asked.stop_tokens)).tolist()
    ends = [len(tokens) - 1] if finish == 'stop' else []
    need(stops == ends, f'of {len(tokens)} tokens ended with {finish!r}, and has stop tokens {asked.stop_tokens} at {stops[:9]}; '
         'serve the model directory that the run trains')  # fmt: skip
    need(finish == 'stop' or len(tokens) == most, f"ended with 'length' after {len(tokens)} tokens of {most}")
    return Response(tokens, logp, finish, number_of(asked.policy), loss_mask=trained_tokens(tokens, asked.image_token))


def read_results(body: bytes, server: str) -> list[dict[str, Any]]:
    """What each of a server's workers said to a call, one at least. Raises BadResponse."""
    return _decoded(_results, body, server).results


def read_success(body: bytes, server: str) -> bool:
    """Whether a server says that it did what it was told. Raises BadResponse."""
    return _decoded(_success, body, server).success


def read_model_length(body: bytes, server: str) -> int:
    """The most tokens that a server takes of prompt and response together. Raises BadResponse."""
    return _decoded(_models, body, server).data[0].max_model_len


def read_load(body: bytes) -> Load:
    """A server's work, by its metrics."""
    sequences, tokens, iterations = (list(map(float, counts.findall(body))) for counts in (_SEQUENCES, _TOKENS, _ITERATIONS))
    return Load(sum(sequences) if len(sequences) > 1 else None, sum(tokens), iterations[0] if len(iterations) == 1 else None)


def seconds_to_wait(retry_after: str) -> float:
    """What a Retry-After header asks for, a number of seconds or a date; 0 where it states none that is to come."""
    if retry_after.isdecimal():
        return float(retry_after[:9])
    try:
        return max(0.0, email.utils.parsedate_to_datetime(retry_after).timestamp() - time.time())
    except (ValueError, OverflowError):
        return 0.0


def _decoded(decoder: msgspec.json.Decoder, body: bytes, server: str) -> Any:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:  # not JSON, or a field is missing or of another type
        raise BadResponse(f'{server}: a reply cannot be read: {e}') from e


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
