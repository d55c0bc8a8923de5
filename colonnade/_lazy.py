"""Names of a package that are imported when they are first asked for.

`import colonnade`, the command line and layout planning must not pay for torch; Python's module-level
`__getattr__` makes that invisible to the user.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from typing import Any


def lazy_names(package: str, name: str, names: Mapping[str, str]) -> Any:
    """The object called `name`: from the module that `names` gives, or the submodule of that name."""
    if name in names:
        return getattr(importlib.import_module(names[name]), name)
    submodule = f"{package}.{name}"
    if not name.startswith("_") and importlib.util.find_spec(submodule) is not None:
        return importlib.import_module(submodule)
    raise AttributeError(f"module {package!r} has no attribute {name!r}")
