"""The fields as pages: `bapo-train --help learner`, and `--fields` for the values of a config."""

from __future__ import annotations

from typing import Any

from ml_collections import ConfigDict

from bapo_jax.config import rows, value
from bapo_jax.config.field import Field
from bapo_jax.config.table import SECTIONS, TOP_LEVEL
from bapo_jax.machine.help import hanging


def topics(width: int) -> dict[str, str]:
    """The pages of --help by topic: '' lists the sections, a section its fields, and a field its rules."""
    pages = {'': _overview(width)}
    for section, (what, table) in SECTIONS.items():
        head = hanging(f'{section}: {what}', width)
        pages[section] = f'{head}\n\n{_entries(table, f"{section}.", width)}'
        for name, row in table.items():
            if isinstance(row, dict):
                pages[f'{section}.{name}'] = _entries(row, f'{section}.{name}.', width)
    return pages | {name: _rules(name, row, width) for name, row in rows()}


def values_page(config: ConfigDict, width: int) -> str:
    """Every field of a config with its value; those that differ from the default are marked."""
    parts = ['* differs from the default', _entries(TOP_LEVEL, '', width, config)]
    for section, (what, table) in SECTIONS.items():
        parts += [hanging(f'{section}: {what}', width), _entries(table, f'{section}.', width, config)]
    return '\n\n'.join(parts)


def _entries(table: dict[str, Any], prefix: str, width: int, config: ConfigDict | None = None) -> str:
    return '\n'.join(
        _entry(name, row, row.default if config is None else value(config, name), width)
        for name, row in rows(table, prefix)
    )


def _entry(name: str, row: Field, now: Any, width: int) -> str:
    """A field with its value and its comment: on one line if they fit, which `grep` finds in a pipe."""
    mark, default = ('  ', '') if now == row.default else ('* ', f' (default: {row.default!r})')
    head, comment = f'{mark}{name}={now!r}', row.comment + default
    line = f'{head}  {comment}'
    return line if len(line) <= width else f'{head}\n{hanging(comment, width, " " * 6, " " * 6)}'


def _overview(width: int) -> str:
    lines = [
        'fields of the config, set with --config.FIELD=VALUE:',
        _entries(TOP_LEVEL, '', width),
        '',
        'and its sections (--help SECTION lists the fields, --help FIELD explains one):',
    ]
    lines += [hanging(what, width, f'  {section:<12}', ' ' * 14) for section, (what, _) in SECTIONS.items()]
    return '\n'.join(lines)


def _rules(name: str, row: Field, width: int) -> str:
    """A field's page: its default and comment, what it must be, and whether a run may change it."""
    lines = [_entry(name, row, row.default, width), '']
    if row.check.words:
        lines.append(hanging(row.check.words, width, '  must be: ', ' ' * 11))
    lines.append(f'  may change in a run: {row.change.value}{"" if row.alike else "; per host"}')
    return '\n'.join(lines)
