"""The model card of an exported policy: what its run recorded, as a README.md for the Hugging Face hub.

A card is published, so of a local path it names the last part only.
"""

from __future__ import annotations

import pprint
import shlex
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from huggingface_hub import ModelCardData

from bapo_jax import __version__
from bapo_jax.config import default_config, fields_that, rows, value, with_later_fields
from bapo_jax.config.field import AMEND, HELD
from bapo_jax.methods import METHODS
from bapo_jax.rollout.start import served_rank
from bapo_jax.run.directory import settings_of
from bapo_jax.run.log.tables import problems, with_interval
from bapo_jax.tasks import get_task
from bapo_jax.tasks.turns import as_chat

_QUESTION = 'A question?'
_EXAMPLES = {  # a question of each task without images, for the lines that show how to ask the policy
    'questions': {'question': _QUESTION, 'answer': ''},
    'math': {'problem': _QUESTION, 'answers': ['']},
    'countdown': {'numbers': [25, 4, 2], 'target': 54},
    'arithmetic': {'a': 12, 'b': 34, 'sign': '+'},
}
# Fields with a hub name or a local path.
_PATHS = ('model.path', 'model.adapter.start', 'task.train', 'evaluate.benchmarks')


class OfAdapter(NamedTuple):
    """What an export knows of an adapter that it writes alone."""

    rank: int
    base: str  # the hub's name of its base without revision, or the last part of its local path
    revision: str  # its commit, if the hub has it and one is known
    on_hub: bool


class Exported(NamedTuple):
    """What an export knows of a policy."""

    name: str  # on the hub, or of the directory
    step: int  # number of training steps
    dtype: str
    sees_images: bool
    run_config: Mapping[str, Any] | None  # config.json of the run; None if no run is known
    scores: Mapping[str, Mapping[str, dict]]  # 'base' and 'trained' -> benchmark -> summary (scores.py)
    license: Mapping[str, str]  # license, license_name and license_link of the base, if it states them
    commit: str  # of this package; '' if unknown
    base: str = ''  # the directory with its config and tokenizer, if another one was given
    tokenizer: Any = None  # None: without a chat template
    adapter: OfAdapter | None = None  # None: a whole model


def model_card(e: Exported) -> str:
    """The text of README.md.

    Raises ValueError if a section of the run's config is damaged or the tokenizer lacks what its task needs.
    """
    commits = (e.run_config or {}).get('hub', {})
    if not isinstance((e.run_config or {}).get('environment', {}), Mapping):
        raise ValueError('environment of config.json is not a section; restore that file')
    config = None if e.run_config is None else with_later_fields(settings_of(e.run_config))
    base, _ = _recorded(config.model.path, commits, '') if config else ('', '')
    if e.adapter and e.adapter.on_hub:
        base = e.adapter.base
    data, _ = _recorded(config.task.train, commits, 'datasets/') if config else ('', '')
    front = ModelCardData(
        base_model=base or None,
        datasets=[data] if data else None,
        library_name='peft' if e.adapter else 'transformers',
        pipeline_tag='image-text-to-text' if e.sees_images else 'text-generation',
        tags=['bapo_jax', *(['rlvr', config.method] if config else [])],
        **e.license,
    )
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(
        loader=loader, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    return environment.get_template('card.md.jinja').render(
        front=front.to_yaml(),
        e=e,
        quoted=repr(e.name),
        prompt='' if e.sees_images else _prompt_code(e, config),
        base=_base_code(e.adapter) if e.adapter else '',
        served=_served(e),
        version=__version__,
        facts=_facts(e, config, commits) if config else [],
        scores=_score_rows(e.scores),
        settings=pprint.pformat(_settings(config, commits), width=100, sort_dicts=False) if config else '',
    )


def _base_code(adapter: OfAdapter) -> str:
    """The arguments of from_pretrained that read its base, in Python."""
    return repr(adapter.base) + (f', revision={adapter.revision!r}' if adapter.revision else '')


def _served(e: Exported) -> str:
    """The command with which vLLM serves it; '' for an adapter that it cannot read (images, a large rank)."""
    if not e.adapter:
        return shlex.join(['vllm', 'serve', e.name])
    try:
        rank = str(served_rank(e.adapter.rank))
    except ValueError:
        return ''
    revision = ['--revision', e.adapter.revision] if e.adapter.revision else []
    files = f'{e.name.split("/")[-1]}={e.name}'
    lora = ['--enable-lora', '--max-lora-rank', rank, '--lora-modules', files]
    return '' if e.sees_images else shlex.join(['vllm', 'serve', e.adapter.base, *revision, *lora])


def _prompt_code(e: Exported, c: Any) -> str:
    """Python that sets `text` to a prompt, from `tokenizer`: as the run's task asks, if it is in _EXAMPLES.

    Otherwise by the chat template if there is one, as bapo-sample asks.
    """
    chats = bool(getattr(e.tokenizer, 'chat_template', None))
    task = get_task(c.task.name) if c and c.task.name in _EXAMPLES else None
    if task and c.task.template in task.TEMPLATES:
        of_task = task, _EXAMPLES[c.task.name], c.task.template, e.tokenizer
        called, text = (as_chat(*of_task) if chats else None), task.prompt_text(*of_task[1:])
    else:
        keywords = {'add_generation_prompt': True, 'tokenize': False}
        called = ([{'role': 'user', 'content': _QUESTION}], keywords, '') if chats else None
        text = _QUESTION
    if called is None:
        return f'text = {pprint.pformat(text, width=90)}'
    messages, keywords, after = called
    given = ', '.join(['messages', *(f'{name}={value!r}' for name, value in keywords.items())])
    return (
        f'messages = {pprint.pformat(messages, width=90, sort_dicts=False)}\n'
        f'text = tokenizer.apply_chat_template({given})' + (f' + {after!r}' if after else '')
    )


def _facts(e: Exported, c: Any, commits: Mapping[str, str]) -> list[tuple[str, str]]:
    """What was trained, on what and how, as rows of a table."""
    row = METHODS.get(c.method)
    data = _shown(c.task.train, commits, with_commit=True)
    where = (e.run_config or {}).get('environment', {})
    facts = {
        'base model': _shown(c.model.path, commits, with_commit=True),
        'task': f'{c.task.name}, template {c.task.template}',
        'training data': f'{data}, {c.task.limit:,} questions at most' if c.task.limit else data,
        'reward': c.task.reward,
        'method': f'{c.method}: {row.summary} ({row.source})' if row else c.method,
        'steps': f'{e.step:,}, each on {c.learner.batch_groups} prompts × {c.rollout.group_size} responses',
        'lengths': f'prompts of {c.rollout.max_prompt_tokens:,} tokens at most, responses of '
        f'{c.rollout.max_response_tokens:,}',
        'learning rate': f'{c.learner.learning_rate:g}, {c.learner.schedule.kind}',
        'seed': str(c.seed),
        'trained on': ', '.join(f'{name} {text}' for name, text in where.items()),
        'weights': e.dtype,
    }
    return [(name, _cell(text)) for name, text in facts.items() if text]


def _score_rows(scores: Mapping[str, Mapping[str, dict]]) -> list[tuple[str, str, str]]:
    """(benchmark and measure, base, trained), in percent; '–' for a policy that was not evaluated."""
    found = {}
    short = _told_apart({name for summaries in scores.values() for name in summaries})
    for policy, summaries in scores.items():
        for name, s in summaries.items():
            for measure in ('mean', 'pass', 'maj'):
                if measure in s:
                    row = f'{short[name]}, {measure}@{s["samples"]}, {problems(s)}'
                    found.setdefault(_cell(row), {})[policy] = with_interval(s, measure)
    return [(row, cells.get('base', '–'), cells.get('trained', '–')) for row, cells in found.items()]


def _told_apart(names: Collection[str]) -> dict[str, str]:
    """The stem of each name or path; if another one has the same, as many last parts as tell them apart."""
    stems = Counter(Path(name).stem for name in names)

    def short(name: str) -> str:
        parts = Path(name).parts
        ends = ('/'.join(parts[-n:]) for n in range(1, len(parts)))
        alone = (end for end in ends if sum(f'/{other}'.endswith(f'/{end}') for other in names) == 1)
        return Path(name).stem if stems[Path(name).stem] == 1 else next(alone, name)

    return {name: short(name) for name in names}


def _settings(config: Any, commits: Mapping[str, str]) -> dict[str, Any]:
    """The fields that define the run and its evaluation, where they differ from the defaults."""
    shown = {*fields_that(HELD), *fields_that(AMEND), 'model.path', 'model.adapter.start', 'steps', 'epochs'}
    default, settings = default_config(), {}
    for name, _ in rows():
        now = value(config, name)
        now = tuple(now) if isinstance(now, list) else now
        if (name in shown or name.startswith('evaluate.')) and now != value(default, name):
            if name in _PATHS:
                now = (
                    tuple(_shown(path, commits) for path in now)
                    if isinstance(now, tuple)
                    else _shown(now, commits)
                )
            settings[name] = now
    return settings


def _recorded(name: str, commits: Mapping[str, str], kind: str) -> tuple[str, str]:
    """(owner/name, commit) of a model or data set ('datasets/') that the run took from the hub; else ''."""
    for recorded, commit in commits.items():
        repo = recorded.removeprefix(kind)
        if recorded.startswith(kind) and (name == repo or name.startswith((f'{repo}/', f'{repo}:'))):
            return repo.partition('@')[0], commit
    return '', ''


def _shown(path: str, commits: Mapping[str, str], with_commit: bool = False) -> str:
    """A hub name as it is; the last part of a local path."""
    for kind in ('', 'datasets/'):
        repo, commit = _recorded(path, commits, kind)
        if repo:
            return f'{path}, commit {commit}' if with_commit else path
    return Path(path).name


def _cell(text: str) -> str:
    """Text that fits into a cell of a Markdown table."""
    return ' '.join(text.split()).replace('|', '\\|')
