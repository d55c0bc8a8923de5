"""Adapters for `colonnade verify`: scripts of other frameworks need no `colonnade.watch`.

Each framework has one file here. Its function `replacements(script)` yields the functions of the framework that are replaced while
`verify` runs the script: the one that returns the model and its optimizer (it calls `watch`, or attaches a recorder), the
loaders, and the ones that choose dtypes, group sizes or write checkpoints. The file is loaded when the script, or a package that
it uses, imports the module of `ADAPTERS`; a script of plain torch loads none of them.

The things that a framework divides, casts and clips by design are listed in docs/reference/verify.md.
"""

from __future__ import annotations

import importlib
import importlib.abc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from typing import Any

Replacement = tuple[Any, str, Callable[[Any], Any]]
"""(owner, name of the function, a function that takes the original and returns its replacement)"""

ADAPTERS = {
    "accelerate.accelerator": "colonnade.proof.frameworks.accelerate",
    "transformers.trainer": "colonnade.proof.frameworks.transformers_trainer",
    "deepspeed": "colonnade.proof.frameworks.deepspeed",
}
"""For each module of a framework: the adapter that is loaded right after the import of this module."""


@contextmanager
def frameworks_adapted(install: Callable[[Any], None]) -> Iterator[None]:
    """Call `install` with each adapter whose framework is imported before or in the block."""
    waiting = dict(ADAPTERS)
    for name in [name for name in waiting if name in sys.modules]:
        install(importlib.import_module(waiting.pop(name)))
    finder = _AfterImport(waiting, install)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _AfterImport(importlib.abc.MetaPathFinder):
    """Finds modules as Python would, and loads an adapter after the code of its module has run."""

    def __init__(self, waiting: dict[str, str], install: Callable[[Any], None]) -> None:
        self._waiting, self._install = waiting, install

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name not in self._waiting:
            return None
        adapter = self._waiting.pop(name)
        others = [finder for finder in sys.meta_path if finder is not self]
        spec = next((found for finder in others if (found := finder.find_spec(name, path, target)) is not None), None)
        if spec is None or spec.loader is None:
            return spec
        loader: Any = spec.loader
        own = loader.exec_module

        def exec_module(module: Any) -> None:
            own(module)
            self._install(importlib.import_module(adapter))

        loader.exec_module = exec_module
        return spec
