"""The reductions that a placement requires for a gradient: over which ranks, and with which divisor.

Arithmetic on a layout, without process groups. Three functions: `holding` (the ranks that store the same elements), `owed` (the
required reduction over each mode, with its divisor) and `joint_ranks` (the ranks of one sum over several modes at once).

The computation for one parameter on one rank (`_find_reach`, then `_find_owed`), with the example of 4 data ranks (0 to 3) and an
expert that is sharded over EXPERT groups of 2, [0, 1] and [2, 3], seen from rank 0:

1. The replicas: the ranks of the same pipeline stage (or of the tied stages) at the same position of every mode that shards the
   parameter. Example: rank 0 is first in its expert group, as is rank 2, so the replicas are {0, 2}.
2. The sums: one per axis with distinct data, whose divisor is the size of the axis; and one per mode with partial gradients or tied
   stages, with divisor 1. Example: one sum over DATA, with divisor 4.
3. The reach of each sum: the group of the rank on this mode. Example: the DATA group {0, 1, 2, 3}.
4. The ranks of each sum: its reach without the ranks that are no replicas. Example: {0, 2}.
5. The mode of which these ranks are a group; sums over one rank with divisor 1 are left out. Example: {0, 2} is a group of
   EXPERT_DATA, so the result is Owed(EXPERT_DATA, (0, 2), divisor=4).

The divisor is thus the number of ranks with distinct data (4), not the size of the group that communicates (2). In the example, the
gradient of the expert on rank 0 already contains the tokens of ranks 0 and 1, which rank 1 has sent to the expert.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from colonnade.context.layout import Axis, Digit, Layout, Listed, joined, ranks_with, refine
from colonnade.context.parallel_mode import ParallelMode
from colonnade.errors import PlacementError, listed
from colonnade.parallel.placement import Placement, Replicate, Shard, Tied


@dataclass(frozen=True)
class Owed:
    """A required reduction of the gradient of a parameter: an all-reduce over `ranks`, a group of `mode`, divided by `divisor`."""

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
        """The number of replicas |H|. In a norm over the world, the elements of each rank count with weight 1/|H|."""
        return len(self.ranks)

    @property
    def index(self) -> int:
        """This rank's index among the replicas."""
        return self.ranks.index(self.rank)


def holding(layout: Layout, placement: Placement, rank: int) -> Holding:
    """The ranks that store the same elements as `rank`: the same (or a tied) stage, and the same position on every mode that
    shards.

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
        return Holding(_ranks(_reach_of(layout, placement, rank).holders, rank), rank)

    return _once(layout, placement, (rank, "holding"), find)


def owed(layout: Layout, placement: Placement, rank: int) -> tuple[Owed, ...]:
    """The required reductions of the local gradient on `rank`, one per mode; empty if the gradient needs none.

    The module docstring has the computation of ranks and divisors, with an example; `_find_reach` determines the divisors.

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
    return tuple(factor for factor, _ in _owed_and_regions(layout, placement, rank))


def check_same_data(layout: Layout, placement: Placement, rank: int, name: str) -> None:
    """Raise PlacementError if the groups of a custom initializer contradict the placement of a parameter.

    There are two cases:

    - the ranks of a mode that shards the parameter do not ascend along the axis, so shards and ranks would not match;
    - the groups of a mode with data="same" contain ranks with distinct data, and the placement has no owes="nothing" for the axis
      of these data.
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
                f"{name} is sharded over {mode}, as with ZeRO stage 3, but the ranks {list(misordered)} would store "
                f"its shards in the order {positions}. The groups of an initializer differ from the grid, and torch "
                "numbers the ranks of a group in ascending order. Use ZeRO stage 2, or also return groups whose "
                f"ranks ascend along {mode.name}.",
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
                    f"{name} is placed on {mode}, whose ranks see the same data, but the group {list(group)} has "
                    f"ranks at positions {listed(sorted(at))} of the axis {axis.name!r}, which see distinct data. No "
                    "sum over ranks gives the gradient of a single process. There are three remedies. 1. Let the "
                    "initializer group only ranks of one replica. 2. Give the mode a separate axis, "
                    f"parallel=dict({mode.value}=dict(size={len(group)})), so that positions follow from its groups. "
                    "3. Register the mode with data='distinct'.",
                    code="C162",
                )


def joint_ranks(layout: Layout, placement: Placement, factors: tuple[Owed, ...], rank: int) -> tuple[int, ...]:
    """The ranks of a single all-reduce that performs all reductions in `factors` at once.

    Args:
        layout: The parallel layout.
        placement: The placement of the parameter.
        factors: Some of the reductions from `owed` for this parameter and rank.
        rank: A global rank.
    """
    wanted = frozenset(factor.mode for factor in factors)

    def find() -> tuple[int, ...]:
        if layout.places is not None:
            return _back(layout, joint_ranks(layout.on_grid, placement, factors, layout.places[rank]))
        reach = _reach_of(layout, placement, rank)
        factors_here = _owed_and_regions(layout, placement, rank)
        if reach.atoms is not None:
            return _ranks(_union(region for factor, region in factors_here if factor.mode in wanted), rank)

        # Groups that cross each other: a sum over one mode brings in ranks with other groups of another mode, and so on.
        reached, frontier = {rank}, [rank]
        while frontier:
            at = frontier.pop()
            if placement.tied is not None:
                # Not symmetric: stages without the parameter reach its replicas, but not the other way round.
                reach = _find_reach(layout, placement, at)
            for factor, _ in _find_owed(layout, placement, at, reach):
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
"""A set of ranks around one rank: for each of these digits the allowed values. All other digits equal those of the rank.

If every mode is a product of digits, every set of ranks in this file is such a product too, and no loop over ranks is needed, even
in a world of a million ranks. If an initializer lists groups that are no such product, a region has a single digit, the full rank
number, with a list of values.
"""


@dataclass(frozen=True)
class _RequiredSum:
    """A required sum over the groups of a mode, divided by `divisor`.

    The group of a rank consists of the ranks that differ from it only in `digits`, where these take `values` (None: all values).
    `digits` is None if the groups are listed.
    """

    mode: ParallelMode
    divisor: int
    digits: tuple[Digit, ...] | None
    values: Sequence[int] | None = None

    def ranks(self, layout: Layout, rank: int) -> Sequence[int]:
        """The group of `rank` on this mode; empty if the rank is in no group of the mode."""
        if self.digits is not None:
            return ranks_with(rank, [(digit, self.values or range(digit[1])) for digit in self.digits])
        return layout.group_of(self.mode, rank) if layout.has(self.mode, rank) else ()


@dataclass(frozen=True)
class _Reach:
    """The required sums of a parameter, its replicas (`holders`), and the replicas whose gradients the sums add in total
    (`reached`).

    If `atoms` is None, regions are lists of ranks, because some groups are not products of digits.
    """

    sums: list[_RequiredSum]
    atoms: tuple[Digit, ...] | None
    holders: Region
    reached: Region


def _once(layout: Layout, placement: Placement, question: Any, answer: Callable[[], Any]) -> Any:
    """Cache the result of `answer()` in the layout, by placement and question.

    Results do not depend on the shape of the tensor.
    """
    key = (placement.key[0], question)
    if key not in layout.derived:
        layout.derived[key] = answer()
    return layout.derived[key]


def _reach_of(layout: Layout, placement: Placement, rank: int) -> _Reach:
    return _once(layout, placement, (rank, "reach"), lambda: _find_reach(layout, placement, rank))


def _find_reach(layout: Layout, placement: Placement, rank: int) -> _Reach:
    tied, axis_digits = placement.tied, layout.grid.digits
    for mode in placement.modes:
        if not layout.has(mode):
            raise PlacementError(
                f"a parameter is placed on {mode}, but this layout has no groups of {mode}. The modes are "
                f"{listed(known.name for known in layout.modes)}. Add {mode} under `parallel`, or place the "
                "parameter on one of these modes.",
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
                f"parameter {tied.key!r} is tied at stages {list(tied.stages)}, but this rank is at stage "
                f"{own_stage}. Place the parameter as Tied only on the ranks of stages {list(tied.stages)}.",
                code="C030",
            )
        stages = sorted(set(tied.stages))

    # The required sums and their divisors. Over each axis whose ranks see distinct data, the gradient is a mean: the divisor is the
    # size of the axis, because the batches of its ranks together are the global batch. This also holds if only some of these ranks
    # have a replica (experts): the ranks without one have already sent their tokens to a replica. Over each mode with partial
    # gradients (`owes="sum"`), and over the stages of a tie, the divisor is 1: each rank has a part of the gradient of the same data.
    sums = [
        _RequiredSum(axis.mode, axis.size, (axis_digits[axis.name],))
        for axis in layout.axes
        if _is_distinct(axis, placement)
    ]
    distinct = {axis.mode for axis in layout.axes if axis.data == "distinct"}
    for mode, spec in placement.modes.items():
        if isinstance(spec, Replicate) and spec.owes == "sum" and mode not in distinct:
            sums.append(_RequiredSum(mode, 1, layout.groups(mode).digits))
    if tied is not None:
        sums.append(_RequiredSum(ParallelMode.PIPELINE, 1, (stage,), stages))

    # The atoms: digits of which the axes and all modes of the placement are products; None if there are none. The stages of a
    # tie are values of the pipeline's digit, which must therefore be an atom.
    products = [required.digits for required in sums] + [layout.groups(mode).digits for mode in placement.shards]
    known = [product for product in products if product is not None]
    atoms = refine([axis_digits.values(), *known], layout.world_size) if len(known) == len(products) else None
    if atoms is not None and (not atoms or tied is None or stage in atoms):
        # Replicas may differ from the rank in every digit except those that shard the parameter, and in the stage only for ties.
        sharding = _region(atoms, [digit for mode in placement.shards for digit in layout.groups(mode).digits or ()])
        fixed = {*sharding, *_region(atoms, [stage])}
        holders: Region = {atom: range(atom[1]) for atom in atoms if atom not in fixed}
        if stage not in sharding:
            holders[stage] = stages
        # The order of sums over products of digits does not matter: together they reach every value of all their digits.
        everything = _union(_region(atoms, required.digits or (), required.values) for required in sums)
        return _Reach(sums, atoms, holders, _intersection(everything, holders))

    # Rank by rank, for modes whose groups cross the axes or each other.
    axes = [(digit, stages if digit == stage else range(digit[1])) for digit in axis_digits.values()]
    replicas = set(ranks_with(rank, axes[::-1]))
    for mode in placement.shards:
        at = layout.local_rank(mode, rank)
        replicas &= {group[at] for group in layout.groups(mode) if at < len(group)}
    # A sum over one mode brings in ranks with other groups of another mode; repeated until no new rank is reached.
    reached, frontier = {rank}, [rank]
    done: list[set[int]] = [set() for _ in sums]
    while frontier:
        here = frontier.pop()
        for required, seen in zip(sums, done, strict=True):
            if here not in seen:
                ranks = required.ranks(layout, here)
                seen.update(ranks)
                frontier.extend(other for other in ranks if other not in reached)
                reached.update(ranks)
    world = (1, layout.world_size)
    return _Reach(sums, None, {world: replicas}, {world: sorted(reached & replicas)})


def _owed_and_regions(layout: Layout, placement: Placement, rank: int) -> tuple[tuple[Owed, Region], ...]:
    return _once(
        layout,
        placement,
        (rank, "owed"),
        lambda: _find_owed(layout, placement, rank, _reach_of(layout, placement, rank)),
    )


def _find_owed(layout: Layout, placement: Placement, rank: int, reach: _Reach) -> tuple[tuple[Owed, Region], ...]:
    """The required reductions on `rank`, each with its ranks as a region."""
    found = []
    for required in reach.sums:
        # The ranks of this sum: those of the group of `rank` that are replicas. The divisor stays that of the full group.
        group: Region
        if reach.atoms is not None:
            group = _region(reach.atoms, required.digits or (), required.values)
        elif ranks := required.ranks(layout, rank):
            group = {(1, layout.world_size): ranks}
        else:
            continue
        region = _intersection(group, reach.holders)
        found.append((_mode_of_group(layout, placement, required.mode, region, rank), region, required.divisor))

    # If the modes are not independent among the replicas (for example, an expert group that crosses data and tensor ranks
    # unevenly), there is no sum for each of them, only one over all replicas, with the product of all divisors.
    if prod(_count(region) for _, region, _ in found) != _count(reach.reached):
        (first, *_), *_ = found
        mode = _mode_of_group(layout, placement, first, reach.reached, rank)
        found = [(mode, reach.reached, prod(divisor for _, _, divisor in found))]
    return tuple(
        (Owed(mode, _ranks(region, rank), divisor), region)
        for mode, region, divisor in found
        if _count(region) > 1 or divisor > 1
    )


def _region(atoms: tuple[Digit, ...], digits: Sequence[Digit], values: Sequence[int] | None = None) -> Region:
    """A region: all values of these digits, or the given values."""
    inside = (atom for atom in atoms if any(stride <= atom[0] < stride * size for stride, size in digits))
    return {atom: values or range(atom[1]) for atom in inside}


def _intersection(a: Region, b: Region) -> Region:
    return {
        digit: a[digit] if a[digit] == b[digit] else [value for value in a[digit] if value in b[digit]]
        for digit in a
        if digit in b
    }


def _union(regions: Iterable[Region]) -> Region:
    """The union of regions around one rank. For the stage digit the last region wins: the sum over tied stages is the last sum, and
    only these stages store the parameter."""
    return {digit: values for region in regions for digit, values in region.items()}


def _count(region: Region) -> int:
    return prod(len(values) for values in region.values())


def _ranks(region: Region, rank: int) -> tuple[int, ...]:
    values = [(digit, found if isinstance(found, Sequence) else sorted(found)) for digit, found in region.items()]
    return tuple(ranks_with(rank, sorted(values, key=lambda item: item[0], reverse=True)))


def _is_distinct(axis: Axis, placement: Placement) -> bool:
    spec = placement.on(axis.mode)
    return axis.data == "distinct" and not (isinstance(spec, (Shard, Replicate)) and spec.owes == "nothing")


def _mode_of_group(layout: Layout, placement: Placement, mode: ParallelMode, region: Region, rank: int) -> ParallelMode:
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
