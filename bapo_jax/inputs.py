"""Reads and checks a run's inputs, cheapest first: model shape, tokenizer, benchmarks, training prompts.

It reads no weights and uses no device.
"""

from __future__ import annotations

import contextlib
import os
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from ml_collections import ConfigDict

from bapo_jax import config as config_lib
from bapo_jax.config.trace_rules import reads_traces
from bapo_jax.groups import Prompt
from bapo_jax.machine import hub
from bapo_jax.models import hf
from bapo_jax.models.adapters import check_adapter, model_of
from bapo_jax.models.decoder import ModelConfig
from bapo_jax.models.embedding import mean_states
from bapo_jax.models.tokenizer import read_tokenizer, tokenizer_file
from bapo_jax.models.vision.patches import windows_of
from bapo_jax.prompts.dots import Embed
from bapo_jax.prompts.ngrams import ngram_embeddings
from bapo_jax.prompts.protocol import PromptSelector
from bapo_jax.prompts.selector import make_selector
from bapo_jax.tasks import TASKS, encode_prompts, get_task, leave_out_long, refuse_long, repeats, solver
from bapo_jax.tasks.jsonl import short
from bapo_jax.tasks.sight import Sight
from bapo_jax.tasks.traces import Traces, traces_of
from bapo_jax.tasks.turns import asks_in_chat, turn_end

# Each benchmark has its own range of ids, so that questions share no random keys. Training ids start at 0.
_FIRST_ID = 1 << 24
_SAMPLE = 64  # questions whose tokens are decoded as a check


class Inputs(NamedTuple):
    """The inputs that a config names, without weights and devices."""

    config: ConfigDict  # resolved; model.path is a directory
    written: ConfigDict  # the same, but with model.path as it was given, perhaps a hub name
    commits: dict[str, str]  # the hub's commit of each name (hub.commits_of)
    model: ModelConfig
    tokenizer: Any
    stop_tokens: tuple[int, ...]
    prompts: list[Prompt]  # for training
    benchmarks: dict[str, list[Prompt]]
    selector: PromptSelector
    steps: int
    sight: Sight | None  # None without a vision tower
    traces: Traces | None = None  # what others wrote, if the method learns from it


def read_inputs(config: ConfigDict, weights: bool = True, commits: Mapping[str, str] = {}) -> Inputs:
    """Checks the config, reads data and tokenizer, and with `weights` checks the files of weights.

    Fetches from the hub what the config names there; `commits` are those that a run recorded for these names.
    Raises ValueError or OSError, mostly FileNotFoundError, naming the field and the remedy.
    """
    with hub.commits_of(commits) as known:
        return _read(config_lib.resolve(config), weights, known)


def _read(written: ConfigDict, weights: bool, commits: dict[str, str]) -> Inputs:
    config = located(written, weights)
    model = model_of(config.model)
    check_adapter(config.model)
    positions_suffice(config, model)
    if weights:
        hf.check_weights(config.model.path, model)
    tokenizer, ends = read_tokenizer(config.model.path, model)
    sight = make_sight(config, model)
    benchmarks = benchmark_prompts(config, tokenizer, sight)
    truths = get_task(config.task.name).training_problems(
        config.task.train, limit=config.task.limit, seed=config.task.seed
    )
    # Built-in tasks drop repeats when they read; the control of diagrams repeats on purpose.
    if config.task.name not in TASKS:
        truths = repeats.left_out(truths, config.task.train)
    with _of(f'task.train={config.task.train}'):
        prompts = encode_prompts(
            config.task.name, truths, tokenizer, template=config.task.template, sight=sight
        )
    check_questions(config, prompts, tokenizer)
    check_turn_end(config, prompts, tokenizer, ends)
    prompts = leave_out_long(prompts, config.rollout.max_prompt_tokens)
    repeats.report_contradictions(prompts, config.task.train)
    repeats.report_shared(prompts, benchmarks)
    if sight:
        grids = [grid for prompt in prompts for grid in sight.grids_of(prompt)]
        sight.row_windows = max((windows_of(grid, model.vision) for grid in grids), default=0)
    if len(truths) > _FIRST_ID:
        raise ValueError(
            f'{len(truths):,} training problems, but at most {_FIRST_ID:,} are supported; set '
            f'task.limit to at most {_FIRST_ID:,}'
        )
    batch = config_lib.fresh_prompts(config)
    steps = config.steps or config.epochs * (len(prompts) // batch)
    selector = make_selector(
        config,
        prompts,
        batch,
        steps=steps,
        solve=solver(config, tokenizer),
        embed=embedder(config, tokenizer, weights),
    )
    if config.evaluate.track_prompts > len(prompts):
        raise ValueError(
            f'evaluate.track_prompts={config.evaluate.track_prompts} exceeds the {len(prompts)} training '
            'prompts; lower it'
        )
    traces = None
    if reads_traces(config):
        with _of('replay.traces'):
            traces = traces_of(config, prompts, len(truths), tokenizer, ends)
    return Inputs(
        config, written, commits, model, tokenizer, ends, prompts, benchmarks, selector, steps, sight, traces
    )


def embedder(config: ConfigDict, tokenizer: Any, weights: bool = True) -> Embed:
    """Returns a function that embeds prompts: by the model `prompts.dots.embeddings`, or else by n-grams.

    The model reads the text of the prompt's tokens. It computes when the function is called; with `weights`
    its files are checked here.
    """
    named = config.prompts.dots.embeddings
    if not named or config.prompts.selector != 'dots':
        return ngram_embeddings
    path = hub.model_folder(named, 'prompts.dots.embeddings', weights)
    model = hf.read_config(path, config.model.dtype)
    if weights:
        hf.check_weights(path, model)
    own, _ = read_tokenizer(path, model)

    def embed(prompts: Sequence[Prompt]) -> np.ndarray:
        texts = tokenizer.batch_decode([prompt.tokens for prompt in prompts])
        return mean_states(path, model, own(texts, add_special_tokens=False)['input_ids'])

    return embed


def make_sight(config: ConfigDict, model: ModelConfig) -> Sight | None:
    """The image settings of `config.model`; None if the model has no vision tower."""
    m = config.model
    if not (v := model.vision):
        return None
    tower = v.patch_size, v.spatial_merge_size, v.temporal_patch_size
    return Sight(m.path, v.image_token, *m.pixels, tower=tower)


def benchmark_prompts(
    config: ConfigDict, tokenizer: Any, sight: Sight | None = None
) -> dict[str, list[Prompt]]:
    """The questions of every benchmark in config.evaluate.benchmarks; `sight` comes from `make_sight`.

    Raises ValueError if a name is unknown, a file is bad or a prompt is too long, and FileNotFoundError if a
    file is missing.
    """
    task, prompts = get_task(config.task.name), {}
    for i, name in enumerate(config.evaluate.benchmarks):
        first_id = _FIRST_ID * (1 + i)
        truths = task.benchmark(name)
        repeats.report_repeats(truths, name)
        with _of(f'evaluate.benchmarks={name}'):
            encoded = encode_prompts(
                config.task.name,
                truths,
                tokenizer,
                template=config.task.template,
                first_id=first_id,
                sight=sight,
            )
        check_questions(config, encoded, tokenizer)
        prompts[name] = refuse_long(encoded, config.evaluate.max_prompt_tokens, name)
    return prompts


@contextlib.contextmanager
def _of(setting: str) -> Iterator[None]:
    """Inside, the message of a ValueError begins with the setting that names the data."""
    try:
        yield
    except ValueError as e:
        raise ValueError(f'{setting}: {e}') from e


def check_questions(config: ConfigDict, prompts: Sequence[Prompt], tokenizer: Any) -> None:
    """Raises ValueError, naming the tokenizer's file, if the tokens do not represent the questions.

    Distinct questions must have distinct tokens, and a sample must decode to its text. Texts are compared in
    Unicode's composed form (NFC), to which Qwen's tokenizers convert all text: the two ways to write é are
    the same question to the policy.
    """
    task, c = get_task(config.task.name), config.task

    def text(prompt: Prompt) -> str:
        return unicodedata.normalize('NFC', task.prompt_text(prompt.ground_truth, c.template, tokenizer))

    for prompt in prompts[:: max(1, len(prompts) // _SAMPLE)]:
        asked = text(prompt)
        tokens = tokenizer(asked, add_special_tokens=False)['input_ids']  # without the added image tokens
        if (said := unicodedata.normalize('NFC', tokenizer.decode(tokens))) != asked:
            raise ValueError(
                f'{tokenizer_file(config.model.path)}: the tokens of the question {_apart(asked, said)} '
                f'decode to {_apart(said, asked)}; the tokenizer is damaged or of another model. Download '
                'the model directory again'
            )
    first: dict[bytes, Prompt] = {}
    for prompt in prompts:
        other = first.setdefault(prompt.tokens.tobytes(), prompt)
        if other.ground_truth != prompt.ground_truth and (one := text(other)) != (two := text(prompt)):
            raise ValueError(
                f'{tokenizer_file(config.model.path)}: the questions {_apart(one, two)} and '
                f'{_apart(two, one)} have the same tokens; '
                'the tokenizer is damaged or of another model. Download the model directory again'
            )


def _apart(text: str, other: str) -> str:
    """A text shortened for a message; it starts shortly before it first differs from `other`."""
    start = max(0, len(os.path.commonprefix([text, other])) - 20)
    return ('…' if start else '') + short(text[start:])


def check_turn_end(
    config: ConfigDict, prompts: Sequence[Prompt], tokenizer: Any, ends: Sequence[int]
) -> None:
    """Raises ValueError if the questions are chats whose template ends an answer with none of the `ends`.

    `ends` are the stop tokens. Otherwise the policy would write that end and continue with turns of the user.
    """
    task, after = get_task(config.task.name), turn_end(tokenizer)
    token = tokenizer(after, add_special_tokens=False)['input_ids'][0] if after else None
    if token is None or token in ends:
        return
    if prompts and asks_in_chat(task, prompts[0].ground_truth, config.task.template, tokenizer):
        raise ValueError(
            f'{config.model.path}/generation_config.json: the chat template ends an answer with '
            f'{tokenizer.decode([token])!r} (token {token}), which is not a stop token, so responses would '
            'continue with further turns; add it to eos_token_id there, or choose another template than '
            f'task.template={config.task.template!r}'
        )


def positions_suffice(config: ConfigDict, model: ModelConfig) -> None:
    """Raises ValueError if sequences may become longer than the model supports."""
    for section in ('rollout', 'evaluate'):
        prompt, response = config[section].max_prompt_tokens, config[section].max_response_tokens
        if 0 < model.max_positions < prompt + response:
            raise ValueError(
                f'{section}.max_prompt_tokens={prompt} + {section}.max_response_tokens={response} = '
                f'{prompt + response} tokens, '
                f'but max_position_embeddings of {config.model.path}/config.json is {model.max_positions}; '
                'lower them, or extend '
                "the model's context: for Qwen2.5-Math, model.max_positions=16384 with "
                'model.rope_theta=40000 is common'
            )


def located(config: ConfigDict, weights: bool = True) -> ConfigDict:
    """A copy of the config whose model.path is a directory.

    Raises the errors of `hub.model_folder`, before time is spent on reading data.
    """
    config = ConfigDict(config.to_dict())
    config.model.path = hub.model_folder(config.model.path, weights=weights)
    return config
