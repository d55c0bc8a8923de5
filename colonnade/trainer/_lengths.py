"""How many batches each rank has, and what follows: settled by all ranks before the first batch, so that none waits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.errors import ConfigError
from colonnade.trainer._reach import gather_json


@dataclass(frozen=True)
class Lengths:
    """The number of batches of every rank; None where a loader does not know."""

    of_rank: tuple[int | None, ...]

    @property
    def known(self) -> bool:
        return None not in self.of_rank

    @property
    def equal(self) -> bool:
        return len(set(self.of_rank)) == 1

    @property
    def longest(self) -> int | None:
        """The batches of the rank that has most; None if any rank does not know."""
        return max(length or 0 for length in self.of_rank) if self.known else None

    def __str__(self) -> str:
        shown = [f"rank {rank} has {length}" for rank, length in enumerate(self.of_rank[:8])]
        return ", ".join(shown) + (", ..." if len(self.of_rank) > 8 else "")


def read_lengths(loader: Any, context: ParallelContext) -> Lengths:
    """Ask every rank. Collective; refuses, on all ranks, loaders that cannot work together."""
    lengths = Lengths(tuple(gather_json(_length(loader), context)))
    if lengths.longest == 0:
        raise ConfigError(
            "the data loader has no batches on any rank; is the dataset smaller than a batch of drop_last?"
        )
    if lengths.known:
        _check_same_data(lengths, context)
        _check_forward(lengths, context)
    return lengths


def moves_together(lengths: Lengths, context: ParallelContext) -> bool:
    """Whether a rank without a batch would be missed by others that have one: their forward passes need it.

    Stages of a pipeline and shards of a tensor run out together, if their lengths are known to be equal.
    """
    by_itself = context.world_size == context.data_parallel_size
    return bool(_other_distinct(context)) or (not lengths.known and not by_itself)


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except (TypeError, NotImplementedError, AttributeError):  # an iterable dataset has none
        return None


def _check_same_data(lengths: Lengths, context: ParallelContext) -> None:
    _check_groups(lengths, context, lambda axis: axis.data == "same", "see the same data")


def _check_forward(lengths: Lengths, context: ParallelContext) -> None:
    others = _other_distinct(context)
    what = f"share forward passes (axes {', '.join(others)})"
    _check_groups(lengths, context, lambda axis: axis.data == "same" or axis.name in others, what)


def _check_groups(lengths: Lengths, context: ParallelContext, joins: Callable[[Any], bool], what: str) -> None:
    """Refuse different lengths among ranks that differ only on the axes that `joins` picks."""
    found: dict[tuple[tuple[str, int], ...], int] = {}
    apart = [axis.name for axis in context.layout.axes if not joins(axis)]
    for rank, length in enumerate(lengths.of_rank):
        here = context.layout.coordinates(rank)
        first = found.setdefault(tuple((name, here[name]) for name in apart), rank)
        if lengths.of_rank[first] != length:
            raise ConfigError(
                f"ranks {first} and {rank} {what}, but have {lengths.of_rank[first]} and {length} batches; give them "
                f"loaders of one length (colonnade.utils.get_dataloader does)"
            )


def _other_distinct(context: ParallelContext) -> list[str]:
    return [
        axis.name
        for axis in context.layout.axes
        if axis.data == "distinct" and axis.size > 1 and axis.mode is not ParallelMode.DATA
    ]
