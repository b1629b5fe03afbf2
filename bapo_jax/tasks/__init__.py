"""What is asked and how an answer is judged: one module per task, all with the same functions.

A task module has

    BENCHMARKS: dict[str, str]       the names `benchmark` knows, with a short description of each
    TEMPLATES: dict[str, str]        the names `prompt_text` knows, with the text or its description
    training_problems(source, *, limit, seed) -> list[ground truth]     the questions trained on
    benchmark(name) -> list[ground truth]                               the questions of a test set
    prompt_text(ground_truth, template, tokenizer) -> str               a question as the policy reads it
    asked(ground_truth, prompt text) -> ground truth                    with what that prompt demands of a response's form
    check_ground_truth(ground_truth)                                    ValueError, naming the field, where none can be judged by it
    verify(response, ground_truth) -> (Verdict, answer text or None)    raises on no response text whatever
    verify_all(responses, ground_truths) -> list of those               many at once, on all cores where they take long
    VOTES: bool                      whether equal answer texts are agreement, so that a majority of them (maj@n) says something

where a ground truth is a JSON-serialisable dict that holds the question and what its verifier needs.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np

from bapo_jax.groups import Prompt

TASKS = ('countdown', 'math')


def get_task(name: str) -> ModuleType:
    """The task module called `name`. Only that module is imported. ValueError on an unknown name."""
    if name not in TASKS:
        raise ValueError(f'task.name is {name!r}; choose one of {", ".join(TASKS)}')
    return importlib.import_module(f'bapo_jax.tasks.{name}')


def encode_prompts(
    task_name: str, ground_truths: Sequence[Any], tokenizer: Any, *, template: str, max_prompt_tokens: int, first_id: int = 0
) -> list[Prompt]:
    """Renders and tokenises every question. Prompt i has id `first_id + i` and int32 tokens [prompt tokens].

    No special tokens are added: a template that wants them writes them. A prompt of more than `max_prompt_tokens` tokens is a
    ValueError, never cut: the end of a question is where it asks.
    """
    task = get_task(task_name)
    prompts = []
    for row, ground_truth in enumerate(ground_truths):
        text = task.prompt_text(ground_truth, template, tokenizer)
        tokens = np.asarray(tokenizer.encode(text, add_special_tokens=False), np.int32)
        if len(tokens) > max_prompt_tokens:
            raise ValueError(
                f'{task_name} row {row}: the prompt has {len(tokens)} tokens, rollout.max_prompt_tokens is {max_prompt_tokens}; '
                'raise it, or drop the row'
            )
        prompts.append(Prompt(first_id + row, task_name, tokens, task.asked(ground_truth, text)))
    return prompts
