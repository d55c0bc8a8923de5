"""`on_ranks`: a test whose body runs on every rank of a world; `body_of` is that body for other callers of `run_world`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from importlib import import_module
from typing import Any

from colonnade.testing import run_world


def on_ranks(n: int | str, **options: Any) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Run the decorated test on `n` ranks with its fixtures and parameters; `options` are those of `run_world`.

    `n` may be the name of the parameter that has the number.
    """

    def decorate(test: Callable[..., Any]) -> Callable[..., None]:
        @wraps(test)
        def start(**kwargs: Any) -> None:
            ranks = kwargs[n] if isinstance(n, str) else n
            run_world(ranks, _run, test.__module__, test.__name__, kwargs, **options)

        return start

    return decorate


def _run(module: str, test: str, kwargs: dict[str, Any]) -> None:
    # By name: the module holds the decorated function, whose pickle would start a world in every rank.
    getattr(import_module(module), test).__wrapped__(**kwargs)


def body_of(test: Callable[..., None]) -> Callable[..., None]:
    """The body of a test that `on_ranks` decorates, as a function for every rank, with positional arguments."""
    return partial(_run_with, test.__module__, test.__name__)


def _run_with(module: str, test: str, *args: Any) -> None:
    getattr(import_module(module), test).__wrapped__(*args)
