"""A module of the user's, by the name that a field of the config has."""

from __future__ import annotations

import importlib
import os
import sys
from types import ModuleType


def import_own(module: str, field: str) -> ModuleType:
    """The module, from the current folder or wherever Python finds it. `field` says where its name stands: 'task.reward=…'.

    Raises ValueError where it cannot be imported.
    """
    if os.getcwd() not in sys.path and '' not in sys.path:  # an installed command has its own folder there, not the user's
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(module)
    except Exception as error:  # a user's module can fail in any way while it is imported
        raise ValueError(
            f'{field}: importing {module} failed ({type(error).__name__}: {error}); its directory must be on PYTHONPATH, or the '
            'current one'
        ) from error
