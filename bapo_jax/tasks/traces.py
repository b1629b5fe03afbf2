"""Traces: responses that another model or a solver wrote, for the policy to learn from.

A file of traces has one row for each of them, {"prompt_id": int, "text": str}. `prompt_id` is the place of
its problem among those of task.train, from 0. `text` is what follows the prompt, as the policy should write
it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from absl import logging
from ml_collections import ConfigDict

from bapo_jax.groups import STOP, Author, Prompt, Response, Span
from bapo_jax.tasks import get_task, solver_of
from bapo_jax.tasks.jsonl import shown
from bapo_jax.tasks.rows import rows_of
from bapo_jax.tasks.turns import asks_in_chat, turn_end

_COLUMNS = '"prompt_id" (a whole number) and "text" (the response)'


class Traces(NamedTuple):
    """A trace for some of the training prompts, as one span each that ends with a stop token."""

    responses: Mapping[int, Response]  # by prompt id
    fingerprint: str  # a hash of all traces, including those that are too long
    source: str  # what messages call their source


def traces_of(
    config: ConfigDict, prompts: Sequence[Prompt], problems: int, tokenizer: Any, ends: Sequence[int]
) -> Traces:
    """Returns the traces in replay.traces.file; without a file, those of the task's solver.

    `config` is resolved. `problems` is the number of training problems, of which `prompts` are those that are
    short enough; `ends` are the stop tokens. Traces longer than rollout.max_response_tokens are left out, and
    a warning counts them. Raises ValueError, or FileNotFoundError, naming field, file, row and remedy, if a
    row is bad, or if there are no traces that fit.
    """
    p, limit, stop = (
        config.replay,
        config.rollout.max_response_tokens,
        _stop(config, prompts, tokenizer, ends),
    )
    if p.traces.file:
        source = f'replay.traces.file={p.traces.file}'
        texts = read_traces(p.traces.file, problems)
        rows = tokenizer([text for _, text in texts.values()], add_special_tokens=False)['input_ids']
        tokens = {
            i: _ended(np.array(row, np.int32), stop, ends, where)
            for (i, (where, _)), row in zip(texts.items(), rows, strict=True)
        }
        digest = json.dumps(sorted((i, text) for i, (_, text) in texts.items()))
    elif p.given_by == 'solver':
        source, known = 'replay.given_by=solver', getattr(get_task(config.task.name), 'SOLUTIONS', {})
        if config.task.template not in known:
            raise ValueError(
                f'{source}: task.name={config.task.name} only has solutions for the templates '
                f'{", ".join(known) or "(none)"}, not for task.template={config.task.template}; set '
                'replay.traces.file'
            )
        tokens = solved(prompts, solver_of(config, tokenizer), config.seed, stop)
        digest = json.dumps([(i, of_one.tolist()) for i, of_one in tokens.items()])
    else:
        raise ValueError(
            f'replay.kind={p.kind} learns from traces, and there are none; set replay.traces.file to a file '
            f'whose rows have {_COLUMNS}, or replay.given_by=solver if the task has solutions'
        )
    fitting = {i: of_one for i, of_one in tokens.items() if len(of_one) <= limit}
    if len(fitting) < len(tokens):
        logging.warning(
            '%s: %s of %s traces are longer than rollout.max_response_tokens=%d and are left out; raise it '
            'to keep them (the longest has %s tokens)', source, f'{len(tokens) - len(fitting):,}',
            f'{len(tokens):,}', limit, f'{max(map(len, tokens.values())):,}',
        )  # fmt: skip
    asked = {prompt.id for prompt in prompts}  # not those that are too long
    responses = {i: trace(of_one) for i, of_one in fitting.items() if i in asked}
    if not responses:
        raise ValueError(
            f'{source}: none of its {len(tokens):,} traces has at most rollout.max_response_tokens={limit} '
            'tokens and belongs to a prompt that is asked; raise that field, or give other traces'
        )
    return Traces(responses, hashlib.sha256(digest.encode()).hexdigest()[:16], source)


def read_traces(path: str, problems: int) -> dict[int, tuple[str, str]]:
    """Returns (file and row, text) of each trace of a file, by prompt id, from 0 to `problems` - 1.

    Raises ValueError or FileNotFoundError, naming the file, the row and the remedy.
    """
    texts: dict[int, tuple[str, str]] = {}
    for where, row in rows_of(path, _COLUMNS):
        i, text = row.get('prompt_id'), row.get('text')
        if isinstance(i, bool) or not isinstance(i, (int, np.integer)):
            raise ValueError(
                f'{where}: "prompt_id" must be a whole number, the place of a problem in task.train from '
                f'0, got {shown(i)}; correct the row'
            )
        if not isinstance(text, str) or not text.strip():
            raise ValueError(
                f'{where}: "text" must be the text of a response, got {shown(text)}; correct the row, or '
                'remove it'
            )
        if not 0 <= i < problems:
            raise ValueError(
                f'{where}: "prompt_id" is {i}, but task.train has {problems:,} problems, from 0 to '
                f'{problems - 1}; remove the row, or train on all problems (task.limit=0)'
            )
        if i in texts:
            raise ValueError(
                f'{where}: "prompt_id" {i} has a trace already, in {texts[i][0]}; keep one of the two'
            )
        texts[int(i)] = where, text
    return texts


def solved(
    prompts: Sequence[Prompt],
    solve: Callable[[Prompt, np.random.Generator], np.ndarray | None],
    seed: int,
    stop: int,
) -> dict[int, np.ndarray]:
    """Returns the solver's tokens and the stop token, by prompt id, for prompts that it solves."""
    tokens = {prompt.id: solve(prompt, np.random.default_rng([seed, prompt.id])) for prompt in prompts}
    return {i: np.append(of_one, np.int32(stop)) for i, of_one in tokens.items() if of_one is not None}


def trace(tokens: np.ndarray) -> Response:
    """A response by another author, whose log-probs are unknown; int32 [tokens]."""
    return Response((Span(tokens, None, Author.TRACE),), STOP)


def _ended(tokens: np.ndarray, stop: int, ends: Collection[int], where: str) -> np.ndarray:
    """The tokens, with a stop token at the end if they have none. Raises ValueError if there is another."""
    if tokens[-1] not in ends:
        tokens = np.append(tokens, np.int32(stop))
    if np.isin(tokens[:-1], list(ends)).any():
        raise ValueError(
            f'{where}: "text" has a stop token before its end, where a response would have ended; remove '
            'what follows it'
        )
    return tokens


def _stop(config: ConfigDict, prompts: Sequence[Prompt], tokenizer: Any, ends: Sequence[int]) -> int:
    """The stop token that ends a trace: that of the chat template if prompts use it, else the tokenizer's."""
    task, after = get_task(config.task.name), turn_end(tokenizer)
    if after and asks_in_chat(task, prompts[0].ground_truth, config.task.template, tokenizer):
        token = tokenizer(after, add_special_tokens=False)['input_ids'][0]
        if token in ends:
            return token
    return tokenizer.eos_token_id if tokenizer.eos_token_id in ends else ends[0]
