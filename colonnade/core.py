"""The one place where a context is kept for users who do not want to pass theirs around."""

from __future__ import annotations

from colonnade.context.parallel_context import ParallelContext

global_context = ParallelContext()
"""The context that `launch` fills unless it is given another, and that functions take whose `context=` is left out.

Only these, handlers that are used without an engine, the shortcuts of `colonnade.utils` and `colonnade.compat` look here;
all other code of the library is passed a context."""


def given_or_global(context: ParallelContext | None) -> ParallelContext:
    """The context that a user gave, or the global one: for functions that users call."""
    return global_context if context is None else context
