"""Points of the save protocol at which a test can make a process fail; they do nothing otherwise."""

from __future__ import annotations

from collections.abc import Callable

hook: Callable[[str], None] | None = None
"""Called with the name of every point that is passed. Only tests set it."""


def fault_point(name: str) -> None:
    """Pass the point `name`."""
    if hook is not None:
        hook(name)
