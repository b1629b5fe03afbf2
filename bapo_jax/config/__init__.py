"""A run's config: defaults, derived values, and checks before any device work. table.py has every field."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ml_collections import ConfigDict

from bapo_jax.config.earlier import MOVED
from bapo_jax.config.field import Change, Field
from bapo_jax.config.rules import CROSS_RULES, full_batch_updates
from bapo_jax.config.table import SECTIONS, TOP_LEVEL
from bapo_jax.machine.help import did_you_mean

_Table = dict[str, Any]  # name -> field or sub-table


def default_config() -> ConfigDict:
    """A config with the defaults of table.py."""
    c = ConfigDict(_defaults(TOP_LEVEL))
    for name, (_, table) in SECTIONS.items():
        c[name] = ConfigDict(_defaults(table))
    return c


def section_defaults(name: str) -> ConfigDict:
    """The defaults of one section."""
    return default_config()[name]


def _defaults(table: _Table) -> dict[str, Any]:
    return {name: row.default if isinstance(row, Field) else _defaults(row) for name, row in table.items()}


def rows(table: _Table | None = None, prefix: str = '') -> Iterator[tuple[str, Field]]:
    """Yields every field with its dotted name."""
    for name, row in (
        {**TOP_LEVEL, **{name: rows for name, (_, rows) in SECTIONS.items()}} if table is None else table
    ).items():
        if isinstance(row, Field):
            yield prefix + name, row
        else:
            yield from rows(row, f'{prefix}{name}.')


def fields_that(change: Change) -> tuple[str, ...]:
    """The dotted names of the fields with this kind of `Change`."""
    return tuple(name for name, row in rows() if row.change is change)


def fields_of_a_host() -> tuple[str, ...]:
    """The dotted names of the fields that only host 0 reads, or that may differ between hosts."""
    return tuple(name for name, row in rows() if not row.alike)


def value(config: ConfigDict, field: str) -> Any:
    """The value of a dotted field."""
    for part in field.split('.'):
        config = config[part]
    return config


def with_later_fields(settings: Mapping[str, Any]) -> ConfigDict:
    """A run's settings, with defaults for fields that are newer than the version that started the run.

    Raises ValueError if a section is damaged.
    """
    for name in SECTIONS:
        if not isinstance(settings.get(name, {}), Mapping):
            raise ValueError(f'{name} of config.json is not a section; restore that file')
    c = ConfigDict(_merged(default_config().to_dict(), settings))
    derive(c)
    return c


def _merged(defaults: dict[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    both = {**defaults, **settings}
    return {
        name: _merged(defaults[name], part)
        if isinstance(defaults.get(name), dict) and isinstance(part, Mapping)
        else part
        for name, part in both.items()
    }


def resolve(config: ConfigDict) -> ConfigDict:
    """A checked copy, in which every 0 that means 'derive it' is replaced by the derived value.

    Raises ValueError, naming fields and remedy, if the config cannot run.
    """
    check_fields(config)
    c = ConfigDict(config.to_dict())
    derive(c)
    check(c)
    return c


def derive(c: ConfigDict) -> None:
    """Fills in every 0 that the table says follows from other fields, in place."""
    c.evaluate.max_prompt_tokens = c.evaluate.max_prompt_tokens or c.rollout.max_prompt_tokens
    c.evaluate.max_response_tokens = c.evaluate.max_response_tokens or c.rollout.max_response_tokens
    waits = c.replay.reevaluate_every if c.replay.reevaluate == 'delayed' else 0
    c.replay.bad_capacity = c.replay.bad_capacity or (waits + 1) * c.learner.batch_groups
    c.replay.high_capacity = c.replay.high_capacity or c.replay.high_recent_steps * c.learner.batch_groups
    c.replay.repo.per_prompt = c.replay.repo.per_prompt or 2 * c.rollout.group_size
    c.replay.traces.demonstrations = c.replay.traces.demonstrations or c.learner.batch_groups
    c.replay.fifo.capacity = c.replay.fifo.capacity or 6 * c.learner.batch_groups
    c.replay.freshper.capacity = c.replay.freshper.capacity or 50_000 // max(1, c.rollout.group_size) or 1
    c.replay.rollout_replay.fresh = c.replay.rollout_replay.fresh or max(1, c.learner.batch_groups // 2)
    c.replay.rollout_replay.capacity = c.replay.rollout_replay.capacity or c.learner.batch_groups
    c.rollout.concurrency = c.rollout.concurrency or 2048 // max(1, c.rollout.group_size) or 1
    slots = c.rollout.group_size * c.learner.slot_tokens
    c.learner.row_tokens = c.learner.row_tokens or c.rollout.max_prompt_tokens + (
        slots or c.rollout.max_response_tokens
    )
    schedule = c.learner.schedule
    if schedule.kind != 'constant':  # with a constant rate, `steps` may change freely
        schedule.decay_updates = schedule.decay_updates or max(
            0, full_batch_updates(c) - schedule.warmup_updates
        )


def fresh_prompts(c: ConfigDict) -> int:
    """The number of prompts of a step, for a resolved config."""
    return c.replay.rollout_replay.fresh if c.replay.kind == 'rollout_replay' else c.learner.batch_groups


def check_fields(config: ConfigDict) -> None:
    """Raises ValueError, naming all of them, if the config has unknown fields or lacks some."""
    problems = _other_fields(config, default_config(), '')
    if problems:
        raise ValueError('the config cannot run:\n  - ' + '\n  - '.join(problems))


def _other_fields(config: ConfigDict, default: ConfigDict, section: str) -> list[str]:
    place, there = section[:-1] or 'the config', ', '.join(sorted(default.keys()))
    problems = []
    for name in config:
        if name not in default:
            moved = MOVED.get(section + name)
            remedy = (
                f'use {moved}, its new name' if moved else f'choose one of the fields of {place}: {there}'
            )
            meant = did_you_mean(section + name, (field for field, _ in rows()))
            problems.append(f'{section}{name}: no such field{"" if moved else meant}; {remedy}')
    for name, value in default.items():
        if name not in config:
            problems.append(
                f'{section}{name} is missing; begin the config with default_config() of bapo_jax.config'
            )
        elif isinstance(value, ConfigDict):
            if isinstance(config[name], ConfigDict):
                problems += _other_fields(config[name], value, f'{section}{name}.')
            else:
                problems.append(
                    f'{section}{name} must be a section, got {config[name]!r}; set {section}{name}.FIELD'
                )
    return problems


def check(c: ConfigDict) -> None:
    """Raises one ValueError that lists all impossible values and combinations."""
    problems = []

    def need(condition: bool, message: str) -> None:
        if not condition:
            problems.append(message)

    for name, row in rows():
        need(row.check.holds(value(c, name)), f'{name}={value(c, name)!r} {row.check.wrong}')
    for rule in CROSS_RULES:
        rule(c, need)
    if problems:
        raise ValueError('the config cannot run:\n  - ' + '\n  - '.join(problems))
