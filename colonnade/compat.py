"""Run scripts written for Colossal-AI: `install()` makes `import colossalai` resolve to colonnade.

The alias is the same module object, not a copy: `colossalai.constants.INITIALIZER_MAPPING` *is* ours.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from types import ModuleType
from typing import Any

from colonnade.config.words import ALIASES
from colonnade.errors import ColonnadeError

_ALIAS = "colossalai"
_HOME = "colonnade"
_KEYS = {"NUM_MICRO_BATCHES": "num_microbatches"}


class _AliasLoader(importlib.abc.Loader):
    def __init__(self, home: str) -> None:
        self._home = home
        self._spec: Any = None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._home)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The import system has just put the alias's spec on the module; it stays what it is.
        module.__spec__ = self._spec


class _AliasFinder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: object, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _ALIAS and not fullname.startswith(f"{_ALIAS}."):
            return None
        home = _HOME + fullname[len(_ALIAS) :]
        try:
            found = importlib.util.find_spec(home)
        except ModuleNotFoundError:
            found = None
        if found is None:
            return None
        is_package = found.submodule_search_locations is not None
        return importlib.machinery.ModuleSpec(fullname, _AliasLoader(home), is_package=is_package)


def install() -> None:
    """Make `colossalai` and every submodule path an alias of `colonnade`. Refuses if a real one is installed.

    From then on a config may also use the name that its keys had there.
    """
    if any(isinstance(finder, _AliasFinder) for finder in sys.meta_path):
        return
    real = importlib.util.find_spec(_ALIAS) if _ALIAS not in sys.modules else sys.modules[_ALIAS].__spec__
    if real is not None:
        raise ColonnadeError(
            f"a real {_ALIAS} is installed at {real.origin}; the alias would hide it. "
            f"Uninstall it, or import {_HOME} by its own name."
        )
    sys.meta_path.insert(0, _AliasFinder())
    ALIASES.update(_KEYS)


def uninstall() -> None:
    """Take the alias away again."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _AliasFinder)]
    for name in [name for name in sys.modules if name == _ALIAS or name.startswith(f"{_ALIAS}.")]:
        del sys.modules[name]
    for key in _KEYS:
        ALIASES.pop(key, None)
