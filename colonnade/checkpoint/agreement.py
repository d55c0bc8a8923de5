"""What all ranks do together: go on or raise the same CheckpointError, and tell each other JSON values.

A context that was never launched is a world of one, in which nothing is communicated.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import nn

from colonnade.comm.messages import agreed_errors, gather_texts
from colonnade.context.parallel_context import ParallelContext
from colonnade.errors import as_checkpoint_errors

before_save: weakref.WeakKeyDictionary[nn.Module, Callable[[], Callable[[], None] | None]] = weakref.WeakKeyDictionary()
"""By model, a (weak) reference to what is called on all ranks before it is saved: it may refuse by raising on all of them."""


@contextmanager
def agreed(context: ParallelContext, doing: str) -> Iterator[None]:
    """Run the block on every rank; an error on one is a CheckpointError on all. Collective at its end.

    The block itself must not communicate: a rank that fails in it goes straight to the agreement.
    """
    with agreed_errors(context.device) if context.is_launched else nullcontext(), as_checkpoint_errors(doing):
        yield


def gather_json(value: Any, context: ParallelContext) -> list[Any]:
    """Every rank's JSON value, in rank order. Collective over the world."""
    text = json.dumps(value)
    return [json.loads(other) for other in (gather_texts(text, context.device) if context.is_launched else [text])]
