"""The questions and how an answer is judged: one module per task, here or of the user's, all with the same functions.

A task module has

    BENCHMARKS: dict[str, str]       the names `benchmark` knows, with a short description of each
    TEMPLATES: dict[str, str]        the names `prompt_text` knows, with the text or its description
    training_problems(source, *, limit, seed) -> list[ground truth]     the questions trained on
    benchmark(name) -> list[ground truth]                               the questions of a test set
    prompt_text(ground_truth, template, tokenizer) -> str               a question as the policy reads it
    with_demands(ground_truth, text) -> ground truth                    adds what that prompt text demands of a response's form
    check_ground_truth(ground_truth)                                    ValueError, naming the field, if it cannot judge an answer
    verify(response, ground_truth) -> (Verdict, answer text or None)    judges any response text without raising
    verify_all(responses, ground_truths, budget_s) -> list of those     judges many at once, on all cores where they take long;
                                     after so many seconds the rest is INFRA_ERROR
    VOTES: bool                      whether equal answer texts agree, so that their majority (maj@n) is meaningful

and may have

    SOLUTIONS: dict[str, function]   by template, f(ground_truth, rng) -> text, a right response in its style; ValueError where none

A ground truth is a JSON-serialisable dict with the question and what its verifier needs.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from types import ModuleType
from typing import Any

import numpy as np
from absl import logging
from ml_collections import ConfigDict

from bapo_jax.groups import Prompt, images_of
from bapo_jax.tasks.jsonl import short
from bapo_jax.tasks.own_module import import_own
from bapo_jax.tasks.sight import Sight

TASKS = ('countdown', 'math', 'geometry', 'diagrams', 'arithmetic', 'questions')
PARTS = (  # what a task module has
    'BENCHMARKS', 'TEMPLATES', 'VOTES', 'training_problems', 'benchmark', 'prompt_text', 'with_demands', 'check_ground_truth',
    'verify', 'verify_all',
)  # fmt: skip
_CHUNK = 25_000  # questions that a process renders in a few seconds, which is what its start costs
_RENDER_S = 10.0  # most seconds for a question: a thousandth of one is usual
_WORKERS = 16  # each takes some 400 MB


def get_task(name: str) -> ModuleType:
    """The task module called `name`: one of TASKS, or, with a dot in its name, a module of the user's such as my_tasks.chess.

    Only that module is imported. Raises ValueError on an unknown name, or a module that is no task.
    """
    if name in TASKS:
        return importlib.import_module(f'bapo_jax.tasks.{name}')
    if '.' not in name:
        raise ValueError(f'task.name is {name!r}; choose one of {", ".join(TASKS)}, or a module of yours such as my_tasks.chess')
    task = import_own(name, f'task.name={name!r}')
    if missing := [part for part in PARTS if not hasattr(task, part)]:
        raise ValueError(f'task.name={name!r}: the module has no {", ".join(missing)}; docs/adding_a_task.md says what each is')
    return task


def encode_prompts(
    task_name: str, ground_truths: Sequence[Any], tokenizer: Any, *, template: str, first_id: int = 0, sight: Sight | None = None
) -> list[Prompt]:
    """Renders and tokenises every question. Prompt i has id `first_id + i` and int32 tokens [prompt tokens].

    No special tokens are added: a template that wants them writes them. No prompt is cut, since the question is at its end. One
    that is too long is left out of training (`leave_out_long`) or refused in a benchmark (`refuse_long`). Many questions are shared
    out among processes. An image takes a token for each feature that `sight` gives it. Raises ValueError for images without a sight.
    """
    encode = functools.partial(_encode, task_name, tokenizer, template)
    if len(ground_truths) <= _CHUNK:
        encoded = encode(ground_truths)
    else:
        chunks = [ground_truths[i : i + _CHUNK] for i in range(0, len(ground_truths), _CHUNK)]
        workers = min(len(chunks), os.cpu_count() or 1, _WORKERS)
        with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context('spawn')) as pool:
            encoded = [question for chunk in pool.map(encode, chunks) for question in chunk]
    return [
        Prompt(first_id + row, task_name, _with_features(tokens, ground_truth, sight), ground_truth)
        for row, (tokens, ground_truth) in enumerate(encoded)
    ]


def _with_features(tokens: np.ndarray, ground_truth: Any, sight: Sight | None) -> np.ndarray:
    images = images_of(ground_truth)
    if images and sight is None:
        raise ValueError('the questions have images, and the model of model.path has no vision tower; give a Qwen2.5-VL model')
    return sight.expanded(tokens, images) if images else tokens


def _encode(task_name: str, tokenizer: Any, template: str, ground_truths: Sequence[Any]) -> list[tuple[np.ndarray, Any]]:
    """Each question's tokens, int32, and its ground truth with what the prompt demands of a response."""
    task = get_task(task_name)
    texts = []
    for ground_truth in ground_truths:
        with _rendering(template):
            texts.append(task.prompt_text(ground_truth, template, tokenizer))
    rows = tokenizer(texts, add_special_tokens=False, return_attention_mask=False)['input_ids'] if texts else []
    return [
        (np.asarray(tokens, np.int32), task.with_demands(ground_truth, text))
        for tokens, ground_truth, text in zip(rows, ground_truths, texts, strict=True)
    ]


@contextlib.contextmanager
def _rendering(template: str) -> Iterator[None]:
    """Inside, a question is rendered: a model's chat template is a program, which may fail in any way or never end.

    Raises ValueError. The time is kept in the main thread alone, by a signal.
    """

    def give_up(*_: Any) -> None:
        raise TimeoutError(f'it has not ended in {_RENDER_S:g} s')

    timed = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGALRM, give_up) if timed else None
    try:
        if timed:
            signal.setitimer(signal.ITIMER_REAL, _RENDER_S)
        yield
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(
            f'task.template={template!r}: a question cannot be written by the chat template of model.path '
            f'({type(error).__name__}: {short(error)}); mend chat_template.jinja or tokenizer_config.json there, or choose another'
        ) from error
    finally:
        if timed:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


def solver(config: ConfigDict, tokenizer: Any) -> Callable[[Prompt, np.random.Generator], np.ndarray | None] | None:
    """What writes right responses, where `config.replay.given_by` wants the task to: a prompt's as int32 tokens without an end.

    They are None where the task finds none. `config` is resolved, and its task has solutions in the style of `config.task.template`.
    """
    if config.replay.reevaluate != 'continue' or config.replay.given_by != 'solver':
        return None
    solution = get_task(config.task.name).SOLUTIONS[config.task.template]

    def solve(prompt: Prompt, rng: np.random.Generator) -> np.ndarray | None:
        try:
            text = solution(prompt.ground_truth, rng)
        except ValueError:
            return None
        return np.array(tokenizer.encode(text, add_special_tokens=False), np.int32)

    return solve


def leave_out_long(prompts: Sequence[Prompt], most: int) -> list[Prompt]:
    """The prompts of at most `most` tokens, in order and with their ids. A warning counts the others.

    Raises ValueError where no prompt is left.
    """
    kept, lengths = [p for p in prompts if len(p.tokens) <= most], [len(p.tokens) for p in prompts]
    if prompts and not kept:
        raise ValueError(
            f'all {len(prompts):,} prompts are longer than rollout.max_prompt_tokens={most}; the shortest has {min(lengths):,} '
            f'tokens: raise it{_or_smaller_images(prompts[0])}'
        )
    if len(kept) < len(prompts):
        logging.warning(
            '%s of %s prompts are longer than rollout.max_prompt_tokens=%d and are left out; the longest has %s',
            f'{len(prompts) - len(kept):,}', f'{len(prompts):,}', most, f'{max(lengths):,}',
        )  # fmt: skip
    return kept


def refuse_long(prompts: Sequence[Prompt], most: int, benchmark: str) -> list[Prompt]:
    """All prompts, since a benchmark is scored whole. Raises ValueError where one exceeds `most` tokens."""
    for number, prompt in enumerate(prompts, start=1):
        if len(prompt.tokens) > most:
            raise ValueError(
                f'{benchmark}, problem {number} of {len(prompts)}: the prompt has {len(prompt.tokens)} tokens, '
                f'evaluate.max_prompt_tokens is {most}; raise it{_or_smaller_images(prompt)} (a benchmark is scored whole)'
            )
    return list(prompts)


def _or_smaller_images(prompt: Prompt) -> str:
    return ', or lower model.most_pixels: images take a token for each feature' if prompt.images else ''
