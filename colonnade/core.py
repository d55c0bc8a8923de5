"""The global parallel context, which is the default wherever a caller passes no context."""

from __future__ import annotations

from colonnade.context.parallel_context import ParallelContext

global_context = ParallelContext()
"""The default context of `launch`, and of functions that are called without `context=`.

Only these, handlers that are used without an engine, the shortcuts of `colonnade.utils`, and `colonnade.compat` use it; all
other code of the library is passed a context."""


def given_or_global(context: ParallelContext | None) -> ParallelContext:
    """The given context, or the global one if it is None."""
    return global_context if context is None else context
