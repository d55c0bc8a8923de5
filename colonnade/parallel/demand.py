"""The sums that a placement demands: which ranks hold the same elements, and over which of them the raw gradient is summed.

Pure arithmetic on a layout. The divisor is the number of ranks that saw distinct data, never the size of
the group that happens to communicate: that is what makes experts come out right.

The three questions are `holding` (who holds the same elements), `owed` (one sum for each mode, with its divisor) and
`joint_ranks` (the ranks of one sum over several modes at once). All follow from two sets of ranks around a rank:

- the holders: the ranks of its stage (or of the tied stages) with the same position on every mode that cuts the parameter;
- the ranks that its gradient reaches when it is summed over each mode that owes a sum, step after step.

Experts show why both count. With data 4 and experts cut over 2 of these ranks, the data step reaches all 4 ranks, but only 2 of
them hold the same experts: so the sum is over these 2 (EXPERT_DATA), and the divisor is still 4.
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

    # Where ranks do not stand as in the grid, the question is answered for the places of the grid, where axes are products of
    # digits, and places are turned back into ranks. So in `owed` and `joint_ranks`.
    def find() -> Holding:
        if layout.places is not None:
            found = holding(layout.on_grid, placement, layout.places[rank])
            return Holding(_back(layout, found.ranks), rank)
        return Holding(_ranks(_reach(layout, placement, rank).holders, rank), rank)

    return _once(layout, placement, (rank, "holding"), find)


def owed(layout: Layout, placement: Placement, rank: int) -> tuple[Owed, ...]:
    """The sums that the raw gradient on `rank` owes, as factors by mode; empty if it is final as it is."""
    if layout.places is not None:

        def find() -> tuple[Owed, ...]:
            assert layout.places is not None
            found = owed(layout.on_grid, placement, layout.places[rank])
            return tuple(Owed(factor.mode, _back(layout, factor.ranks), factor.divisor) for factor in found)

        return _once(layout, placement, (rank, "owed"), find)
    return tuple(factor for factor, _ in _factors(layout, placement, rank))


def check_same_data(layout: Layout, placement: Placement, rank: int, name: str) -> None:
    """Refuse a parameter on a mode of "same" data whose groups were written down across ranks that see other data.

    Not where the placement says that over these data nothing is owed.
    """
    for mode, spec in placement.modes.items():
        if isinstance(spec, Shard) and (apart := _out_of_order(layout, mode)):
            positions = [layout.local_rank(mode, other) for other in apart]
            raise PlacementError(
                f"{name} is cut over {mode} (as zero stage 3 does), and the ranks {apart} of this mode would hold its parts in the "
                f"order {positions}: groups of an initializer that are not those of the grid put them there, and torch numbers the ranks "
                f"of a group in ascending order. Use zero stage 2, or return groups whose ranks ascend along {mode.name} too",
                code="C161",
            )
        by_hand = layout.has(mode, rank) and isinstance(layout.groups(mode), Listed)
        if mode.data != "same" or isinstance(spec, Tied) or spec.owes == "nothing" or not by_hand:
            continue
        group = layout.group_of(mode, rank)
        for axis in layout.axes:
            at = {layout.coordinates(other)[axis.name] for other in group} if _is_distinct(axis, placement) else set()
            if len(at) > 1:
                raise PlacementError(
                    f"{name} is placed on {mode}, whose ranks see the same data, but the group {list(group)} has ranks at places "
                    f"{listed(sorted(at))} of the axis {axis.name!r}, which see other data: no sum over ranks is the gradient "
                    f"of one process. Let the initializer group ranks of one replica; give the mode an axis of its own, "
                    f"parallel=dict({mode.value}=dict(size={len(group)})), and places are read from its groups; or register it "
                    f"with data='distinct'",
                    code="C162",
                )


def _out_of_order(layout: Layout, mode: ParallelMode) -> list[int]:
    """Ranks of a group of an axis's mode by their places, where these are not their positions; empty if there are none."""
    names = {axis.mode: axis.name for axis in layout.axes}
    if layout.places is None or mode not in names:
        return []
    key = ("out of order", mode)
    if key not in layout.derived:
        groups = (
            sorted(group, key=lambda rank: layout.coordinates(rank)[names[mode]]) for group in layout.groups(mode)
        )
        layout.derived[key] = next((group for group in groups if group != sorted(group)), [])
    return list(layout.derived[key])


def joint_ranks(layout: Layout, placement: Placement, factors: tuple[Owed, ...], rank: int) -> tuple[int, ...]:
    """The ranks that one sum over all `factors` at once takes in."""
    wanted = frozenset(factor.mode for factor in factors)
    if layout.places is not None:
        here = layout.places[rank]
        return _once(
            layout,
            placement,
            (rank, wanted),
            lambda: _back(layout, joint_ranks(layout.on_grid, placement, factors, here)),
        )
    return _once(layout, placement, (rank, wanted), lambda: _joint(layout, placement, wanted, rank))


def _back(layout: Layout, places: Iterable[int]) -> tuple[int, ...]:
    """The ranks that stand at these places, ascending."""
    return tuple(sorted(layout.at_places[place] for place in places))


# --------------------------------------------------------------------------------------------------
# Holders and reach, as products of digits where all modes are such, else rank by rank.
# --------------------------------------------------------------------------------------------------


Region = dict[Digit, Collection[int]]
"""A set of ranks around one of them: the values that each digit may have. The other digits are as on that rank.

Where every mode is a product of digits, so is every set of ranks here, and nothing is walked. Where groups were
listed by hand and are no such product, a region has one digit, the rank itself, and the values are listed.
"""


@dataclass(frozen=True)
class _Step:
    """A mode over which a sum or a mean is owed: from a rank to its group (`values` of `digits`, if it has any)."""

    mode: ParallelMode
    divisor: int
    digits: tuple[Digit, ...] | None
    values: Sequence[int] | None = None

    def ranks(self, layout: Layout, rank: int) -> Sequence[int]:
        """The ranks that it reaches from `rank`; none if the rank is in no group of the mode."""
        if self.digits is not None:
            return ranks_with(rank, [(digit, self.values or range(digit[1])) for digit in self.digits])
        return layout.group_of(self.mode, rank) if layout.has(self.mode, rank) else ()


@dataclass(frozen=True)
class _Reach:
    """The ranks that hold the same as a rank (`holders`), and those of them that its sums reach, step after step (`whole`)."""

    steps: list[_Step]
    atoms: tuple[Digit, ...] | None
    holders: Region
    whole: Region

    def parts(self, layout: Layout, rank: int) -> Iterator[tuple[_Step, Region]]:
        """The holders that each single step from `rank` reaches."""
        for step in self.steps:
            if self.atoms is not None:
                yield step, _intersection(_region(self.atoms, step.digits or (), step.values), self.holders)
            elif ranks := step.ranks(layout, rank):
                yield step, _intersection({(1, layout.world_size): ranks}, self.holders)


def _once(layout: Layout, placement: Placement, question: Any, answer: Callable[[], Any]) -> Any:
    """The answer, worked out once for a layout; the shape of a tensor does not matter to it."""
    key = (placement.key[0], question)
    if key not in layout.derived:
        layout.derived[key] = answer()
    return layout.derived[key]


def _reach(layout: Layout, placement: Placement, rank: int) -> _Reach:
    return _once(layout, placement, (rank, "reach"), lambda: _find_reach(layout, placement, rank))


def _find_reach(layout: Layout, placement: Placement, rank: int) -> _Reach:
    _check_modes(layout, placement)
    stage, stages = _stages(layout, placement, rank)
    steps = _steps(layout, placement)
    atoms = _atoms(layout, placement, steps)
    if atoms is None:
        return _walk(layout, placement, rank, steps)
    # Holders may differ from the rank in every digit but those that cut the parameter, and the stage, which has the values of a tie.
    split = _region(atoms, [digit for mode in placement.shards for digit in layout.groups(mode).digits or ()])
    fixed = {*split, *_region(atoms, [stage])}
    holders: Region = {atom: range(atom[1]) for atom in atoms if atom not in fixed}
    if stage not in split:
        holders[stage] = stages
    # Steps over products of digits do not depend on their order: together they reach every value of all their digits.
    reached = _union(_region(atoms, step.digits or (), step.values) for step in steps)
    return _Reach(steps, atoms, holders, _intersection(reached, holders))


def _walk(layout: Layout, placement: Placement, rank: int, steps: list[_Step]) -> _Reach:
    """The reach of a rank, found rank by rank, for modes whose groups cross the axes or each other."""
    stage, stages = _stages(layout, placement, rank)
    axes = [(digit, stages if digit == stage else range(digit[1])) for digit in layout.grid.digits.values()]
    holders = set(ranks_with(rank, axes[::-1]))
    for mode in placement.shards:
        at = layout.local_rank(mode, rank)
        holders &= {group[at] for group in layout.groups(mode) if at < len(group)}
    # A sum over one mode brings in ranks whose groups of another mode are not those of this rank: so until nothing new is reached.
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
    return _Reach(steps, None, {world: holders}, {world: sorted(reached & holders)})


def _factors(layout: Layout, placement: Placement, rank: int) -> tuple[tuple[Owed, Region], ...]:
    return _once(
        layout,
        placement,
        (rank, "owed"),
        lambda: _find_factors(layout, placement, rank, _reach(layout, placement, rank)),
    )


def _find_factors(layout: Layout, placement: Placement, rank: int, reach: _Reach) -> tuple[tuple[Owed, Region], ...]:
    found = []
    for step, region in reach.parts(layout, rank):
        mode = _name(layout, placement, step.mode, region, rank)
        found.append((mode, region, step.divisor))
    if prod(_count(region) for _, region, _ in found) != _count(reach.whole):
        # The modes do not vary independently among the holders (an expert group across uneven cuts of data
        # and tensor, say): then it is one sum over all of them.
        (first, *_), *_ = found
        mode = _name(layout, placement, first, reach.whole, rank)
        found = [(mode, reach.whole, prod(divisor for _, _, divisor in found))]
    return tuple(
        (Owed(mode, _ranks(region, rank), divisor), region)
        for mode, region, divisor in found
        if _count(region) > 1 or divisor > 1
    )


def _joint(layout: Layout, placement: Placement, wanted: frozenset[ParallelMode], rank: int) -> tuple[int, ...]:
    reach = _reach(layout, placement, rank)
    factors = _factors(layout, placement, rank)
    if reach.atoms is not None:
        return _ranks(_union(region for factor, region in factors if factor.mode in wanted), rank)
    reached, frontier = {rank}, [rank]
    while frontier:
        at = frontier.pop()
        if placement.tied is not None:
            # Stages without the parameter reach its holders, but not the other way round.
            reach = _find_reach(layout, placement, at)
        for factor, _ in _find_factors(layout, placement, at, reach):
            if factor.mode in wanted:
                frontier.extend(other for other in factor.ranks if other not in reached)
                reached.update(factor.ranks)
    return tuple(sorted(reached))


def _steps(layout: Layout, placement: Placement) -> list[_Step]:
    """Every mode over which a sum or a mean is owed."""
    # A mean over the axes whose ranks see distinct data: the joined batch is one batch. Sums without a divisor over modes where
    # the placement says so, and over the stages of a tie: each has a part of the gradient of the same data.
    digits = layout.grid.digits
    found = [_Step(axis.mode, axis.size, (digits[axis.name],)) for axis in layout.axes if _is_distinct(axis, placement)]
    distinct = {axis.mode for axis in layout.axes if axis.data == "distinct"}
    for mode, spec in placement.modes.items():
        if isinstance(spec, Replicate) and spec.owes == "sum" and mode not in distinct:
            found.append(_Step(mode, 1, layout.groups(mode).digits))
    tied = placement.tied
    if tied is not None:
        found.append(_Step(ParallelMode.PIPELINE, 1, (digits["pipeline"],), sorted(set(tied.stages))))
    return found


def _atoms(layout: Layout, placement: Placement, steps: list[_Step]) -> tuple[Digit, ...] | None:
    """The digits of which the axes and all modes of the placement are products; None if there are none such."""
    axes = layout.grid.digits
    products = [step.digits for step in steps] + [layout.groups(mode).digits for mode in placement.shards]
    known = [product for product in products if product is not None]
    atoms = refine([axes.values(), *known], layout.world_size) if len(known) == len(products) else None
    # The stages of a tie are values of one digit, which must not be cut.
    return None if atoms and placement.tied is not None and axes["pipeline"] not in atoms else atoms


def _region(atoms: tuple[Digit, ...], digits: Sequence[Digit], values: Sequence[int] | None = None) -> Region:
    """Every value of these digits, or the given ones."""
    inside = (atom for atom in atoms if any(stride <= atom[0] < stride * size for stride, size in digits))
    return {atom: values or range(atom[1]) for atom in inside}


def _intersection(one: Region, other: Region) -> Region:
    return {digit: _both(one[digit], other[digit]) for digit in one if digit in other}


def _both(one: Collection[int], other: Collection[int]) -> Collection[int]:
    return one if one == other else [value for value in one if value in other]


def _union(regions: Iterable[Region]) -> Region:
    """All that these reach. Of stages the last one counts: a tie is the last step, and only its stages hold the parameter."""
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
    """The mode whose group these ranks are: EXPERT_DATA where experts cut DATA."""
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


def _stages(layout: Layout, placement: Placement, rank: int) -> tuple[Digit, Sequence[int]]:
    """The pipeline's digit of a rank, and the stages that hold any part of the parameter: this one, or the tied ones."""
    digit = stride, size = layout.grid.digits["pipeline"]
    own, tied = rank // stride % size, placement.tied
    if tied is None:
        return digit, (own,)
    if own not in tied.stages:
        raise PlacementError(
            f"parameter {tied.key!r} is tied at stages {list(tied.stages)}, but this rank is at stage {own}; "
            f"place it on the ranks of those stages only",
            code="C030",
        )
    return digit, sorted(set(tied.stages))


def _check_modes(layout: Layout, placement: Placement) -> None:
    for mode in placement.modes:
        if not layout.has(mode):
            raise PlacementError(
                f"a parameter is placed on {mode}, which has no groups here; the modes are "
                f"{listed(known.name for known in layout.modes)}. Add it under `parallel`, or place it on one of these.",
                code="C030",
            )
    tied = placement.tied
    if tied is not None and max(tied.stages) >= layout.grid.sizes["pipeline"]:
        raise PlacementError(
            f"parameter {tied.key!r} is tied at stages {list(tied.stages)}, but the pipeline has stages "
            f"0 to {layout.grid.sizes['pipeline'] - 1}",
            code="C030",
        )
