"""Fields that may name a user's code, how it is checked, and its identity: a hash of its source."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

from ml_collections import ConfigDict

from bapo_jax.config.field import Check, Need
from bapo_jax.own.method import ARGUMENTS, advantage_of, is_own, load_own, own_filter
from bapo_jax.own.module import fingerprints_of_code
from bapo_jax.replay.own_replay import try_own_replay

JUDGES = ('task.name', 'task.reward')  # what an evaluation depends on, too
OWN_FIELDS = (*JUDGES, *ARGUMENTS)


def or_own(*choices: str) -> Check:
    """A check for one of these names, or the name of a user's function."""
    words = ', '.join(choices)
    return Check(
        f"{words}, or yours as 'module:function'",
        lambda value: value in choices or is_own(value),
        f"is unknown; choose one of {words}, or name a function of yours as 'module:function'",
    )


def check_own_code(c: ConfigDict, need: Need) -> None:
    """Tries the user's functions of the method. The learner tries the surrogate, which needs JAX."""
    tries = {
        'learner.advantage': advantage_of,
        'learner.surrogate': functools.partial(load_own, 'learner.surrogate'),
        'replay.fresh_filter': own_filter,
        'replay.kind': lambda name: try_own_replay(name, c),
    }
    for field, try_it in tries.items():
        if is_own(name := _value(c, field)):
            try:
                try_it(name)
            except ValueError as error:
                need(False, str(error))


def code_of(config: ConfigDict, fields: Sequence[str] = OWN_FIELDS) -> dict[str, str]:
    """Returns a source hash, by name, of each user's module that these fields of a config name.

    Raises ValueError if a module cannot be imported.
    """
    named = {field: _value(config, field) for field in fields}
    return fingerprints_of_code({f: name for f, name in named.items() if '.' in name or ':' in name})


def _value(config: ConfigDict, field: str) -> Any:
    return functools.reduce(operator.getitem, field.split('.'), config)
