"""Checks of a config's fields by their dotted names. Each notes what is wrong and goes on, so all problems are reported at once."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

from ml_collections import ConfigDict

from bapo_jax.terminal import without_passwords

Need = Callable[[bool, str], None]  # need(condition, message): notes the message as a problem where the condition is false


def one_of(need: Need, c: ConfigDict, field: str, choices: Container) -> None:
    """The field has one of these values."""
    need(value(c, field) in choices, f'{field}={value(c, field)!r} is unknown; choose one of {", ".join(map(str, choices))}')


def at_least_one(need: Need, c: ConfigDict, *fields: str) -> None:
    """Each field is 1 or more."""
    for field in fields:
        need(value(c, field) >= 1, f'{field}={value(c, field)} must be at least 1')


def not_negative(need: Need, c: ConfigDict, *fields: str) -> None:
    """Each field is 0 or more, and finite."""
    for field in fields:
        need(0 <= value(c, field) < float('inf'), f'{field}={value(c, field)} must be finite and not negative')


def positive(need: Need, c: ConfigDict, *fields: str) -> None:
    """Each field is more than 0, and finite."""
    for field in fields:
        need(0 < value(c, field) < float('inf'), f'{field}={value(c, field)} must be positive and finite')


def no_passwords(need: Need, c: ConfigDict, section: str = '') -> None:
    """No text has a URL with a user or a password: a run's config.json would keep it for all who read that."""
    for name, field in c.items():
        if isinstance(field, ConfigDict):
            no_passwords(need, field, f'{section}{name}.')
        else:
            texts = [text for text in (field if isinstance(field, (list, tuple)) else [field]) if isinstance(text, str)]
            need(texts == [without_passwords(text) for text in texts],
                 f'{section}{name} has a URL with a user or a password, which config.json would show; leave them out')  # fmt: skip


def value(config: ConfigDict, field: str) -> Any:
    """The value of a dotted field."""
    for part in field.split('.'):
        config = config[part]
    return config
