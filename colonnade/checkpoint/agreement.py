"""Steps of a save or a load that all ranks take or none: `agreed` raises a CheckpointError of one rank on all of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn

from colonnade.comm.messages import agree
from colonnade.context.parallel_context import ParallelContext
from colonnade.errors import as_checkpoint_errors

before_save: weakref.WeakKeyDictionary[nn.Module, Callable[[], Callable[[], None] | None]] = weakref.WeakKeyDictionary()
"""By model: a weak reference to a function that all ranks call before a save. The function raises on all ranks to refuse the save."""


@contextmanager
def agreed(context: ParallelContext, doing: str) -> Iterator[None]:
    """Run the block on every rank; an error on one is a CheckpointError on all. Collective at its end.

    The block itself must not communicate: a rank that fails in it goes straight to the agreement.
    """
    with agree(context), as_checkpoint_errors(doing):
        yield
