"""Run scripts written for Colossal-AI: `install()` makes `import colossalai` resolve to colonnade.

The alias is the same module object, not a copy: `colossalai.constants.INITIALIZER_MAPPING` *is* Colonnade's. Code that only
such scripts need is in this folder: their config keys, hooks and signatures (`names` maps each name to its source),
initializers that create their groups themselves, and a gloo group for the ranks of every group.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from types import ModuleType
from typing import Any

from colonnade.compat.communication import AncestralGroups, get_cpu_group
from colonnade.compat.names import add_names, remove_names
from colonnade.config.problems import ALIASES
from colonnade.context.parallel_context import ParallelContext, launch_hooks
from colonnade.errors import ColonnadeError

__all__ = ["get_cpu_group", "install", "uninstall"]

_ALIAS = "colossalai"
_HOME = "colonnade"
_MOVED = {f"{_HOME}.context.process_group_initializer": f"{_HOME}.context.dist_group_initializer"}
"""Modules with another name than in Colossal-AI."""
_KEYS = {"NUM_MICRO_BATCHES": "num_microbatches"}
_hook = AncestralGroups()


class _AliasLoader(importlib.abc.Loader):
    def __init__(self, home: str) -> None:
        self._home = home
        self._spec: Any = None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._home)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The import system has just set the alias's spec on the module; restore its own.
        module.__spec__ = self._spec


class _AliasFinder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: object, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _ALIAS and not fullname.startswith(f"{_ALIAS}."):
            return None
        home = _HOME + fullname[len(_ALIAS) :]
        home = _MOVED.get(home, home)
        try:
            found = importlib.util.find_spec(home)
        except ModuleNotFoundError:
            found = None
        if found is None:
            return None
        is_package = found.submodule_search_locations is not None
        return importlib.machinery.ModuleSpec(fullname, _AliasLoader(home), is_package=is_package)


def install() -> None:
    """Make `colossalai` and every submodule path an alias of `colonnade`.

    Afterwards configs may also use Colossal-AI's names of keys, and launches accept initializers that create their groups
    themselves, and create the groups of `get_cpu_group`.

    Raises:
        ColonnadeError: The real colossalai is installed.
    """
    if any(isinstance(finder, _AliasFinder) for finder in sys.meta_path):
        return
    real = importlib.util.find_spec(_ALIAS) if _ALIAS not in sys.modules else sys.modules[_ALIAS].__spec__
    if real is not None:
        raise ColonnadeError(
            f"the real {_ALIAS} is installed at {real.origin}, and the alias would hide it; "
            f"uninstall it, or import {_HOME} by its own name"
        )
    sys.meta_path.insert(0, _AliasFinder())
    ALIASES.update(_KEYS)
    add_names(_ALIAS, _HOME)
    launch_hooks.append(_hook)
    ParallelContext.get_cpu_group = get_cpu_group  # type: ignore[attr-defined]


def uninstall() -> None:
    """Undo `install`."""
    if not any(isinstance(finder, _AliasFinder) for finder in sys.meta_path):
        return
    remove_names()
    if _hook in launch_hooks:
        launch_hooks.remove(_hook)
        del ParallelContext.get_cpu_group  # type: ignore[attr-defined]
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _AliasFinder)]
    for name in [name for name in sys.modules if name == _ALIAS or name.startswith(f"{_ALIAS}.")]:
        del sys.modules[name]
    for key in _KEYS:
        ALIASES.pop(key, None)
