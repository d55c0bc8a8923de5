"""The one place where a context is kept for users who do not want to pass theirs around."""

from __future__ import annotations

from colonnade.context.parallel_context import ParallelContext

global_context = ParallelContext()
"""What `launch` fills unless it is given another. Library code never reads it: it is passed a context."""
