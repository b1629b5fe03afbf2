"""The wire format of vLLM servers: builds one request per group, reads and checks its reply. Pure functions.

vLLM 0.32 answers POST /inference/v1/generate only in JSON: one object per token, which repeats the log-prob
and takes 140 bytes. Base64 arrays exist there only for prompt log-probs and routed experts. /v1/completions
is terser, but states no policy versions. The gRPC server is a separate program, without the routes that load
a policy.

So a step of 2,048 responses of 8,192 tokens is 2.4 GB of JSON. msgspec reads it in 3 s: it creates objects
only for the declared fields, and gc=False hides them from the garbage collector. Parsers that create dicts
(json, orjson) take ten times as long, and pyarrow's takes 8 s.
"""

from __future__ import annotations

import email.utils
import itertools
import operator
import re
import time
from collections.abc import Callable, Sequence
from itertools import groupby, zip_longest
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np

from bapo_jax.groups import Prompt, Response, sampled_spans
from bapo_jax.rollout.engine import RolloutError, Sampling
from bapo_jax.tasks.jsonl import short
from bapo_jax.tasks.sight import Sight
from bapo_jax.weights.manifest import NAME, OTHER_TRAINER, number_of

ROUTE = '/inference/v1/generate'
BASE_WEIGHTS = 'default'  # how vLLM calls the weights that it was started with
# vLLM updates these at each iteration, in one line for each engine of a server.
_TOKENS, _SEQUENCES, _ITERATIONS = (
    re.compile(rb'^vllm:' + name + rb'(?:\{.*\})? (\d+(?:\.\d+)?(?:e\+\d+)?)$', re.MULTILINE)
    for name in (
        rb'(?:prompt|generation)_tokens_total',
        rb'num_requests_(?:running|waiting)',
        rb'iteration_tokens_total_count',
    )
)
_MOST_A_TOKEN = 1024  # most bytes per token of a reply; seven times what vLLM writes
_MOST_BESIDE = 2**20  # most bytes besides the tokens
_NOT_FINITE = -9999.0  # what vLLM writes for nan, -inf and a missing log-prob


class BadResponse(RolloutError):
    """A response is unusable: from another policy, incomplete, or with impossible tokens or log-probs."""


class OtherPolicy(RolloutError):
    """A response comes from a policy that another trainer loaded. A retry would not help."""


class Asked(NamedTuple):
    """What a reply must match."""

    group_size: int
    max_tokens: int  # the requested limit, or what the server's model length leaves after the prompt, if less
    policies: tuple[str, ...]  # names; a response may be of several, if one was loaded while it was written
    vocab_size: int
    stop_tokens: tuple[int, ...]
    image_token: int | None = None  # for a model that reads images
    prompt: np.ndarray | None = None  # the tokens that the server must read; None: exactly those it was sent
    adapter: str = ''  # the policy that answers, if it is an adapter; `policies` then names its base


class Load(NamedTuple):
    """A server's work according to its metrics; None for what it does not count."""

    sequences: float | None = None  # running or waiting, one per response of a group
    tokens: float = 0.0  # read and generated since the server started; 0 if not counted
    # Iterations with tokens since the start; None with several engines, since a request is at only one.
    iterations: float | None = None


_Count = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class _Sampled(msgspec.Struct, gc=False):
    logprob: float


class _LogProbs(msgspec.Struct):
    content: list[_Sampled]  # one per token


class _Span(msgspec.Struct):
    version: str
    start: _Count
    end: _Count


class _Choice(msgspec.Struct):  # fields in wire order, which is faster to decode
    index: _Count
    finish_reason: str
    token_ids: list[Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)]]
    weight_versions: list[_Span] | None
    logprobs: _LogProbs


class _Reply(msgspec.Struct):
    choices: list[_Choice]
    model: str = ''
    prompt_token_ids: list[int] | None = None


class _Results(msgspec.Struct):
    results: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1)]


class _Success(msgspec.Struct):
    success: bool


class _Model(msgspec.Struct):
    id: str = ''
    max_model_len: _Count | None = None  # only of the base, which comes before its adapters


class _Models(msgspec.Struct):
    data: Annotated[list[_Model], msgspec.Meta(min_length=1)]


class Served(NamedTuple):
    """What a server says that it serves."""

    model_length: int  # its limit of prompt and response tokens together
    names: frozenset[str]  # of its base and its adapters


_group, _results, _success, _models = map(msgspec.json.Decoder, (_Reply, _Results, _Success, _Models))
_logprob = operator.attrgetter('logprob')


def request(
    prompt: Prompt, group_size: int, sampling: Sampling, stop_tokens: list[int], sight: Sight | None = None,
    adapter: str = '',
) -> dict[str, Any]:  # fmt: skip
    """The request body for a prompt's whole group, which `adapter` answers, if one is named.

    A prompt with images needs `sight`. Images are read, resized and sent, and each has one token in the
    prompt. The server expands that token to one per image feature, and its reply states the prompt that it
    read. Raises the errors of `open_image`.
    """
    images = prompt.images
    body = {
        'token_ids': (sight.collapsed(prompt.tokens, images) if images else prompt.tokens).tolist(),
        'sampling_params': {
            'n': group_size,
            'temperature': sampling.temperature,
            'top_p': sampling.top_p,
            'max_tokens': sampling.max_tokens,
            'logprobs': 0,  # only for the sampled token
            'stop_token_ids': stop_tokens,
            'detokenize': False,
        },
    }
    if adapter:
        body['model'] = adapter
    if images:
        body['content_parts'] = [{'type': 'image_url', 'url': sight.data_url(image)} for image in images]
        body['return_token_ids'] = True
    return body


def most_bytes(asked: Asked, prompt_tokens: int) -> int:
    """The most bytes that a valid reply can have."""
    return _MOST_BESIDE + _MOST_A_TOKEN * (asked.group_size * asked.max_tokens + prompt_tokens)


def read_group(body: bytes, asked: Asked, server: str) -> tuple[Response, ...]:
    """The responses in a reply, ordered by index.

    Raises BadResponse, naming `server`, unless they are complete, plausible and from the requested policy.
    Raises OtherPolicy if another trainer has loaded a policy, and RolloutError if the server read a different
    prompt.
    """
    reply = _decoded(_group, body, server)
    if asked.prompt is not None:
        check_prompt(reply.prompt_token_ids, asked.prompt, asked.image_token, server)

    def need(condition: bool, what: str) -> None:
        if not condition:
            raise BadResponse(f'{server}: a response {what[:500]}')

    need(asked.adapter in ('', reply.model), f'is of policy {reply.model!a} instead of {asked.adapter}')
    choices = sorted(reply.choices, key=lambda choice: choice.index)
    need(
        len(choices) == asked.group_size, f'group has {len(choices)} responses instead of {asked.group_size}'
    )
    numbers = [choice.index for choice in choices]
    need(
        numbers == list(range(asked.group_size)),
        f'group has the indices {short(numbers)} instead of 0 to {asked.group_size - 1}',
    )
    return tuple(_response(choice, asked, need, server) for choice in choices)


def _response(choice: _Choice, asked: Asked, need: Callable[[bool, str], None], server: str) -> Response:
    """One member of a group; `need` raises BadResponse if its condition is false."""
    tokens = np.array(choice.token_ids, np.int32)
    with np.errstate(over='ignore'):  # values too large for float32 become infinite, and are refused
        logp = np.fromiter(map(_logprob, choice.logprobs.content), np.float32, len(choice.logprobs.content))
    spans, finish, most = choice.weight_versions or [], choice.finish_reason, asked.max_tokens
    versions, wanted = sorted({span.version for span in spans}), ' or '.join(asked.policies)
    others = set(versions) - set(asked.policies)
    if any(map(NAME.fullmatch, others)):
        raise OtherPolicy(
            f'{server}: a response is of policy {versions} instead of {wanted}. {OTHER_TRAINER}'
        )
    need(versions and not others, f'is of policy {versions} instead of {wanted}')
    need(1 <= len(tokens) <= most, f'has {len(tokens)} tokens instead of 1 to {most}')
    need(len(logp) == len(tokens), f'has {len(tokens)} tokens but {len(logp)} log-probs')
    # vLLM starts a span where the version changes, so tokens of one version are one span.
    of_tokens = [(span.start, span.end) for span in spans]
    bounds = [0, *(end for _, end in of_tokens)]
    need(
        of_tokens == list(itertools.pairwise(bounds))
        and bounds == sorted({*bounds})
        and bounds[-1] == len(tokens),
        f'has {len(tokens)} tokens, but states the policy only for the spans {of_tokens}',
    )
    need(bool(tokens.min() >= 0 and tokens.max() < asked.vocab_size), 'has a token outside the vocabulary')
    need(
        bool(logp.min() > _NOT_FINITE and logp.max() <= 0), 'has a log-prob that is not finite or is above 0'
    )
    need(finish in ('stop', 'length'), f"has finish_reason {finish!r} instead of 'stop' or 'length'")
    # vLLM ends a response at its first stop token, else at the token limit.
    stops = np.flatnonzero(np.isin(tokens, asked.stop_tokens)).tolist()
    ends = [len(tokens) - 1] if finish == 'stop' else []
    need(
        stops == ends,
        f'of {len(tokens)} tokens has finish_reason {finish!r}, stop tokens {asked.stop_tokens} at '
        f'{stops[:9]}; serve the model directory that the run trains',
    )
    need(
        finish == 'stop' or len(tokens) == most,
        f"has finish_reason 'length' after {len(tokens)} of {most} tokens",
    )
    by_policy = [
        sampled_spans(
            tokens[s.start : s.end],
            logp[s.start : s.end],
            number_of(asked.adapter or s.version),
            asked.image_token,
        )
        for s in spans
    ]
    return Response(tuple(itertools.chain(*by_policy)), finish)


def read_results(body: bytes, server: str) -> list[dict[str, Any]]:
    """Each worker's result of a call to a server, at least one. Raises BadResponse if unreadable."""
    return _decoded(_results, body, server).results


def read_success(body: bytes, server: str) -> bool:
    """Whether a server reports success. Raises BadResponse if the reply cannot be read."""
    return _decoded(_success, body, server).success


def read_served(body: bytes, server: str) -> Served:
    """What a server serves. Raises BadResponse if unreadable."""
    models = _decoded(_models, body, server).data
    if models[0].max_model_len is None:
        raise BadResponse(
            f'{server}: a reply cannot be read; serve with vLLM 0.32 or later: it has no max_model_len'
        )
    return Served(models[0].max_model_len, frozenset(model.id for model in models))


def read_load(body: bytes) -> Load:
    """A server's work according to its metrics."""
    sequences, tokens, iterations = (
        list(map(float, counts.findall(body))) for counts in (_SEQUENCES, _TOKENS, _ITERATIONS)
    )
    return Load(
        sum(sequences) if len(sequences) > 1 else None,
        sum(tokens),
        iterations[0] if len(iterations) == 1 else None,
    )


def seconds_to_wait(retry_after: str) -> float:
    """The seconds until a Retry-After header's time, a number or a date; 0 if it states no future time."""
    if retry_after.isdecimal():
        return float(retry_after[:9])
    try:
        return max(0.0, email.utils.parsedate_to_datetime(retry_after).timestamp() - time.time())
    except (ValueError, OverflowError):
        return 0.0


def _decoded(decoder: msgspec.json.Decoder, body: bytes, server: str) -> Any:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:  # no JSON or of another type
        raise BadResponse(f'{server}: a reply cannot be read; serve with vLLM 0.32 or later: {e}') from e


def check_prompt(read: list[int] | None, prompt: np.ndarray, image_token: int | None, server: str) -> None:
    """Raises RolloutError, saying what differs, unless the server `read` the tokens of `prompt`."""
    if read is None:
        raise RolloutError(
            f'{server}: the reply lacks the tokens of the prompt; serve with vLLM 0.32 or later'
        )
    want = prompt.tolist()
    if read == want:
        return
    theirs, ours = _features(read, image_token), _features(want, image_token)
    if theirs != ours:
        raise RolloutError(
            f"{server}: a prompt's images have {theirs} features on the server and {ours} in the trainer, so "
            'the server resizes '
            'them again. Give it the limits of model.pixels (docs/vllm.md) and the same '
            'preprocessor_config.json'
        )
    at, there, here = next((i, a, b) for i, (a, b) in enumerate(zip_longest(read, want)) if a != b)
    raise RolloutError(
        f'{server}: token {at} of a prompt is {there} on the server and {here} in the trainer; serve the '
        'model directory that the run trains'
    )


def _features(tokens: Sequence[int], image_token: int | None) -> list[int]:
    """The number of features of each image: the lengths of the runs of `image_token`."""
    return [len(list(run)) for token, run in groupby(tokens) if token == image_token]
