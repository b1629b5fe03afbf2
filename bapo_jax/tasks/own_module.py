"""A module of the user's, by the name that a field of the config has."""

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
    """The module, from the current folder or wherever Python finds it. `field` says where its name stands: 'task.reward=…'.

    Raises ValueError where it cannot be imported.
    """
    if os.getcwd() not in sys.path and '' not in sys.path:  # an installed command has its own folder there, not the user's
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(module)
    except (Exception, SystemExit) as error:  # a user's module can fail in any way while it is imported
        absent = error.name if isinstance(error, ModuleNotFoundError) else None
        if absent and (module == absent or module.startswith(f'{absent}.')):
            remedy = 'its directory must be on PYTHONPATH, or the current one'
        elif absent:
            remedy = 'install it, or put its directory on PYTHONPATH'
        else:
            frames = traceback.extract_tb(error.__traceback__)
            own = [frame for frame in frames if Path(frame.filename).stem == module.rpartition('.')[2]]
            remedy = f'mend {own[-1].filename}, line {own[-1].lineno}' if own else 'mend the module'
        raise ValueError(f'{field}: importing {module} failed ({type(error).__name__}: {error}); {remedy}') from error


def fingerprints_of_code(task: ConfigDict) -> dict[str, str]:
    """A hash of the source of each module of the user's that judges, by its name: a task of theirs, and task.reward's.

    What such a module imports does not count. `task` is the config's section. Raises ValueError as `import_own` does.
    """
    fields = {task.name: f'task.name={task.name!r}'} if '.' in task.name else {}
    if task.reward:
        fields[task.reward.partition(':')[0]] = f'task.reward={task.reward!r}'
    files = {name: getattr(import_own(name, field), '__file__', None) for name, field in fields.items()}
    return {name: hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16] for name, file in files.items() if file}
