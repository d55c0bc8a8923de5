"""What one rank has of a whole: its part of a placed tensor, and its elements of a parameter in a sharded optimizer.

`ShardedOptimizer` is all that a checkpoint must know of an optimizer that shares its state among ranks, so that each
writes and reads just its own elements. `ZeroOptimizer` has it, and an optimizer of yours may.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from colonnade.context.layout import Layout
from colonnade.errors import PlacementError, listed
from colonnade.parallel.placement import Placement

MASTER = "master"
"""The name of a master copy in `FlatShard.state`. Only sharded optimizers load it; others have none."""


@dataclass(frozen=True, eq=False)
class FlatShard:
    """Elements [start, stop) of a parameter's local part, in the order they have in memory, and what is kept of them.

    `ranks` share the parameter among themselves. `state` has 1-d tensors of `stop - start` elements, and values that
    are the same for the whole parameter: not tensors, or tensors of another shape. (In a checkpoint the elements of a
    0-d parameter look like such a tensor; all but `step` are loaded as elements.)
    """

    start: int
    stop: int
    ranks: tuple[int, ...]
    state: dict[str, Any]


@runtime_checkable
class ShardedOptimizer(Protocol):
    """An optimizer each of whose ranks keeps the state of some elements of a parameter.

    `param_groups` hold the model's parameters on every rank, as in torch. No method is collective. If it shards another
    optimizer, `optimizer_class` may say which, so that its checkpoints load into that one too. For `engine.memory()` and
    `engine.precision_table()`, `stepped` may be the torch optimizer of this rank's elements, and `masters` its master copies.
    """

    param_groups: list[dict[str, Any]]

    def flat_shard(self, parameter: Tensor) -> FlatShard | None:
        """This rank's elements and all that is kept of them; None for none. Its range is known before the first step.

        The shards of `ranks` must cover the parameter exactly once. Where several teams of ranks share out the same
        parameter, the state of one of them is saved.
        """

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take options and state in torch's format, the state as `flat_shard` gave it: 1-d, of this rank's elements.

        A parameter without a shard here, or without saved state, has no entry.
        """


def section_runs(sections: Sequence[int], at: int, count: int) -> list[tuple[int, int]]:
    """Where part `at` of `count` of several sections lies in the whole of them: (start, length) of each section's share."""
    runs, start = [], 0
    for length in sections:
        share = length // count
        if length % count:
            raise PlacementError(
                f"sections of {listed(sections)} elements cannot each be cut evenly into {count} parts; choose sizes that "
                f"{count} divides, or another number of ranks",
                code="C032",
            )
        runs.append((start + at * share, share))
        start += length
    return runs


def packed_runs(layout: Layout, placement: Placement, rank: int) -> dict[int, list[tuple[int, int]]]:
    """For each dimension with sections: where the rank's part lies in the whole, as `section_runs` says."""
    return {
        shard.dim: section_runs(shard.sections, layout.local_rank(mode, rank), len(layout.group_of(mode, rank)))
        for mode, shard in placement.shards.items()
        if shard.sections
    }


def part_indices(layout: Layout, placement: Placement, rank: int) -> dict[int, tuple[int, int]]:
    """For each dimension that is split: (index of the rank's part, number of parts). The first mode cuts first."""
    found: dict[int, tuple[int, int]] = {}
    for mode, shard in placement.shards.items():
        index, count = found.get(shard.dim, (0, 1))
        size = len(layout.group_of(mode, rank))
        found[shard.dim] = (index * size + layout.local_rank(mode, rank), count * size)
    return found
