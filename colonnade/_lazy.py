"""Lazy package attributes: a name is imported on first access, by a module-level `__getattr__`.

`import colonnade`, the command line and the computation of layouts must not import torch.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(
    package: str, names: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` for a package, from {module: "Name other_name"}.

    Submodules are imported on first access too.
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
