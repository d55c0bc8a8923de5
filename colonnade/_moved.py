"""Old paths of modules that were moved: an import of the old path gives the module at its new place, with a warning.

Only paths that the documentation once named are listed. An alias is the module itself, not a copy.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MOVED = {
    "colonnade.context.build": "colonnade.context.layout_builder",
    "colonnade.config.keys": "colonnade.config.settings",
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
    """Gives an existing module under another name."""

    def __init__(self, home: str) -> None:
        self._home = home
        self._spec: Any = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._home)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The import system has just put the alias's spec on the module; its own spec is put back.
        module.__spec__ = self._spec


class MovedModules(MetaPathFinder):
    """Finds the modules of `MOVED` under their old paths."""

    def find_spec(self, fullname: str, path: object, target: ModuleType | None = None) -> ModuleSpec | None:
        new = MOVED.get(fullname)
        if new is None:
            return None
        warnings.warn(f"{fullname} is {new} now", DeprecationWarning, stacklevel=2)
        return ModuleSpec(fullname, AliasLoader(new), is_package=True)


def install() -> None:
    """Put the finder before Python's own, which would load a second copy through the parent's folder."""
    if not any(isinstance(finder, MovedModules) for finder in sys.meta_path):
        sys.meta_path.insert(0, MovedModules())
