"""Names of a package that are imported when they are first asked for.

`import colonnade`, the command line and layout planning must not pay for torch; Python's module-level
`__getattr__` makes that invisible to the user.
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
    """(`__getattr__`, `__dir__`, `__all__`) of a package whose names come from modules: {module: "Name other_name"}.

    Its submodules can be had without importing them first, too.
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
