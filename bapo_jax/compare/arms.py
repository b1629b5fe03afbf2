"""The runs of a comparison: each arm is a config with settings, and has one run per seed."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from bapo_jax import config as config_lib
from bapo_jax.config.own_code import code_of
from bapo_jax.machine import cli


class Arm(NamedTuple):
    """One config with its settings. All its runs differ only in the seed."""

    name: str  # of its run directories, without the seed
    flags: tuple[str, ...]  # of bapo-train


class Job(NamedTuple):
    """One run of an arm."""

    arm: str
    seed: int
    workdir: Path
    flags: tuple[str, ...]  # of bapo-train, without --workdir
    steps: int
    code: dict[str, str]  # source hash of each of the user's modules that it uses, by name


def arms_of(configs: Sequence[str], settings: Sequence[str], shared: Sequence[str]) -> list[Arm]:
    """The arms: every config with every combination of `settings`, each 'FIELD=VALUE,VALUE,…'.

    `shared` are flags such as --config.task.limit=600, which every arm gets. A comma inside brackets or
    quotes does not separate values. Raises ValueError if two arms are equal or a setting has no value.
    """
    choices = []
    for setting in settings:
        field, equals, values = setting.partition('=')
        if not (field and equals and values):
            raise ValueError(f'--set={setting}: write --set=FIELD=VALUE,VALUE')
        choices.append([(field.removeprefix('config.'), value) for value in values_in(values)])
    arms = []
    for config in configs:
        for chosen in itertools.product(*choices):
            name = ' '.join([arm_name(config), *(f'{field}={value}' for field, value in chosen)])
            changed = (f'--config.{field}={value}' for field, value in chosen)
            arms.append(Arm(name, (f'--config={config}', *shared, *changed)))
    if twice := sorted({arm.name for arm in arms if [a.name for a in arms].count(arm.name) > 1}):
        raise ValueError(f'{twice[0]} is given twice; leave one out')
    return arms


def values_in(text: str) -> list[str]:
    """Splits 'VALUE,VALUE,…' at its commas, except inside brackets and quotes."""
    found = re.findall(r"""((?:\([^)]*\)|\[[^]]*\]|'[^']*'|"[^"]*"|[^,])+)""", text)
    return [value.strip() for value in found]


def arm_name(config: str) -> str:
    """'quickstart:grpo' -> 'quickstart grpo', 'configs/math.py' -> 'math'."""
    file, _, method = config.partition(':')
    return f'{Path(file).stem} {method}'.strip()


def jobs_of(arms: Sequence[Arm], seeds: int, steps: int | None, folder: Path) -> list[Job]:
    """The runs, seed by seed, so that a comparison that is cut short has all arms at its first seeds.

    `steps` None leaves the configs' own. Raises ValueError, naming the arm, if a config cannot run, or if it
    gives its length in epochs: only the run itself learns from the data how many steps these are.
    """
    jobs = []
    for seed in range(seeds):
        for arm in arms:
            of_all = (*arm.flags, *((f'--config.steps={steps}',) if steps else ()), f'--config.seed={seed}')
            directory = re.sub(r'[^\w.=+-]+', '_', arm.name)
            config = config_lib.resolve(cli.config_with(of_all, config_lib.check_fields))
            if not config.steps:
                raise ValueError(
                    f'{arm.name}: steps=0, so the length is epochs={config.epochs}; give --steps=N, the same '
                    'number of steps for all runs'
                )
            workdir = folder / f'{directory}_seed{seed}'
            jobs.append(Job(arm.name, seed, workdir, of_all, config.steps, code_of(config)))
    return jobs
