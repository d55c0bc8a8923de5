"""`colossalai.context.random`: the streams of the global context as functions."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import wraps
from typing import Any

from colonnade.context.parallel_mode import ParallelMode
from colonnade.core import global_context

_chosen = ExitStack()


def seed(parallel_mode: ParallelMode) -> AbstractContextManager[None]:
    """Draw from the stream of the mode inside the block."""
    return global_context.streams.use(parallel_mode)


def set_mode(parallel_mode: ParallelMode) -> None:
    """Draw from the stream of the mode from now on, until `set_mode` or `reset_seeds`."""
    _chosen.close()
    _chosen.enter_context(seed(parallel_mode))


def add_seed(parallel_mode: ParallelMode, seed: int, overwrite: bool = False) -> None:
    """Start a stream for the mode; one that is there is an error unless it may be overwritten."""
    global_context.streams.add(parallel_mode, seed, overwrite)


def reset_seeds() -> None:
    """Forget every stream."""
    _chosen.close()
    global_context.streams.clear()


def with_seed(function: Callable[..., Any], parallel_mode: ParallelMode) -> Callable[..., Any]:
    """The function, with its random numbers drawn from the stream of the mode."""

    @wraps(function)
    def run(*args: Any, **options: Any) -> Any:
        with global_context.streams.use(parallel_mode):
            return function(*args, **options)

    return run
