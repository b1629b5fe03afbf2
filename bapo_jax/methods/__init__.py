"""The methods. Each is four choices: which prompts, which policy answers, what is trained on, how it learns.

Each method is a row of overrides of config fields. To add a method, add a row, not a trainer
(docs/methods.md). Configs select a row with `--config=FILE:METHOD`.

    python -m bapo_jax.methods    # each row, and how it differs from GRPO
"""

from __future__ import annotations

from ml_collections import ConfigDict

from bapo_jax.machine.help import did_you_mean
from bapo_jax.methods.bapo import BAPO_ROWS
from bapo_jax.methods.method import Fields, Method
from bapo_jax.methods.off_policy import OFF_POLICY
from bapo_jax.methods.on_policy import ON_POLICY

METHODS: dict[str, Method] = {**ON_POLICY, **OFF_POLICY, **BAPO_ROWS}


def apply_method(config: ConfigDict, name: str, task: str = '') -> None:
    """Writes a row's overrides into the config, including those for `task` (a name in configs/).

    Raises ValueError if the method is unknown.
    """
    if name not in METHODS:
        raise ValueError(f'method {name!r} is unknown{did_you_mean(name, METHODS)}; see `bapo-methods`')
    row = METHODS[name]
    config.update_from_flattened_dict({**row.fields, **row.of_task.get(task, {})})
    config.method = name


def differs_from(name: str, other: str) -> Fields:
    """The overrides of a row that the other row does not have with the same value."""
    theirs = METHODS[other].fields
    return {field: value for field, value in METHODS[name].fields.items() if theirs.get(field) != value}


def differs_from_grpo(name: str) -> Fields:
    """The overrides of a row that GRPO's row does not have with the same value."""
    return differs_from(name, 'grpo')
