"""`colonnade.parallel.demand`, rank by rank over tables of the whole world: slow, short, and the truth for its tests.

The divisor is the number of ranks that saw distinct data, never the size of
the group that happens to communicate: that is what makes experts come out right.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from colonnade.context.layout import Axis, Layout
from colonnade.context.parallel_mode import ParallelMode
from colonnade.errors import PlacementError, listed
from colonnade.parallel.placement import Placement, Replicate, Shard, Tied


@dataclass(frozen=True)
class Owed:
    """One factor of the reduction a parameter needs: a sum over `ranks` (of `mode`), divided by `divisor`."""

    mode: ParallelMode
    ranks: tuple[int, ...]
    divisor: int


@dataclass(frozen=True)
class Holding:
    """Which world ranks hold the same elements of the final gradient, this rank among them."""

    ranks: tuple[int, ...]
    rank: int

    @property
    def count(self) -> int:
        """|H|: a block counts 1/|H| in a norm over the world."""
        return len(self.ranks)

    @property
    def index(self) -> int:
        """This rank's place among the holders."""
        return self.ranks.index(self.rank)


def holding(layout: Layout, placement: Placement, rank: int) -> Holding:
    """The ranks that hold the same elements as `rank`: same stage (or tied), same position on every shard mode."""
    _check_modes(layout, placement)
    here = {mode: layout.local_rank(mode, rank) for mode in placement.shards}
    same = tuple(
        other
        for other in _ranks_with(layout, placement, rank)
        if all(layout.has(mode, other) and layout.local_rank(mode, other) == at for mode, at in here.items())
    )
    return Holding(same, rank)


def owed(layout: Layout, placement: Placement, rank: int) -> tuple[Owed, ...]:
    """The sums that the raw gradient on `rank` owes, as factors by mode; empty if it is final as it is."""
    holders = set(holding(layout, placement, rank).ranks)
    factors = [
        _factor(layout, placement, mode, reach & holders, divisor, rank)
        for mode, reach, divisor in _summed(layout, placement, rank)
    ]
    whole = _closure(layout, placement, rank) & holders
    if prod(len(factor.ranks) for factor in factors) != len(whole):
        # The modes do not vary independently among the holders (an expert group across uneven cuts of data
        # and tensor, say): then it is one sum over all of them.
        divisor = prod(factor.divisor for factor in factors)
        factors = [_factor(layout, placement, factors[0].mode, whole, divisor, rank)]
    return tuple(factor for factor in factors if len(factor.ranks) > 1 or factor.divisor > 1)


def joint_ranks(layout: Layout, placement: Placement, factors: tuple[Owed, ...], rank: int) -> tuple[int, ...]:
    """The ranks that one sum over all `factors` at once takes in."""
    reached = {rank}
    wanted = {factor.mode for factor in factors}
    grown = True
    while grown:
        before = len(reached)
        for other in list(reached):
            for factor in owed(layout, placement, other):
                if factor.mode in wanted:
                    reached.update(factor.ranks)
        grown = len(reached) > before
    return tuple(sorted(reached))


def _summed(layout: Layout, placement: Placement, rank: int) -> list[tuple[ParallelMode, set[int], int]]:
    """(mode, ranks it reaches from here, divisor) for every mode over which a sum or a mean is owed."""
    found: list[tuple[ParallelMode, set[int], int]] = []
    for axis in layout.axes:
        if _is_distinct(axis, placement):
            found.append((axis.mode, set(_along(layout, axis, rank)), axis.size))
    for mode, spec in placement.modes.items():
        axis_mode = any(mode is axis.mode and axis.data == "distinct" for axis in layout.axes)
        if isinstance(spec, Replicate) and spec.owes == "sum" and not axis_mode and layout.has(mode, rank):
            found.append((mode, set(layout.group_of(mode, rank)), 1))
    tied = placement.tied
    if tied is not None and len(tied.stages) > 1:
        stages = [layout.rank_at(**{**layout.coordinates(rank), "pipeline": stage}) for stage in tied.stages]
        found.append((ParallelMode.PIPELINE, set(stages), 1))
    return found


def _closure(layout: Layout, placement: Placement, rank: int) -> set[int]:
    """Every rank that can be reached by steps along the summed modes."""
    reached, frontier = {rank}, [rank]
    while frontier:
        at = frontier.pop()
        for _, reach, _ in _summed(layout, placement, at):
            frontier.extend(reach - reached)
            reached |= reach
    return reached


def _is_distinct(axis: Axis, placement: Placement) -> bool:
    spec = placement.on(axis.mode)
    return axis.data == "distinct" and not (isinstance(spec, (Shard, Replicate)) and spec.owes == "nothing")


def _along(layout: Layout, axis: Axis, rank: int) -> list[int]:
    here = layout.coordinates(rank)
    return [layout.rank_at(**{**here, axis.name: at}) for at in range(axis.size)]


def _factor(layout: Layout, placement: Placement, mode: ParallelMode, ranks: set[int], divisor: int, rank: int) -> Owed:
    """Name the factor by the mode whose group these ranks are: EXPERT_DATA where experts cut DATA."""
    ordered = sorted(ranks)
    axes = {axis.mode for axis in layout.axes}
    if mode in axes and mode is not ParallelMode.PIPELINE and layout.group_of(mode, rank) != ordered:
        twins = (
            other
            for other in layout.modes
            if other.data == "distinct" and other not in axes and other not in placement.shards
        )
        fitting = (other for other in twins if layout.has(other, rank) and layout.group_of(other, rank) == ordered)
        mode = next(fitting, mode)
    return Owed(mode, tuple(ordered), divisor)


def _ranks_with(layout: Layout, placement: Placement, rank: int) -> range | list[int]:
    """The ranks that hold any part of the parameter: this pipeline stage, or the tied ones."""
    pipeline = layout.grid.sizes.get("pipeline", 1)
    if pipeline == 1:
        return range(layout.world_size)
    own = layout.coordinates(rank)["pipeline"]
    stages = _stages(placement.tied, own)
    return [other for other in range(layout.world_size) if layout.coordinates(other)["pipeline"] in stages]


def _stages(tied: Tied | None, own: int) -> tuple[int, ...]:
    if tied is None:
        return (own,)
    if own not in tied.stages:
        raise PlacementError(
            f"parameter {tied.key!r} is tied at stages {list(tied.stages)}, but this rank is at stage {own}. Place the parameter as Tied only on the ranks of stages {list(tied.stages)}.",
            code="C030",
        )
    return tied.stages


def _check_modes(layout: Layout, placement: Placement) -> None:
    for mode in placement.modes:
        if not layout.has(mode):
            raise PlacementError(
                f"a parameter is placed on {mode}, but this layout has no groups of {mode}. The modes are "
                f"{listed(known.name for known in layout.modes)}. Add {mode} under `parallel`, or place the parameter on "
                f"one of these modes.",
                code="C030",
            )
    tied = placement.tied
    if tied is not None and max(tied.stages) >= layout.grid.sizes.get("pipeline", 1):
        raise PlacementError(
            f"parameter {tied.key!r} is tied at stages {list(tied.stages)}, but the pipeline has stages "
            f"0 to {layout.grid.sizes.get('pipeline', 1) - 1}",
            code="C030",
        )
