"""Writes and reads rollouts/{step}.jsonl.zst: a step's prompts, responses, verdicts and tokens.

They are for people to read, and for the report's viewer:

    zstdcat FILE | head -1 | python -m json.tool
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import zstandard

from bapo_jax.groups import NO_VERSION, Batch, Group, Response, Verdict
from bapo_jax.machine.files import write_bytes

MOST_ROW_BYTES = 2**29  # decompressed bytes of a row: 64 responses of 32,768 tokens take an eighth of that
# Compressed bytes per read: a block of 128 KiB takes at least 4 bytes, so they decompress to 16 MiB at most.
_AT_ONCE = 512
_SHOWN = 160  # most characters of a text that a run prints
_HELD = 8  # most tokens held back for an incomplete character, which has at most 4 bytes, so 4 tokens


class Logged(NamedTuple):
    """A group and how a step used it."""

    use: str  # its origin in the batch, else 'discarded' (fresh) or 'left_out' (re-evaluated)
    group: Group
    trained: int | None = 0  # how many times it was trained on, including this step; None if not counted
    # Log-probs under π_θ before the update, float32 [response tokens] each; None if not scored.
    logp: Sequence[np.ndarray] | None = None


def logged(
    fresh: Sequence[Group], reevaluated: Sequence[Group], batch: Batch, trained: Sequence[int | None],
    logp: Sequence[Sequence[np.ndarray] | None],
) -> list[Logged]:  # fmt: skip
    """Returns every group that a step sampled or trained on, once.

    A fresh group is left out if the batch has a new group with some of its responses. `trained` and `logp`
    belong to the batch's groups, in the batch's order.
    """
    of_batch = {
        id(g): Logged(o, g, *known)
        for g, o, *known in zip(batch.groups, batch.origins, trained, logp, strict=True)
    }
    used = {id(r) for g in batch.groups for r in g.responses}
    whole = [g for g in fresh if id(g) in of_batch or used.isdisjoint(map(id, g.responses))]
    sampled = [of_batch.pop(id(g), Logged('discarded', g)) for g in whole]
    sampled += [of_batch.pop(id(g), Logged('left_out', g)) for g in reevaluated]
    return [*sampled, *of_batch.values()]


def write_rollouts(path: Path, tokenizer: Any, groups: Sequence[Logged]) -> None:
    """Writes one JSON row per group.

    Numbers per token have three decimals; docs/start.md explains the fields.
    """
    spelled = _spelled(tokenizer, [r for x in groups for r in x.group.responses])
    rows = [
        {
            'use': x.use,
            'prompt_id': x.group.prompt.id,
            'prompt': tokenizer.decode(x.group.prompt.tokens),
            'ground_truth': x.group.prompt.ground_truth,
            'responses': tokenizer.batch_decode([r.tokens for r in x.group.responses]),
            'verdicts': [v.name.lower() for v in x.group.verdicts],
            'answers': x.group.answers,
            'rewards': [None if np.isnan(r) else float(r) for r in x.group.rewards],
            'finish': [r.finish for r in x.group.responses],
            'versions': [int(max(r.versions, default=NO_VERSION)) for r in x.group.responses],
            'spans': [spans_of(r) for r in x.group.responses],
            'step': x.group.step,
            'trained': x.trained,
            'pieces': [token_texts(tokenizer, r.tokens, spelled) for r in x.group.responses],
            'logp': [_sampled(r) for r in x.group.responses],
            'ratio': x.logp and [_ratios(r, logp) for r, logp in zip(x.group.responses, x.logp, strict=True)],
        }
        for x in groups
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, zstandard.compress(''.join(json.dumps(row) + '\n' for row in rows).encode()))


def spans_of(response: Response) -> list[list[Any]]:
    """Returns [author, version, tokens] of each span."""
    return [[s.author.name.lower(), s.version, len(s.tokens)] for s in response.spans]


def two_responses(step: int, tokenizer: Any, fresh: Sequence[Group]) -> str:
    """Returns what a run prints of a step: the first correct response and the first other one.

    Each comes with the end of its prompt.
    """
    judged = [
        (v == Verdict.CORRECT, g, r, v) for g in fresh for r, v in zip(g.responses, g.verdicts, strict=True)
    ]
    chosen = [next((one for one in judged if one[0] == right), None) for right in (True, False)]
    lines = []
    for _, group, response, verdict in filter(None, chosen):
        prompt, answer = (tokenizer.decode(tokens) for tokens in (group.prompt.tokens, response.tokens))
        lines.append(f'step {step}, {verdict.name.lower()}: {excerpt(prompt, last=True)} → {excerpt(answer)}')
    return '\n'.join(lines)


def excerpt(text: str, most: int = _SHOWN, last: bool = False) -> str:
    """Returns a text on one line, truncated to its first or its last `most` characters."""
    text = json.dumps(text, ensure_ascii=False)[1:-1]
    if len(text) <= most:
        return text
    return '…' + text[-most:] if last else text[:most] + '…'


def rollout_lines(file: Path) -> Iterator[bytes]:
    """Yields the lines of a rollout file, decompressing as it reads.

    Raises EOFError after the last complete line if the file is truncated or the next line has more than
    MOST_ROW_BYTES bytes, and ZstdError if the file is damaged.
    """
    reader, rest = zstandard.ZstdDecompressor().decompressobj(), bytearray()
    with file.open('rb') as f:
        while not reader.eof and (data := f.read(_AT_ONCE)):
            text = reader.decompress(data)
            rest += text
            if b'\n' in text:
                *lines, rest = rest.split(b'\n')
                yield from map(bytes, lines)
            if len(rest) > MOST_ROW_BYTES:
                raise EOFError(f'a line is longer than {MOST_ROW_BYTES >> 20} MiB')
    if rest or not reader.eof:
        raise EOFError('cut short')


def token_texts(tokenizer: Any, tokens: np.ndarray, spelled: dict[int, str]) -> list[str]:
    """Returns the text that each token adds; `spelled` has the text of every token by itself.

    Joined, they are the decoded response, except for invalid bytes. A character whose bytes are in several
    tokens belongs to the last of them.
    """
    added, held = [], []
    for token in tokens.tolist():
        held.append(token)
        text = spelled[token] if len(held) == 1 else tokenizer.decode(held)
        whole = not text.endswith('\ufffd') or len(held) == _HELD
        added.append(text if whole else '')
        held = [] if whole else held
    if held:
        added[-1] = tokenizer.decode(held)
    return added


def _spelled(tokenizer: Any, responses: Sequence[Response]) -> dict[int, str]:
    """Decodes each distinct token on its own."""
    ids = np.unique(np.concatenate([r.tokens for r in responses] or [np.zeros(0, np.int32)])).tolist()
    return dict(zip(ids, tokenizer.batch_decode([[i] for i in ids]) if ids else (), strict=True))


def _sampled(response: Response) -> list[float | None]:
    """The log-prob of each token when it was sampled; None if it is unknown, as of given tokens."""
    return [
        x for s in response.spans for x in ([None] * len(s.tokens) if s.logp is None else _rounded(s.logp))
    ]


def _ratios(response: Response, logp: np.ndarray) -> list[float | None]:
    """The importance ratio π_θ / behaviour policy of each token.

    None if the loss excludes the token, or if its behaviour policy is unknown.
    """
    ratios = _rounded(np.exp(logp - response.logp))
    known = [x is not None for x in _sampled(response)]
    return [
        x if trained_on and there else None
        for x, trained_on, there in zip(ratios, response.trained_on.tolist(), known, strict=True)
    ]


def _rounded(numbers: np.ndarray) -> list[float]:
    return np.round(numbers.astype(np.float64), 3).tolist()
