"""Error agreement for saves and loads: `agreed` raises a CheckpointError of one rank on all ranks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn

from colonnade.comm.messages import agree
from colonnade.context.parallel_context import ParallelContext
from colonnade.errors import as_checkpoint_errors

save_checks: weakref.WeakKeyDictionary[nn.Module, Callable[[], Callable[[], None] | None]] = weakref.WeakKeyDictionary()
"""Per model, a weak reference to a check that all ranks call before a save; the check raises if the model must not be saved."""


@contextmanager
def agreed(context: ParallelContext, doing: str) -> Iterator[None]:
    """Run the block on every rank; an error on one rank is raised as a CheckpointError on all. Collective at its end.

    The block must not communicate: a rank that fails inside it proceeds directly to the agreement.
    """
    with agree(context), as_checkpoint_errors(doing):
        yield
