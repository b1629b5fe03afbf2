"""Finds, imports and identifies a user's code: a config field names it as 'module' or 'module:function'."""

from __future__ import annotations

import hashlib
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType


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
            remedy = f'fix {place_of(error, module) or "the module"}'
        raise ValueError(
            f'{field}: importing {module} failed ({type(error).__name__}: {error}); {remedy}'
        ) from error


def find_own(name: str, field: str, example: str) -> Callable:
    """Returns the function that `field` names as 'module:function', such as `example`.

    Raises ValueError if the name has another form, or the module or its function is missing.
    """
    module_name, _, function_name = name.partition(':')
    if not (module_name and function_name):
        raise ValueError(f"{field}={name!r}; expected 'module:function', such as {example}")
    function = getattr(import_own(module_name, f'{field}={name!r}'), function_name, None)
    if not callable(function):
        raise ValueError(
            f'{field}={name!r}: {module_name} has no function {function_name}; add it, or name another'
        )
    return function


def place_of(error: BaseException, module: str) -> str:
    """Returns the file and line of a user's module where `error` arose; '' if it arose elsewhere."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename).stem == module.rpartition('.')[2]]
    return f'{own[-1].filename}, line {own[-1].lineno}' if own else ''


def fingerprints_of_code(fields: Mapping[str, str]) -> dict[str, str]:
    """Returns a source hash, by name, of each user's module that `fields` name.

    `fields` maps a field to 'module' or 'module:function'. What these modules import does not count. Raises
    as `import_own` does.
    """
    named = {name.partition(':')[0]: f'{field}={name!r}' for field, name in fields.items()}
    files = {module: getattr(import_own(module, field), '__file__', None) for module, field in named.items()}
    return {
        module: hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16]
        for module, file in files.items()
        if file
    }
