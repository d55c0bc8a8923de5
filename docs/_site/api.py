"""The reference of a module: for the site by autodoc, for plain copies from signatures and docstrings."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from typing import Any


def directive(module: str) -> str:
    """What Sphinx makes the page of: a list of the names, then each with its docstring."""
    names = "".join(f"- [`{name}`](#{module}.{name})\n" for name in _names(module))
    lines = [f".. automodule:: {module}", "   :members:", f"   :exclude-members: {_HIDDEN}", "   :no-index-entry:"]
    members = "\n".join(lines[:3])
    return f"{names}\n```{{eval-rst}}\n{members}\n```\n"


def in_words(module: str) -> str:
    """The same as Markdown."""
    home = importlib.import_module(module)
    return "\n".join(line for name in _names(module) for line in _entry(name, getattr(home, name), "##"))


_HIDDEN = "__init__, __weakref__"


def _names(module: str) -> list[str]:
    home = importlib.import_module(module)
    listed = getattr(home, "__all__", None)
    own = (name for name, thing in vars(home).items() if getattr(thing, "__module__", None) == module)
    return [name for name in (listed or own) if not name.startswith("_") and hasattr(home, name)]


def _entry(name: str, thing: Any, level: str) -> Iterator[str]:
    yield f"{level} {name}{_signature(thing)}"
    yield ""
    yield inspect.cleandoc(thing.__doc__ or "") if callable(thing) else ""
    yield ""
    if inspect.isclass(thing):
        for each, member in vars(thing).items():
            if not each.startswith("_") and inspect.isfunction(member) and member.__doc__:
                yield from _entry(f"{name}.{each}", member, level + "#")


def _signature(thing: Any) -> str:
    try:
        return str(inspect.signature(thing)) if callable(thing) else ""
    except (TypeError, ValueError):
        return ""
