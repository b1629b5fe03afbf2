"""Imports a user's module that a config field names."""

from __future__ import annotations

import hashlib
import importlib
import os
import sys
import traceback
from pathlib import Path
from types import ModuleType

from ml_collections import ConfigDict


def import_own(module: str, field: str) -> ModuleType:
    """Imports the module from the current directory or wherever Python finds it.

    `field` says where its name is set, such as 'task.reward=…'. Raises ValueError if it cannot be imported.
    """
    if os.getcwd() not in sys.path and '' not in sys.path:  # an installed command's path lacks it
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(module)
    except (Exception, SystemExit) as error:  # importing a user's module can fail in any way
        absent = error.name if isinstance(error, ModuleNotFoundError) else None
        if absent and (module == absent or module.startswith(f'{absent}.')):
            remedy = 'run in its directory, or add that to PYTHONPATH'
        elif absent:
            remedy = 'install it, or add its directory to PYTHONPATH'
        else:
            frames = traceback.extract_tb(error.__traceback__)
            own = [frame for frame in frames if Path(frame.filename).stem == module.rpartition('.')[2]]
            remedy = f'fix {own[-1].filename}, line {own[-1].lineno}' if own else 'fix the module'
        raise ValueError(
            f'{field}: importing {module} failed ({type(error).__name__}: {error}); {remedy}'
        ) from error


def fingerprints_of_code(task: ConfigDict) -> dict[str, str]:
    """Returns a source hash, by name, of each user's module that judges: the task's and task.reward's.

    What these modules import does not count. `task` is the config's section. Raises as `import_own` does.
    """
    fields = {task.name: f'task.name={task.name!r}'} if '.' in task.name else {}
    if task.reward:
        fields[task.reward.partition(':')[0]] = f'task.reward={task.reward!r}'
    files = {name: getattr(import_own(name, field), '__file__', None) for name, field in fields.items()}
    return {
        name: hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16] for name, file in files.items() if file
    }
