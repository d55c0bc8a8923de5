"""The reference of a module: for the site by autodoc, for plain copies from signatures and docstrings."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from typing import Any

MODULES = (
    *(
        "colonnade",
        "colonnade.context",
        "colonnade.config",
        "colonnade.registry",
        "colonnade.errors",
        "colonnade.utils",
    ),
    *("colonnade.engine.gradient_handler", "colonnade.engine.schedule", "colonnade.parallel.collectives"),
    *("colonnade.nn", "colonnade.nn.moe", "colonnade.nn.sequence", "colonnade.models"),
    *("colonnade.trainer", "colonnade.trainer.hooks", "colonnade.checkpoint", "colonnade.testing"),
)
"""What is public. A name that several of them have is described in the first."""


def directive(module: str) -> str:
    """What Sphinx makes the page of: a list of the names, then each with its docstring."""
    here = importlib.import_module(module)
    earlier = {
        id(getattr(importlib.import_module(other), name)): other
        for other in reversed(MODULES[: MODULES.index(module)])
        for name in names(other)
    }
    listed, hidden = "", [*_HIDDEN]
    for name in names(module):
        home = earlier.get(id(getattr(here, name)), module)
        listed += f"- [`{name}`](#{home}.{name})\n"
        hidden += [name] if home != module else []
    lines = [f".. automodule:: {module}", "   :members:", f"   :exclude-members: {', '.join(hidden)}"]
    return f":::{{container}} names\n{listed}:::\n" + "\n```{eval-rst}\n" + "\n".join(lines) + "\n```\n"


def in_words(module: str) -> str:
    """The same as Markdown."""
    home = importlib.import_module(module)
    return "\n".join(line for name in names(module) for line in _entry(name, getattr(home, name), "##"))


_HIDDEN = ("__init__", "__weakref__")


def names(module: str) -> list[str]:
    """The public classes and functions of a module."""
    home = importlib.import_module(module)
    public = getattr(home, "__all__", None)
    own = (name for name, thing in vars(home).items() if inspect.isclass(thing) and thing.__module__ == module)
    return [name for name in (public or own) if not name.startswith("_") and callable(getattr(home, name))]


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
