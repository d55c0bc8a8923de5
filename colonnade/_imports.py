"""Imports of names on first access, and imports of modules under their old paths.

`lazy_names`: a name of a package is imported on first access, by a module-level `__getattr__`, because `import colonnade`, the
command line and the computation of layouts must not import torch.

`MOVED`: an import of an old path returns the module at its new path, with a DeprecationWarning. Only paths that the documentation
has mentioned are listed. An alias is the module itself, not a copy.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Callable, Mapping
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def lazy_names(
    package: str, names: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Make `__getattr__`, `__dir__` and `__all__` for a package whose names are imported on first access, as are its submodules.

    `names` maps each module to the names that are imported from it, separated by spaces.
    """
    homes = {name: module for module, words in names.items() for name in words.split()}

    def find(name: str) -> Any:
        if name in homes:
            return getattr(importlib.import_module(homes[name]), name)
        submodule = f"{package}.{name}"
        if not name.startswith("_") and importlib.util.find_spec(submodule) is not None:
            return importlib.import_module(submodule)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return find, lambda: sorted({*vars(sys.modules[package]), *homes}), sorted(homes)


MOVED = {
    "colonnade.context.build": "colonnade.context.layout_builder",
    "colonnade.config.keys": "colonnade.config.settings",
    "colonnade.engine.schedule.check": "colonnade.engine.schedule.replay",
    "colonnade.engine.schedule.simulate": "colonnade.engine.schedule.replay",
    "colonnade.optim.clip_method": "colonnade.optim.clip",
    "colonnade.optim.grad_clip": "colonnade.optim.clip",
    "colonnade.planner": "colonnade.proof.planner",
    "colonnade.planner.clock": "colonnade.proof.planner.hardware",
    "colonnade.planner.job": "colonnade.proof.planner.job",
    "colonnade.planner.plan": "colonnade.proof.planner.plan",
    "colonnade.report": "colonnade.proof.report",
    "colonnade.verification": "colonnade.proof",
    "colonnade.verification.diagnosis": "colonnade.proof",
    "colonnade.verification.diagnosis.causes": "colonnade.proof.claims",
    "colonnade.verification.diagnosis.table": "colonnade.proof.claims",
    "colonnade.verification.explaining": "colonnade.proof",
    "colonnade.verification.explaining.explain": "colonnade.proof.explain",
    "colonnade.verification.explaining.ratio": "colonnade.proof.ratio",
    "colonnade.verification.plugin": "colonnade.proof.plugin",
}


class AliasLoader(Loader):
    """Loads an existing module under another name."""

    def __init__(self, home: str) -> None:
        self._home = home
        self._spec: Any = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._home)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The import system has just set the spec of the alias on the module; restore its own.
        module.__spec__ = self._spec


class MovedModules(MetaPathFinder):
    """Finds the modules of `MOVED` under their old paths."""

    def find_spec(self, fullname: str, path: object, target: ModuleType | None = None) -> ModuleSpec | None:
        new = MOVED.get(fullname)
        if new is None:
            return None
        warnings.warn(f"{fullname} has moved to {new}", DeprecationWarning, stacklevel=2)
        return ModuleSpec(fullname, AliasLoader(new), is_package=True)


def install() -> None:
    """Install the finder before the default finders, which would load a second copy of a moved module through the folder of
    its parent."""
    if not any(isinstance(finder, MovedModules) for finder in sys.meta_path):
        sys.meta_path.insert(0, MovedModules())
