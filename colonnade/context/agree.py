"""An error on one rank becomes the same error on every rank, so that none waits for a rank that has stopped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from colonnade.context.parallel_context import ParallelContext
from colonnade.context.rendezvous import gather_texts
from colonnade.errors import ColonnadeError, listed


@contextmanager
def agreed_errors(context: ParallelContext) -> Iterator[None]:
    """Run a start-up check that may fail on some ranks only; then raise on all of them, or on none.

    Collective over the world at the end of the block. The ranks whose own check passed raise the error of
    the first rank that failed, with its number.
    """
    mine: ColonnadeError | None = None
    try:
        yield
    except ColonnadeError as error:
        mine = error
    device = context.device if dist.get_backend() == "nccl" else torch.device("cpu")
    failed = torch.tensor([int(mine is not None)], device=device)
    dist.all_reduce(failed)
    if not failed.item():
        return
    note = f"{type(mine).__name__}\n{mine}" if mine is not None else ""
    notes = gather_texts(note, context.device)
    if mine is not None:
        raise mine
    ranks = [rank for rank, text in enumerate(notes) if text.strip()]
    kind, _, text = notes[ranks[0]].partition("\n")
    raise _class_of(kind)(f"on rank {listed(ranks)} (this rank is {context.get_global_rank()}): {text}")


def _class_of(name: str) -> type[ColonnadeError]:
    return next((known for known in _subclasses(ColonnadeError) if known.__name__ == name), ColonnadeError)


def _subclasses(base: type[ColonnadeError]) -> Iterator[type[ColonnadeError]]:
    for known in base.__subclasses__():
        yield known
        yield from _subclasses(known)
