"""The reductions that a placement requires: the ranks that store the same elements, and the sums over some of them.

Arithmetic on a layout, without process groups. The divisor is the number of ranks that saw distinct data, never the size of the
group that communicates; expert gradients are correct because of that.

Three functions: `holding` (the ranks that store the same elements), `owed` (the required reduction over each mode, with its divisor)
and `joint_ranks` (the ranks of one sum over several modes at once). All follow from two sets of ranks:

- the replicas: the ranks of the same pipeline stage (or of the tied stages) with the same position on every mode that shards the
  parameter;
- the reach: the ranks over which the local gradient is summed, one required mode after another.

Experts show why both matter. With 4 data ranks and experts sharded over 2 of them, the reach over data is all 4 ranks, but only 2 of
these store the same experts. So the sum is over these 2 (EXPERT_DATA), and the divisor is 4.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from colonnade.context.layout import Axis, Digit, Layout, Listed, joined, ranks_with, refine
from colonnade.context.parallel_mode import ParallelMode
from colonnade.errors import PlacementError, listed
from colonnade.parallel.placement import Placement, Replicate, Shard, Tied


@dataclass(frozen=True)
class Owed:
    """A required reduction of a parameter: an all-reduce over `ranks` (of `mode`), divided by `divisor`."""

    mode: ParallelMode
    ranks: tuple[int, ...]
    divisor: int


@dataclass(frozen=True)
class Holding:
    """The global ranks that store the same elements of the reduced gradient, this rank among them."""

    ranks: tuple[int, ...]
    rank: int

    @property
    def count(self) -> int:
        """|H|, the number of replicas: in a norm over the world the elements of each rank count 1/|H|."""
        return len(self.ranks)

    @property
    def index(self) -> int:
        """This rank's index among the replicas."""
        return self.ranks.index(self.rank)


def holding(layout: Layout, placement: Placement, rank: int) -> Holding:
    """The ranks that store the same elements as `rank`: same stage (or tied), same position on every mode that shards.

    Args:
        layout: The parallel layout.
        placement: The placement of the parameter.
        rank: A global rank.
    """

    # If the layout permutes ranks, everything is computed for positions on the grid, where axes are products of digits, and
    # mapped back to ranks. `owed` and `joint_ranks` do the same.
    def find() -> Holding:
        if layout.places is not None:
            found = holding(layout.on_grid, placement, layout.places[rank])
            return Holding(_back(layout, found.ranks), rank)
        return Holding(_ranks(_reach(layout, placement, rank).holders, rank), rank)

    return _once(layout, placement, (rank, "holding"), find)


def owed(layout: Layout, placement: Placement, rank: int) -> tuple[Owed, ...]:
    """The required reductions of the local gradient on `rank`, by mode; empty if it needs none.

    Args:
        layout: The parallel layout.
        placement: The placement of the parameter.
        rank: A global rank.
    """
    if layout.places is not None:

        def find() -> tuple[Owed, ...]:
            assert layout.places is not None
            found = owed(layout.on_grid, placement, layout.places[rank])
            return tuple(Owed(factor.mode, _back(layout, factor.ranks), factor.divisor) for factor in found)

        return _once(layout, placement, (rank, "owed"), find)
    return tuple(factor for factor, _ in _factors(layout, placement, rank))


def check_same_data(layout: Layout, placement: Placement, rank: int, name: str) -> None:
    """Raise PlacementError for a parameter on groups of an initializer that contradict its placement.

    Either a sharded parameter whose shards would be numbered in another order than its ranks; or a mode registered with
    data="same" whose groups contain ranks with distinct data, unless the placement says that its gradient needs no reduction
    over these data.
    """
    axis_names = {axis.mode: axis.name for axis in layout.axes}
    for mode, spec in placement.modes.items():
        # Torch numbers the ranks of a group in ascending order. If the layout permutes ranks, a group ordered by position on the
        # axis may not ascend; then shards and ranks do not match. Searched once per layout and mode.
        key = ("out of order", mode)
        if isinstance(spec, Shard) and layout.places is not None and mode in axis_names and key not in layout.derived:
            groups = (
                sorted(group, key=lambda rank: layout.coordinates(rank)[axis_names[mode]])
                for group in layout.groups(mode)
            )
            layout.derived[key] = next((group for group in groups if group != sorted(group)), [])
        misordered = layout.derived.get(key) if isinstance(spec, Shard) else None
        if misordered:
            positions = [layout.local_rank(mode, other) for other in misordered]
            raise PlacementError(
                f"{name} is sharded over {mode} (as with zero stage 3), and the ranks {list(misordered)} of this mode would store "
                f"its shards in the order {positions}: the groups of an initializer differ from those of the grid, and torch numbers "
                f"the ranks of a group in ascending order. Use zero stage 2, or return groups whose ranks ascend along {mode.name}, too",
                code="C161",
            )

        is_listed = layout.has(mode, rank) and isinstance(layout.groups(mode), Listed)
        if mode.data != "same" or isinstance(spec, Tied) or spec.owes == "nothing" or not is_listed:
            continue
        group = layout.group_of(mode, rank)
        for axis in layout.axes:
            at = {layout.coordinates(other)[axis.name] for other in group} if _is_distinct(axis, placement) else set()
            if len(at) > 1:
                raise PlacementError(
                    f"{name} is placed on {mode}, whose ranks see the same data, but the group {list(group)} has ranks at positions "
                    f"{listed(sorted(at))} of the axis {axis.name!r}, which see distinct data: no sum over ranks gives the gradient "
                    f"of a single process. Let the initializer group ranks of one replica; or give the mode an axis of its own, "
                    f"parallel=dict({mode.value}=dict(size={len(group)})), so that positions follow from its groups; or register it "
                    f"with data='distinct'",
                    code="C162",
                )


def joint_ranks(layout: Layout, placement: Placement, factors: tuple[Owed, ...], rank: int) -> tuple[int, ...]:
    """The ranks of a single sum that performs all `factors` at once.

    Args:
        layout: The parallel layout.
        placement: The placement of the parameter.
        factors: Some of its required reductions.
        rank: A global rank.
    """
    wanted = frozenset(factor.mode for factor in factors)

    def find() -> tuple[int, ...]:
        if layout.places is not None:
            return _back(layout, joint_ranks(layout.on_grid, placement, factors, layout.places[rank]))
        reach = _reach(layout, placement, rank)
        factors_here = _factors(layout, placement, rank)
        if reach.atoms is not None:
            return _ranks(_union(region for factor, region in factors_here if factor.mode in wanted), rank)

        # Groups that cross each other: a sum over one mode brings in ranks with other groups of another mode, and so on.
        reached, frontier = {rank}, [rank]
        while frontier:
            at = frontier.pop()
            if placement.tied is not None:
                # Not symmetric: stages without the parameter reach its replicas, but not the other way round.
                reach = _find_reach(layout, placement, at)
            for factor, _ in _find_factors(layout, placement, at, reach):
                if factor.mode in wanted:
                    frontier.extend(other for other in factor.ranks if other not in reached)
                    reached.update(factor.ranks)
        return tuple(sorted(reached))

    return _once(layout, placement, (rank, wanted), find)


def _back(layout: Layout, places: Iterable[int]) -> tuple[int, ...]:
    """The ranks at these positions of the grid, ascending."""
    return tuple(sorted(layout.at_places[place] for place in places))


# --------------------------------------------------------------------------------------------------
# Replicas and reach: as products of digits if all modes are such products, else rank by rank.
# --------------------------------------------------------------------------------------------------


Region = dict[Digit, Collection[int]]
"""A set of ranks around one rank: the values that each digit may have. All other digits are those of the rank.

If every mode is a product of digits, so is every set of ranks here, and no loop over ranks is needed, even in a world of a million.
If listed groups are no such product, a region has a single digit, the rank itself, and its values are listed.
"""


@dataclass(frozen=True)
class _Step:
    """A mode over which a reduction is required: leads from a rank to its group (`values` of `digits`, if it has digits)."""

    mode: ParallelMode
    divisor: int
    digits: tuple[Digit, ...] | None
    values: Sequence[int] | None = None

    def ranks(self, layout: Layout, rank: int) -> Sequence[int]:
        """The ranks that it reaches from `rank`; empty if the rank is in no group of the mode."""
        if self.digits is not None:
            return ranks_with(rank, [(digit, self.values or range(digit[1])) for digit in self.digits])
        return layout.group_of(self.mode, rank) if layout.has(self.mode, rank) else ()


@dataclass(frozen=True)
class _Reach:
    """The replicas of the parameter on a rank, and those of them that all its steps together reach (`reached`)."""

    steps: list[_Step]
    atoms: tuple[Digit, ...] | None
    holders: Region
    reached: Region

    def by_step(self, layout: Layout, rank: int) -> Iterator[tuple[_Step, Region]]:
        """For each single step, the replicas that it reaches from `rank`."""
        for step in self.steps:
            if self.atoms is not None:
                yield step, _intersection(_region(self.atoms, step.digits or (), step.values), self.holders)
            elif ranks := step.ranks(layout, rank):
                yield step, _intersection({(1, layout.world_size): ranks}, self.holders)


def _once(layout: Layout, placement: Placement, question: Any, answer: Callable[[], Any]) -> Any:
    """The answer, computed once per layout and placement; it does not depend on the shape of the tensor."""
    key = (placement.key[0], question)
    if key not in layout.derived:
        layout.derived[key] = answer()
    return layout.derived[key]


def _reach(layout: Layout, placement: Placement, rank: int) -> _Reach:
    return _once(layout, placement, (rank, "reach"), lambda: _find_reach(layout, placement, rank))


def _find_reach(layout: Layout, placement: Placement, rank: int) -> _Reach:
    tied, axis_digits = placement.tied, layout.grid.digits
    for mode in placement.modes:
        if not layout.has(mode):
            raise PlacementError(
                f"a parameter is placed on {mode}, which has no groups here; the modes are "
                f"{listed(known.name for known in layout.modes)}. Add it under `parallel`, or place the parameter on one of these.",
                code="C030",
            )
    if tied is not None and max(tied.stages) >= layout.grid.sizes["pipeline"]:
        raise PlacementError(
            f"parameter {tied.key!r} is tied at stages {list(tied.stages)}, but the pipeline has stages "
            f"0 to {layout.grid.sizes['pipeline'] - 1}",
            code="C030",
        )

    # The stages that store any shard of the parameter: the own one, or the tied ones.
    stage = stride, size = axis_digits["pipeline"]
    own_stage = rank // stride % size
    stages: Sequence[int] = (own_stage,)
    if tied is not None:
        if own_stage not in tied.stages:
            raise PlacementError(
                f"parameter {tied.key!r} is tied at stages {list(tied.stages)}, but this rank is at stage {own_stage}; "
                f"place it on the ranks of those stages only",
                code="C030",
            )
        stages = sorted(set(tied.stages))

    # The steps. A mean over each axis whose ranks see distinct data: together their batches are the global batch. A sum without
    # a divisor over each mode with partial gradients (`owes="sum"`), and over the stages of a tie: there, each rank has a partial
    # gradient of the same data.
    steps = [
        _Step(axis.mode, axis.size, (axis_digits[axis.name],)) for axis in layout.axes if _is_distinct(axis, placement)
    ]
    distinct = {axis.mode for axis in layout.axes if axis.data == "distinct"}
    for mode, spec in placement.modes.items():
        if isinstance(spec, Replicate) and spec.owes == "sum" and mode not in distinct:
            steps.append(_Step(mode, 1, layout.groups(mode).digits))
    if tied is not None:
        steps.append(_Step(ParallelMode.PIPELINE, 1, (stage,), stages))

    # The atoms: digits of which the axes and all modes of the placement are products; None if there are none. The stages of a
    # tie are values of the pipeline's digit, which must therefore be an atom.
    products = [step.digits for step in steps] + [layout.groups(mode).digits for mode in placement.shards]
    known = [product for product in products if product is not None]
    atoms = refine([axis_digits.values(), *known], layout.world_size) if len(known) == len(products) else None
    if atoms is not None and (not atoms or tied is None or stage in atoms):
        # Replicas may differ from the rank in every digit except those that shard the parameter, and in the stage only for ties.
        sharding = _region(atoms, [digit for mode in placement.shards for digit in layout.groups(mode).digits or ()])
        fixed = {*sharding, *_region(atoms, [stage])}
        holders: Region = {atom: range(atom[1]) for atom in atoms if atom not in fixed}
        if stage not in sharding:
            holders[stage] = stages
        # The order of steps over products of digits does not matter: together they reach every value of all their digits.
        everything = _union(_region(atoms, step.digits or (), step.values) for step in steps)
        return _Reach(steps, atoms, holders, _intersection(everything, holders))

    # Rank by rank, for modes whose groups cross the axes or each other.
    axes = [(digit, stages if digit == stage else range(digit[1])) for digit in axis_digits.values()]
    replicas = set(ranks_with(rank, axes[::-1]))
    for mode in placement.shards:
        at = layout.local_rank(mode, rank)
        replicas &= {group[at] for group in layout.groups(mode) if at < len(group)}
    # A sum over one mode brings in ranks with other groups of another mode; repeated until no new rank is reached.
    reached, frontier = {rank}, [rank]
    done: list[set[int]] = [set() for _ in steps]
    while frontier:
        here = frontier.pop()
        for step, seen in zip(steps, done, strict=True):
            if here not in seen:
                ranks = step.ranks(layout, here)
                seen.update(ranks)
                frontier.extend(other for other in ranks if other not in reached)
                reached.update(ranks)
    world = (1, layout.world_size)
    return _Reach(steps, None, {world: replicas}, {world: sorted(reached & replicas)})


def _factors(layout: Layout, placement: Placement, rank: int) -> tuple[tuple[Owed, Region], ...]:
    return _once(
        layout,
        placement,
        (rank, "owed"),
        lambda: _find_factors(layout, placement, rank, _reach(layout, placement, rank)),
    )


def _find_factors(layout: Layout, placement: Placement, rank: int, reach: _Reach) -> tuple[tuple[Owed, Region], ...]:
    found = []
    for step, region in reach.by_step(layout, rank):
        mode = _name(layout, placement, step.mode, region, rank)
        found.append((mode, region, step.divisor))
    if prod(_count(region) for _, region, _ in found) != _count(reach.reached):
        # The modes are not independent among the replicas (for example, an expert group that crosses data and tensor ranks
        # unevenly), so there is no sum for each of them, only one over all.
        (first, *_), *_ = found
        mode = _name(layout, placement, first, reach.reached, rank)
        found = [(mode, reach.reached, prod(divisor for _, _, divisor in found))]
    return tuple(
        (Owed(mode, _ranks(region, rank), divisor), region)
        for mode, region, divisor in found
        if _count(region) > 1 or divisor > 1
    )


def _region(atoms: tuple[Digit, ...], digits: Sequence[Digit], values: Sequence[int] | None = None) -> Region:
    """All values of these digits, or the given ones."""
    inside = (atom for atom in atoms if any(stride <= atom[0] < stride * size for stride, size in digits))
    return {atom: values or range(atom[1]) for atom in inside}


def _intersection(a: Region, b: Region) -> Region:
    return {
        digit: a[digit] if a[digit] == b[digit] else [value for value in a[digit] if value in b[digit]]
        for digit in a
        if digit in b
    }


def _union(regions: Iterable[Region]) -> Region:
    """The union of regions around one rank. For the stage digit the last region wins: a tie is the last step, and only its
    stages store the parameter."""
    return {digit: values for region in regions for digit, values in region.items()}


def _count(region: Region) -> int:
    return prod(len(values) for values in region.values())


def _ranks(region: Region, rank: int) -> tuple[int, ...]:
    values = [(digit, found if isinstance(found, Sequence) else sorted(found)) for digit, found in region.items()]
    return tuple(ranks_with(rank, sorted(values, key=lambda item: item[0], reverse=True)))


def _is_distinct(axis: Axis, placement: Placement) -> bool:
    spec = placement.on(axis.mode)
    return axis.data == "distinct" and not (isinstance(spec, (Shard, Replicate)) and spec.owes == "nothing")


def _name(layout: Layout, placement: Placement, mode: ParallelMode, region: Region, rank: int) -> ParallelMode:
    """The mode of which these ranks are a group: EXPERT_DATA in place of DATA for experts that are sharded over DATA ranks."""
    axes = {axis.mode for axis in layout.axes}
    if mode not in axes or mode is ParallelMode.PIPELINE or _is_group(layout, mode, region, rank):
        return mode
    candidates = (
        other
        for other in layout.modes
        if other.data == "distinct" and other not in axes and other not in placement.shards
    )
    return next((other for other in candidates if _is_group(layout, other, region, rank)), mode)


def _is_group(layout: Layout, mode: ParallelMode, region: Region, rank: int) -> bool:
    """Whether the region around `rank` is its group of `mode`."""
    digits = layout.groups(mode).digits
    if digits is not None and all(len(values) == size for (_, size), values in region.items()):
        return joined(digits) == joined(sorted(region, reverse=True))
    group = layout.group_of(mode, rank) if layout.has(mode, rank) else ()
    return len(group) == _count(region) and tuple(group) == _ranks(region, rank)
