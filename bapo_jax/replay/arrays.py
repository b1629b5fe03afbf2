"""Groups as a few flat arrays, as checkpoints and buffers store them, and back."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence

import numpy as np

from bapo_jax.groups import FINISHES, NO_VERSION, Author, Group, Prompt, Response, Span, Verdict

_SCORED = 'scored_'  # prefix of the arrays with `Response.scored`
_COLUMNS = 'span_len', 'span_known', 'span_author', 'span_version'


def groups_to_arrays(groups: Sequence[Group]) -> dict[str, np.ndarray]:
    """Flattens groups into a few numpy arrays for a checkpoint, without loss.

    Every array has at least one element, since array stores may not support empty ones. 'count' is the number
    of groups.
    """
    responses = [r for g in groups for r in g.responses]
    spans = [s for r in responses for s in r.spans]
    scored = sorted({name for r in responses for name in r.scored})

    def flat(arrays: Sequence[np.ndarray], dtype) -> np.ndarray:
        return np.concatenate([*arrays, np.zeros(1, dtype)]).astype(dtype, copy=False)

    def in_json(values: list) -> np.ndarray:
        return np.frombuffer(json.dumps(values).encode(), np.uint8)

    return {
        'count': np.array([len(groups)], np.int64),
        'prompt_id': flat([[g.prompt.id for g in groups]], np.int64),
        'prompt_len': flat([[len(g.prompt.tokens) for g in groups]], np.int32),
        'prompt_tokens': flat([g.prompt.tokens for g in groups], np.int32),
        'task_and_truth': in_json([[g.prompt.task, g.prompt.ground_truth] for g in groups]),
        'step': flat([[g.step for g in groups]], np.int64),
        'size': flat([[g.size for g in groups]], np.int32),
        'verdict': flat([[int(v) for g in groups for v in g.verdicts]], np.int8),
        'reward': flat([g.rewards for g in groups], np.float32),
        'answers': in_json([g.answers for g in groups]),
        'response_len': flat([[len(r.tokens) for r in responses]], np.int32),
        'spans': flat([[len(r.spans) for r in responses]], np.int32),
        'span_len': flat([[len(s.tokens) for s in spans]], np.int32),
        'tokens': flat([s.tokens for s in spans], np.int32),
        'logp': flat([r.logp for r in responses], np.float32),
        'span_known': flat([[s.logp is not None for s in spans]], np.int8),  # whether there are log-probs
        'span_author': flat([[int(s.author) for s in spans]], np.int8),
        'span_version': flat([[s.version for s in spans]], np.int64),
        'stopped': flat([[FINISHES.index(r.finish) for r in responses]], np.int8),
        # nan if a response was not scored
        **{
            _SCORED + name: flat(
                [r.scored.get(name, np.full(len(r.tokens), math.nan)) for r in responses], np.float32
            )
            for name in scored
        },
    }


def group_bytes(group: Group) -> int:
    """Returns the bytes of a group's token and log-prob arrays."""
    return group.prompt.tokens.nbytes + sum(r.nbytes for r in group.responses)


def groups_from_arrays(arrays: Mapping[str, np.ndarray]) -> list[Group]:
    """The inverse of `groups_to_arrays`, also for arrays of earlier versions, which may lack the answers."""
    a = {name: np.asarray(value) for name, value in arrays.items()}
    if 'spans' not in a:
        a |= _spans_of_earlier(a)
    prompts, sizes = _cut(a['prompt_tokens'], a['prompt_len']), a['size'][: int(a['count'][0])].tolist()
    truths = json.loads(a['task_and_truth'].tobytes())
    answers = json.loads(a['answers'].tobytes()) if 'answers' in a else [[None] * n for n in sizes]
    responses, groups, first = _responses(a), [], 0
    for i, size in enumerate(sizes):
        prompt = Prompt(int(a['prompt_id'][i]), truths[i][0], prompts[i], truths[i][1])
        rows = slice(first, first := first + size)
        verdicts = tuple(map(Verdict, a['verdict'][rows].tolist()))
        groups.append(
            Group(
                prompt,
                tuple(responses[rows]),
                verdicts,
                a['reward'][rows],
                int(a['step'][i]),
                tuple(answers[i]),
            )
        )
    return groups


def _responses(a: Mapping[str, np.ndarray]) -> list[Response]:
    parts = (_cut(a[name], a['span_len']) for name in ('tokens', 'logp'))
    columns = (a[f'span_{name}'].tolist() for name in ('known', 'author', 'version'))
    spans = [
        Span(tokens, logp if known else None, Author(author), version)
        for tokens, logp, known, author, version in zip(*parts, *columns, strict=True)
    ]
    ends = np.cumsum(a['spans']).tolist()
    responses = [
        Response(tuple(spans[end - n : end]), FINISHES[finish])
        for end, n, finish in zip(ends, a['spans'].tolist(), a['stopped'].tolist(), strict=True)
    ]
    lengths = [len(r.tokens) for r in responses]
    for name in a:
        if name.startswith(_SCORED):
            for response, logp in zip(responses, _cut(a[name], lengths), strict=True):
                if not np.isnan(logp).any():
                    response.scored[name.removeprefix(_SCORED)] = logp
    return responses


def _spans_of_earlier(a: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The spans of responses that were saved with one author and version each, and a mask of trained tokens.

    Before the first trained token of a PREFIX response, the tokens were given. A policy's other untrained
    tokens are placeholders of image features.
    """
    counts, spans = [], []
    for mask, author, version in zip(
        _cut(a['loss_mask'], a['response_len']), a['author'].tolist(), a['version'].tolist(), strict=True
    ):
        starts = [0, *(1 + np.flatnonzero(np.diff(mask))).tolist(), len(mask)] if len(mask) else []
        counts.append(max(0, len(starts) - 1))
        for i, j in zip(starts, starts[1:]):
            if mask[i]:
                who = Author.TRACE if author == Author.TRACE else Author.POLICY
            else:
                who = Author.PREFIX if author == Author.PREFIX and i == 0 else Author.PLACEHOLDER
            sampled = who in (Author.POLICY, Author.PLACEHOLDER)
            spans.append((j - i, who != Author.PREFIX, who, version if sampled else NO_VERSION))
    columns = np.array(spans, np.int64).reshape(-1, 4).T
    return {'spans': np.array(counts), **dict(zip(_COLUMNS, columns, strict=True))}


def _cut(flat: np.ndarray, lengths: Sequence[int]) -> list[np.ndarray]:
    """Cuts an array into parts of these lengths; what is left over is padding."""
    return np.split(flat, np.cumsum(lengths))[:-1]
