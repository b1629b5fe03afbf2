"""The tasks: questions and how answers are judged. Each is a module, here or the user's, with the same API.

A task module has

    BENCHMARKS: dict[str, str]       the names that `benchmark` knows, each with a short description
    TEMPLATES: dict[str, str]        the names that `prompt_text` knows, each with its text or a description
    training_problems(source, *, limit, seed) -> list[ground truth]     the questions to train on
    benchmark(name) -> list[ground truth]                               the questions of a test set
    prompt_text(ground_truth, template, tokenizer) -> str               a question as the policy reads it
    with_demands(ground_truth, text) -> ground truth                    adds the form that the prompt demands
    check_ground_truth(ground_truth)                                    raises ValueError, naming the field,
                                     if it cannot judge an answer
    verify(response, ground_truth) -> (Verdict, answer text or None)    judges any text without raising
    verify_all(responses, ground_truths, budget_s) -> list of those     judges many, on all cores if it takes
                                     long; after `budget_s` seconds the rest are INFRA_ERROR
    VOTES: bool                      whether equal answer texts agree, so that majorities (maj@n) make sense

and may have

    SOLUTIONS: dict[str, function]   by template, f(ground_truth, rng) -> text, a correct response in that
                                     style; raises ValueError if there is none
    reply(ground_truth, turn) -> text or None           a tool: what the environment replies to a turn of the
                                     policy (task.turns), or None if the turn calls no tool. Runs in several
                                     threads, ends by itself, and always replies the same to the same turn. If
                                     it raises, the group is lost
    TOOL_TEMPLATES: tuple[str, ...]  the templates that offer the tool; refused with task.turns=0
    check_reply()                    raises ValueError if this machine cannot run the tool

A ground truth is a JSON-serialisable dict with the question and whatever the verifier needs.
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
from bapo_jax.own.module import import_own
from bapo_jax.tasks.jsonl import short
from bapo_jax.tasks.sight import Sight

TASKS = {  # task.name -> module
    'countdown': 'countdown.task',
    'math': 'mathematics.task',
    'geometry': 'geometry.task',
    'diagrams': 'diagrams.task',
    'arithmetic': 'arithmetic',
    'questions': 'questions',
}
PARTS = (  # what a task module must have
    'BENCHMARKS', 'TEMPLATES', 'VOTES', 'training_problems', 'benchmark', 'prompt_text', 'with_demands',
    'check_ground_truth', 'verify', 'verify_all',
)  # fmt: skip
_CHUNK = 25_000  # questions per process: rendering them takes a few seconds, as long as starting the process
_RENDER_S = 10.0  # timeout in seconds for one question, which usually takes a thousandth of a second
_WORKERS = 16  # each takes about 400 MB


def get_task(name: str) -> ModuleType:
    """Returns a task module by name: one of TASKS or, with a dot, a user's module such as my_tasks.chess.

    Imports only that module. Raises ValueError if the name is unknown or the module is not a task.
    """
    if name in TASKS:
        return importlib.import_module(f'bapo_jax.tasks.{TASKS[name]}')
    if '.' not in name:
        raise ValueError(
            f'task.name is {name!r}; choose one of {", ".join(TASKS)}, '
            'or name your own module, such as my_tasks.chess'
        )
    task = import_own(name, f'task.name={name!r}')
    if missing := [part for part in PARTS if not hasattr(task, part)]:
        raise ValueError(
            f'task.name={name!r}: the module has no {", ".join(missing)}; add it as described in '
            'docs/your_data.md'
        )
    return task


def encode_prompts(
    task_name: str,
    ground_truths: Sequence[Any],
    tokenizer: Any,
    *,
    template: str,
    first_id: int = 0,
    sight: Sight | None = None,
) -> list[Prompt]:
    """Renders and tokenises every question. Prompt i has id `first_id + i` and int32 tokens [prompt tokens].

    Adds no special tokens: a template writes those that it wants. Truncates no prompt, since the question is
    at the end: too long a prompt is left out of training (`leave_out_long`) or refused in a benchmark
    (`refuse_long`). Large numbers of questions are divided among processes. An image takes one token for each
    feature that `sight` gives it. Raises ValueError if there are images but no `sight`.
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
        raise ValueError(
            'the questions have images, but the model has no vision tower; set model.path to a Qwen2.5-VL '
            'model'
        )
    return sight.expanded(tokens, images) if images else tokens


def _encode(
    task_name: str, tokenizer: Any, template: str, ground_truths: Sequence[Any]
) -> list[tuple[np.ndarray, Any]]:
    """Returns each question's int32 tokens, and its ground truth with what the prompt demands."""
    task = get_task(task_name)
    texts = []
    for ground_truth in ground_truths:
        with _rendering(template):
            texts.append(task.prompt_text(ground_truth, template, tokenizer))
    rows = (
        tokenizer(texts, add_special_tokens=False, return_attention_mask=False)['input_ids'] if texts else []
    )
    return [
        (np.asarray(tokens, np.int32), task.with_demands(ground_truth, text))
        for tokens, ground_truth, text in zip(rows, ground_truths, texts, strict=True)
    ]


@contextlib.contextmanager
def _rendering(template: str) -> Iterator[None]:
    """Context for rendering a question: a chat template is a program, which may fail in any way or never end.

    Raises ValueError if it does. The timeout uses a signal, so it works only in the main thread.
    """

    def give_up(*_: Any) -> None:
        raise TimeoutError(f'it did not finish within {_RENDER_S:g} s')

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
            f'task.template={template!r}: the chat template of model.path fails on a question '
            f'({type(error).__name__}: {short(error)}); fix chat_template.jinja or tokenizer_config.json '
            'there, or choose another task.template'
        ) from error
    finally:
        if timed:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


def asks_solver(config: ConfigDict) -> bool:
    """Whether responses are to continue correct ones that the task's solver writes."""
    continues = config.replay.reevaluate == 'continue' or config.prompts.selector == 'adaprefix'
    return continues and config.replay.given_by == 'solver'


def solver(
    config: ConfigDict, tokenizer: Any
) -> Callable[[Prompt, np.random.Generator], np.ndarray | None] | None:
    """Returns a solver, which writes correct responses, or None unless `config` asks for them.

    It returns a prompt's response as int32 tokens without an end token, or None if the task finds none.
    `config` is resolved, and its task has solutions in the style of `config.task.template`.
    """
    if not asks_solver(config):
        return None
    return solver_of(config, tokenizer)


def solver_of(
    config: ConfigDict, tokenizer: Any
) -> Callable[[Prompt, np.random.Generator], np.ndarray | None]:
    """Returns the solver of `config.task`, whatever asks for it; otherwise as `solver`."""
    solution = get_task(config.task.name).SOLUTIONS[config.task.template]

    def solve(prompt: Prompt, rng: np.random.Generator) -> np.ndarray | None:
        try:
            text = solution(prompt.ground_truth, rng)
        except ValueError:
            return None
        return np.array(tokenizer.encode(text, add_special_tokens=False), np.int32)

    return solve


def leave_out_long(prompts: Sequence[Prompt], most: int) -> list[Prompt]:
    """Returns the prompts of at most `most` tokens, in order and with their ids. A warning counts the others.

    Raises ValueError if no prompt is left.
    """
    kept, lengths = [p for p in prompts if len(p.tokens) <= most], [len(p.tokens) for p in prompts]
    if prompts and not kept:
        raise ValueError(
            f'all {len(prompts):,} prompts are longer than rollout.max_prompt_tokens={most} (the shortest '
            f'has {min(lengths):,} tokens); raise it{_or_smaller_images(prompts[0])}'
        )
    if len(kept) < len(prompts):
        logging.warning(
            '%s of %s prompts are longer than rollout.max_prompt_tokens=%d and are left out; raise it to '
            'keep them (the longest has %s tokens)',
            f'{len(prompts) - len(kept):,}', f'{len(prompts):,}', most, f'{max(lengths):,}',
        )  # fmt: skip
    return kept


def refuse_long(prompts: Sequence[Prompt], most: int, benchmark: str) -> list[Prompt]:
    """Returns all prompts: a benchmark is scored whole. Raises ValueError if one exceeds `most` tokens."""
    for number, prompt in enumerate(prompts, start=1):
        if len(prompt.tokens) > most:
            raise ValueError(
                f'{benchmark}, problem {number} of {len(prompts)}: the prompt has {len(prompt.tokens)} '
                f'tokens, but evaluate.max_prompt_tokens is {most}; raise it{_or_smaller_images(prompt)} (no '
                'benchmark problem is left out)'
            )
    return list(prompts)


def _or_smaller_images(prompt: Prompt) -> str:
    return (
        ', or lower the upper limit in model.pixels, so that each image takes fewer tokens'
        if prompt.images
        else ''
    )
