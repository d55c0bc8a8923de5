"""The one place where a context is kept for users who do not want to pass theirs around."""

from __future__ import annotations

from colonnade.context.parallel_context import ParallelContext

global_context = ParallelContext()
"""What `launch` fills unless it is given another. Library code does not read it: it is passed a context."""


def given_or_global(context: ParallelContext | None) -> ParallelContext:
    """The context that a user gave, or the global one: called where a user calls, and nowhere further in."""
    return global_context if context is None else context
