"""Running a `.py` config file: its settings come out, nothing of it stays behind.

While the file runs its own folder is first on `sys.path`, so it may import its neighbours. Afterwards
the path is as before, and a neighbour stays in `sys.modules` only if a plain import would find the same one.
"""

from __future__ import annotations
import __future__

import importlib.util
import inspect
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from colonnade.config.schema import KEYS

# Never loaded a second time for the sake of a neighbour of the same name.
_KEPT = frozenset({"colonnade", *sys.stdlib_module_names})


def run_python_file(path: Path, text: str) -> dict[str, Any]:
    """Execute `text`, the content of `path`, and return the names it leaves.

    Functions are kept; modules, classes and dunder names are not. What the text raises passes through.
    """
    code = compile(text, str(path), "exec", dont_inherit=True)
    module = ModuleType(f"<config {path}>")
    module.__file__ = str(path)
    with _beside(path.parent):
        sys.modules[module.__name__] = module  # dataclasses look their own module up
        try:
            exec(code, vars(module))
        finally:
            sys.modules.pop(module.__name__, None)
    return {name: value for name, value in vars(module).items() if _is_setting(name, value, module)}


def _is_setting(name: str, value: Any, module: ModuleType) -> bool:
    if name.startswith("__") or inspect.ismodule(value) or inspect.isclass(value):
        return False
    if isinstance(value, __future__._Feature):
        return False
    # `from math import log` is no setting of ours; `def log()` is one, and wrong.
    imported = inspect.isroutine(value) and getattr(value, "__module__", None) != module.__name__
    return not (imported and name in KEYS)


@contextmanager
def _beside(folder: Path) -> Iterator[None]:
    """Let imports find the modules of `folder` first, and undo that."""
    importlib.invalidate_caches()
    hidden = _take_out(name for name in _neighbours(folder) if not _is_from(sys.modules.get(name), folder))
    before = set(sys.modules)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        if str(folder) in sys.path:
            sys.path.remove(str(folder))
        new = {name.partition(".")[0] for name in sys.modules if name not in before}
        for name in new:
            if _is_from(sys.modules.get(name), folder):
                _keep_if_importable(name)
        sys.modules.update(hidden)


def _neighbours(folder: Path) -> set[str]:
    """The names under which a plain import finds a module or package of `folder`."""
    modules = {entry.stem for entry in folder.glob("*.py") if not entry.stem.startswith("__")}
    packages = {entry.parent.name for entry in folder.glob("*/__init__.py")}
    return (modules | packages) - _KEPT


def _is_from(module: ModuleType | None, folder: Path) -> bool:
    """Whether a top-level module was found directly in `folder`, not in an environment further down."""
    return _home(module) == os.path.realpath(folder)


def _home(module: ModuleType | None) -> str | None:
    """The entry of `sys.path` that a top-level module was found in, as far as it tells."""
    places = getattr(module, "__path__", None) or [getattr(module, "__file__", None)]
    first = next(iter(places), None)
    return os.path.realpath(os.path.dirname(first)) if isinstance(first, str) else None


def _keep_if_importable(name: str) -> None:
    """Leave a module loaded only if `import name` now would give the same file."""
    taken = _take_out([name])
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    file = getattr(taken[name], "__file__", None)
    if spec is not None and spec.origin and file and os.path.realpath(spec.origin) == os.path.realpath(file):
        sys.modules.update(taken)


def _take_out(names: Iterable[str]) -> dict[str, ModuleType]:
    """Remove these modules and their submodules from `sys.modules` and return them."""
    tops = set(names)
    taken = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in tops}
    for name in taken:
        del sys.modules[name]
    return taken
