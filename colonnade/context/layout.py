"""Layout: for every mode, the rank lists of the whole world. Integers only; no torch, no processes.

A layout answers for any rank of any world, so that plans and tests can look at a million ranks from one process. From below:

- a rank is a number written in digits, one per axis (`Digit`, `ranks_with`, `refine`, `joined`);
- a `Partition` is the groups of one mode: by digits, or listed one by one where an initializer of a user wrote them down;
- a `Grid` gives ranks to named axes, and the groups of any of them;
- a `Layout` holds the partitions of all modes, as the initializers returned them and `check_groups` found them right;
- `world_axes` reads the axes of a world from the `parallel` section of a config.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain, pairwise
from math import prod
from typing import Any, overload

from colonnade.config import AxisSpec, ParallelSizes, parallel_sizes
from colonnade.constants import INITIALIZER_MAPPING
from colonnade.context.parallel_mode import DataKind, ParallelMode
from colonnade.errors import ContextError, LayoutError, did_you_mean, listed
from colonnade.texts import digest_of

# --------------------------------------------------------------------------------------------------
# Digits and partitions: pure integer arithmetic, nothing listed until it is asked for.
#
# `Grid((("data", 2), ("pipeline", 2), ("tensor", 2)))` numbers 8 ranks so that the tensor coordinate varies
# fastest. A rank is thus a number written in digits, one per axis, and every built-in mode is "the ranks that
# differ only in these digits". So one rank's group in a world of a million is found without looking at the others.
# --------------------------------------------------------------------------------------------------


Digit = tuple[int, int]
"""A digit of a rank: its stride (what one step adds) and its size (how many values it has)."""


class Ranks(Sequence[int]):
    """A range of ranks that is equal to any list of the same ranks: the world of a million takes no memory."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, ranks: range) -> None:
        self._ranks = ranks

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> list[int]: ...
    def __getitem__(self, at: int | slice) -> Any:
        return self._ranks[at] if isinstance(at, int) else list(self._ranks[at])

    def __len__(self) -> int:
        return len(self._ranks)

    def __iter__(self) -> Iterator[int]:
        return iter(self._ranks)

    def __contains__(self, rank: object) -> bool:
        return rank in self._ranks

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Ranks):
            return self._ranks == other._ranks
        return isinstance(other, Sequence) and len(other) == len(self) and list(other) == list(self)

    def __repr__(self) -> str:
        return repr(list(self))


class Partition(Sequence[list[int]]):
    """The groups of one mode: a sequence of rank lists, ascending inside; a rank is in one of them at most.

    Made by `Grid.groups` and `cut` (right by the way they are made, so a million ranks need no check) or `Listed`.
    """

    digits: tuple[Digit, ...] | None = None
    """The digits in which the ranks of a group differ, slowest first; None if the groups are no such product."""

    @abstractmethod
    def group_of(self, rank: int) -> Sequence[int]:
        """The group that `rank` is in."""

    @abstractmethod
    def position(self, rank: int) -> int:
        """The place of `rank` in its group; -1 if it is in none."""

    @abstractmethod
    def describe(self) -> str:
        """A text that tells two partitions apart."""

    @overload
    def __getitem__(self, at: int) -> list[int]: ...
    @overload
    def __getitem__(self, at: slice) -> list[list[int]]: ...
    def __getitem__(self, at: int | slice) -> Any:
        chosen = range(len(self))[at]
        return self._group(chosen) if isinstance(chosen, int) else [self._group(index) for index in chosen]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Partition) and self.describe() == other.describe():
            return True
        return isinstance(other, (list, Partition)) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))

    @abstractmethod
    def _group(self, index: int) -> list[int]: ...


class _ByDigits(Partition):
    """The ranks that differ only in the digits `inner`; `outer` are all others and number the groups, slowest first."""

    def __init__(self, outer: tuple[Digit, ...], inner: tuple[Digit, ...]) -> None:
        self.outer, self.inner = outer, inner
        self.digits = inner

    def group_of(self, rank: int) -> Sequence[int]:
        return ranks_with(rank, [(digit, range(digit[1])) for digit in self.inner])

    def position(self, rank: int) -> int:
        return _number(rank, self.inner)

    def describe(self) -> str:
        return f"{self.outer}{self.inner}"

    def cut(self, size: int) -> tuple[Partition, Partition]:
        """Cut every group into runs of `size` ranks: (the runs, the ranks at the same place in their run)."""
        # From the fastest digit on: as much of it as still fits goes into the run, the rest of it numbers the runs.
        left = size
        coarse: list[Digit] = []
        fine: list[Digit] = []
        for stride, length in reversed(self.inner):
            run = min(left, length)
            if left % run or length % run:  # the cut goes across an axis: no digits say it
                world_size = len(self) * prod(length for _, length in self.inner)
                cut = [group[at : at + size] for group in self for at in range(0, len(group), size)]
                across = [group[at::size] for group in self for at in range(size)]
                return Listed(cut, world_size), Listed(across, world_size)
            fine.insert(0, (stride, run))
            coarse.insert(0, (stride * run, length // run))
            left //= run
        runs, across_runs = tuple(fine), tuple(coarse)
        return _ByDigits(self.outer + across_runs, runs), _ByDigits(self.outer + runs, across_runs)

    def __len__(self) -> int:
        return prod(size for _, size in self.outer)

    def _group(self, index: int) -> list[int]:
        base = 0
        for stride, size in reversed(self.outer):
            index, at = divmod(index, size)
            base += at * stride
        return list(self.group_of(base))


class Listed(Partition):
    """Groups that were listed one by one, in the order they were given. Their checks are `layout.check_groups`."""

    def __init__(self, groups: Iterable[Iterable[int]], world_size: int) -> None:
        self._groups = [list(group) for group in groups]
        self._world_size = world_size

    @cached_property
    def digits(self) -> tuple[Digit, ...] | None:  # type: ignore[override]
        """Read off the first group; None unless all groups are what these digits make."""
        # The group of rank 0 shows its digits: the first step is the stride of the fastest, and it is as long as the steps stay
        # equal; every size-th rank of it is the same question for the next digit. Then all groups must be what these digits make.
        first = next((group for group in self._groups if 0 in group), [])
        digits: list[Digit] = []
        left = first
        while len(left) > 1:
            stride = left[1]
            size = next((at for at, rank in enumerate(left) if rank != at * stride), len(left))
            digits.insert(0, (stride, size))
            left = left[::size]
        made = refine([digits], self._world_size)
        whole = sum(map(len, self._groups)) == self._world_size
        full = [(digit, range(digit[1])) for digit in digits]
        if made is None or not whole or any(ranks_with(group[0], full) != group for group in self._groups):
            return None
        return tuple(digits)

    def group_of(self, rank: int) -> Sequence[int]:
        return list(self._groups[self._places[rank][0]])

    def position(self, rank: int) -> int:
        return self._places.get(rank, (0, -1))[1]

    def describe(self) -> str:
        return repr(self._groups)

    def __len__(self) -> int:
        return len(self._groups)

    @cached_property
    def _places(self) -> dict[int, tuple[int, int]]:
        """rank -> (index of its group, position in it)."""
        return {rank: (at, position) for at, group in enumerate(self._groups) for position, rank in enumerate(group)}

    def _group(self, index: int) -> list[int]:
        return list(self._groups[index])


class Grid:
    """Named axes and the rank numbers they give."""

    def __init__(self, axes: tuple[tuple[str, int], ...]) -> None:
        self.axes = axes
        self.sizes = dict(axes)
        self.world_size = prod(self.sizes.values())

    @cached_property
    def digits(self) -> dict[str, Digit]:
        """Stride and size of each axis: how far apart two ranks are that differ by one in it, and how long it is."""
        digits, step = {}, 1
        for name, size in reversed(self.axes):
            digits[name] = (step, size)
            step *= size
        return digits

    def groups(self, *names: str) -> _ByDigits:
        """All groups of ranks that differ only in the named axes; ascending inside and by first rank."""
        self._check(names)
        outer = tuple(self.digits[name] for name, _ in self.axes if name not in names)
        return _ByDigits(outer, tuple(self.digits[name] for name, _ in self.axes if name in names))

    def split(self, name: str, **parts: int) -> Grid:
        """A finer grid in which axis `name` is replaced by `parts`, slowest first."""
        self._check((name,))
        if prod(parts.values()) != self.sizes[name]:
            raise LayoutError(f"axis {name!r} of size {self.sizes[name]} cannot be split into {parts}", code="C011")
        finer: list[tuple[str, int]] = []
        for axis, size in self.axes:
            finer.extend(parts.items() if axis == name else [(axis, size)])
        return Grid(tuple(finer))

    def coordinates(self, rank: int) -> dict[str, int]:
        """The coordinate of a rank on each axis."""
        if not 0 <= rank < self.world_size:
            raise LayoutError(f"rank {rank} is outside the world of {self.world_size} ranks", code="C011")
        return {name: rank // stride % size for name, (stride, size) in reversed(self.digits.items())}

    def rank_at(self, **coordinates: int) -> int:
        """The rank with these coordinates; axes not named are at 0."""
        self._check(tuple(coordinates))
        for name, at in coordinates.items():
            if not 0 <= at < self.sizes[name]:
                raise LayoutError(
                    f"axis {name!r} has size {self.sizes[name]}; there is no coordinate {at}", code="C011"
                )
        return sum(self.digits[name][0] * at for name, at in coordinates.items())

    def _check(self, names: tuple[str, ...]) -> None:
        for name in names:
            if name not in self.sizes:
                raise LayoutError(f"no axis {name!r}; the axes are {listed(self.sizes)}", code="C011")


def refine(products: Iterable[Iterable[Digit]], world_size: int) -> tuple[Digit, ...] | None:
    """The coarsest digits of a rank, slowest first, of which all these are made; None if two of them cross."""
    # A digit begins where its stride is and ends at stride * size. Sorted, all such bounds must divide each other.
    bounds = {1, world_size}
    for stride, size in chain.from_iterable(products):
        if size > 1:
            bounds |= {stride, stride * size}
    steps = list(pairwise(sorted(bounds)))
    if any(high % low for low, high in steps):
        return None
    return tuple((low, high // low) for low, high in reversed(steps))


def joined(digits: Iterable[Digit]) -> list[Digit]:
    """These digits, slowest first, with neighbours made one: two products are the same if and only if these are."""
    found: list[Digit] = []
    for stride, size in digits:
        if found and found[-1][0] == stride * size:
            found[-1] = (stride, found[-1][1] * size)
        elif size > 1:
            found.append((stride, size))
    return found


def ranks_with(rank: int, values: Iterable[tuple[Digit, Sequence[int]]]) -> Sequence[int]:
    """The ranks that have any of these values (ascending) in these digits (slowest first), and else are as `rank`."""
    # `base` is the first of the ranks; `steps` has, for each digit with several values, how far each is from the first.
    base = rank
    steps: list[Sequence[int]] = []
    for (stride, size), allowed in values:
        base += (allowed[0] - rank // stride % size) * stride
        if len(allowed) == size > 1:
            last = steps[-1] if steps else ()
            if isinstance(last, range) and last.step == stride * size:  # two whole digits side by side are one
                steps[-1] = range(0, last.stop, stride)
            else:
                steps.append(range(0, size * stride, stride))
        elif len(allowed) > 1:
            steps.append([(at - allowed[0]) * stride for at in allowed])
    if not steps:
        return [base]
    found: Sequence[int] = steps[0]
    for inner in steps[1:]:
        if len(found) > len(inner) and isinstance(found, range):
            # A range moved by a number is a range: so a large list is filled without a step of Python for each rank.
            filled = [0] * (len(found) * len(inner))
            for at, step in enumerate(inner):
                filled[at :: len(inner)] = range(found.start + step, found.stop + step, found.step)
            found = filled
        else:
            found = [block + step for block in found for step in inner]
    if isinstance(found, range):
        return Ranks(range(base, base + found.stop, found.step))
    return [base + at for at in found] if base else found


def _number(rank: int, digits: tuple[Digit, ...]) -> int:
    """The number that these digits of the rank form, slowest first."""
    number = 0
    for stride, size in digits:
        number = number * size + rank // stride % size
    return number


@dataclass(frozen=True)
class Axis:
    """A factor of the world: its name in the config, its size, its mode, and what data its ranks see."""

    name: str
    size: int
    mode: ParallelMode
    data: DataKind

    @property
    def seeded_apart(self) -> bool:
        """Whether ranks along this axis draw different random numbers outside any stream."""
        return self.data == "distinct" or self.mode is ParallelMode.PIPELINE


class Layout:
    """The groups of every mode over a world of ranks.

    `axes` multiply to the world size, slowest first. `groups` maps a mode to its rank lists. Questions about one
    rank are answered by arithmetic; the lists of the whole world are made only for those who ask for them. `places` has,
    for each rank, the rank that the grid would have where it stands; None where ranks stand as in the grid.
    """

    def __init__(
        self,
        axes: tuple[Axis, ...],
        groups: Mapping[ParallelMode, Sequence[Sequence[int]]],
        places: Sequence[int] | None = None,
    ) -> None:
        self.axes = axes
        self.grid = Grid(tuple((axis.name, axis.size) for axis in axes))
        self.world_size = self.grid.world_size
        self._groups = {
            mode: lists if isinstance(lists, Partition) else Listed(lists, self.world_size)
            for mode, lists in groups.items()
        }
        self.places = None if places is None else tuple(places)
        self.derived: dict[Any, Any] = {}
        """Results that others worked out from this layout, by a key of theirs: they live as long as the layout."""

    @property
    def modes(self) -> tuple[ParallelMode, ...]:
        """Every mode that has groups in this world."""
        return tuple(self._groups)

    def groups(self, mode: ParallelMode) -> Partition:
        """All groups of a mode: a sequence of lists of global ranks, each made when it is looked at."""
        if mode not in self._groups:
            raise ContextError(
                f"{mode} has no groups in this layout; it has {listed(known.name for known in self._groups)}. "
                f"Add it under `parallel` in the config.",
                code="C012",
            )
        return self._groups[mode]

    def has(self, mode: ParallelMode, rank: int | None = None) -> bool:
        """Whether the mode has groups here, and (if a rank is given) whether that rank is in one."""
        return mode in self._groups and (rank is None or self._position(mode, rank) >= 0)

    def group_of(self, mode: ParallelMode, rank: int) -> Sequence[int]:
        """The group of `mode` that `rank` is in."""
        self.local_rank(mode, rank)
        return self._groups[mode].group_of(rank)

    def local_rank(self, mode: ParallelMode, rank: int) -> int:
        """The position of `rank` in its group of `mode`."""
        position = self._position(mode, rank)
        if position < 0:
            having = sorted(member for group in self.groups(mode) for member in group)
            raise ContextError(
                f"rank {rank} is in no group of {mode}; the ranks that have it are "
                f"{listed(having[:16])}{' ...' if len(having) > 16 else ''}. Ask layout.has(mode, rank) first.",
                code="C012",
            )
        return position

    def coordinates(self, rank: int) -> dict[str, int]:
        """The coordinate of a rank on each axis; together they determine the rank."""
        inside = self.places is not None and 0 <= rank < self.world_size
        return self.grid.coordinates(self.places[rank] if inside and self.places is not None else rank)

    def rank_at(self, **coordinates: int) -> int:
        """The rank with these axis coordinates; axes not named are at 0."""
        place = self.grid.rank_at(**coordinates)
        return place if self.places is None else self.at_places[place]

    @cached_property
    def at_places(self) -> tuple[int, ...]:
        """The rank that stands at each place of the grid."""
        places = range(self.world_size) if self.places is None else self.places
        return tuple(sorted(range(self.world_size), key=places.__getitem__))

    @cached_property
    def on_grid(self) -> Layout:
        """The same groups with each rank called by its place, so that axes are products of digits again; itself if they are."""
        if self.places is None:
            return self
        axes = {axis.mode: axis.name for axis in self.axes}
        moved: dict[ParallelMode, Sequence[Sequence[int]]] = {}
        for mode, groups in self._groups.items():
            # In the order of the ranks, which is the order of positions: that is what cuts and gathers go by.
            called = [[self.places[rank] for rank in group] for group in groups]
            known = self.grid.groups(axes[mode]) if mode in axes else None
            moved[mode] = known if known is not None and sorted(called) == sorted(known) else called
        return Layout(self.axes, moved)

    @property
    def is_regular(self) -> bool:
        """Whether every mode is a product of axes (or parts of axes), so that it looks the same from every rank."""
        return all(groups.digits is not None for groups in self._groups.values())

    def rank_sets(self, rank: int | None = None) -> list[tuple[int, ...]]:
        """Every distinct group of every mode (that `rank` is in), in one order on all ranks; the world comes first."""
        if rank is not None:
            return list(dict.fromkeys(tuple(self.group_of(mode, rank)) for mode in self.modes if self.has(mode, rank)))
        return list(dict.fromkeys(tuple(group) for mode in self._groups for group in self._groups[mode]))

    def is_group(self, ranks: Sequence[int]) -> bool:
        """Whether these ranks (ascending) are a group of any mode."""
        return any(self.has(mode, ranks[0]) and self.group_of(mode, ranks[0]) == list(ranks) for mode in self.modes)

    @property
    def distinct_data(self) -> int:
        """How many ranks see data of their own: the divisor of a mean over the joined batch."""
        seen = 1
        for axis in self.axes:
            seen *= axis.size if axis.data == "distinct" else 1
        return seen

    def digest(self) -> int:
        """A 62-bit fingerprint: equal on two ranks if and only if (but for chance) the layouts are equal."""
        text = repr([(mode.value, groups.describe()) for mode, groups in self._groups.items()]) + repr(self.axes)
        return digest_of(text)

    def describe(self, mode_groups: int = 4) -> str:
        """A table of modes and their groups for people; long lists are cut."""
        axes = " x ".join(f"{axis.name} {axis.size}" for axis in self.axes if axis.size > 1) or "one rank"
        lines = [f"{self.world_size} ranks: {axes}"]
        for mode, groups in self._groups.items():
            shown = " ".join(str(group) for group in groups[:mode_groups])
            more = f" ... {len(groups)} groups" if len(groups) > mode_groups else ""
            lines.append(f"  {mode.name:<28}{shown}{more}")
        return "\n".join(lines)

    def _position(self, mode: ParallelMode, rank: int) -> int:
        return self.groups(mode).position(rank) if 0 <= rank < self.world_size else -1


def check_groups(
    mode: ParallelMode, groups: Sequence[Sequence[int]], world_size: int, source: str, whole: bool
) -> None:
    """Refuse rank lists that overlap, name a rank outside the world, are out of order or miss a rank."""
    if isinstance(groups, Partition):
        return
    where = f"{source} returned groups for {mode} that "
    seen: dict[int, Sequence[int]] = {}
    for group in groups:
        for rank in group:
            if not isinstance(rank, int) or isinstance(rank, bool):
                raise LayoutError(f"{where}hold {rank!r} in {group}: a rank is an integer", code="C011")
            if not 0 <= rank < world_size:
                raise LayoutError(
                    f"{where}name rank {rank} in {group}, but the world has ranks 0 to {world_size - 1}", code="C011"
                )
            if rank in seen:
                raise LayoutError(
                    f"{where}overlap: rank {rank} is in {seen[rank]} and in {group}. "
                    f"A rank is in one group of a mode; use two modes if it belongs to two.",
                    code="C011",
                )
            seen[rank] = group
    disordered = next((group for group in groups if group != sorted(group)), None)
    if disordered is not None:
        raise LayoutError(
            f"{where}are not in ascending order: {disordered}. torch numbers the ranks of a group in ascending "
            f"order, so positions would disagree; return {sorted(disordered)}.",
            code="C011",
        )
    missing = [rank for rank in range(world_size) if rank not in seen]
    if missing and whole:
        raise LayoutError(
            f"{where}miss rank{'s' if len(missing) > 1 else ''} {listed(missing[:8])}"
            f"{' ...' if len(missing) > 8 else ''} of {world_size}. Put each into a group (a group may have one "
            f"rank), or set `whole_world = False` on the initializer if they really have no part in the mode.",
            code="C011",
        )


# --------------------------------------------------------------------------------------------------
# From the `parallel` section of a config to the axes of a world of a given size.
# --------------------------------------------------------------------------------------------------


_SHARDED = 3
"""The stage of ZeRO that has replicas of shards."""


def world_axes(config: Any, world_size: int) -> tuple[Axis, ...]:
    """The axes of the world, slowest first: data, pipeline, further axes in the config's order, tensor.

    With `zero.replicate`: that axis, pipeline, data, other further axes, tensor. Ranks are numbered host by host, so the ranks
    that share the shards of a model, which gather and scatter every layer, are then neighbours on one host, and their replicas,
    which only sum, lie on others. The data axis takes what the others leave over, unless the config fixes it; sizes that do not multiply
    to the world are an error that says which factor would fit.
    """
    if world_size < 1:
        raise LayoutError(f"a world has at least one rank, not {world_size}", code="C010")
    sizes = parallel_sizes(config)
    further = tuple(_further_axis(spec) for spec in sizes.axes)
    _check_one_axis_per_mode(sizes.tensor_mode, further)
    data = _data_size(sizes, further, world_size)
    replicas = tuple(axis for axis in further if axis.name == _replicate(config) and axis.data == "distinct")
    first = (
        Axis("data", data, ParallelMode.DATA, "distinct"),
        Axis("pipeline", sizes.pipeline, ParallelMode.PIPELINE, "same"),
    )
    return (
        *replicas,
        *(reversed(first) if replicas else first),
        *(axis for axis in further if axis not in replicas),
        Axis("tensor", sizes.tensor, ParallelMode.TENSOR, _tensor_data(sizes.tensor_mode)),
    )


@lru_cache(maxsize=4)
def grid_of(axes: tuple[Axis, ...]) -> Grid:
    """The grid of these axes; cached, because every initializer of a world asks for the same one."""
    return Grid(tuple((axis.name, axis.size) for axis in axes))


def check_mode(mode: str, where: str) -> str:
    """The initializer's registered name for a mode of the config; the mapping alone says what is allowed."""
    for key in (mode, mode.lower()):
        if key in INITIALIZER_MAPPING:
            return INITIALIZER_MAPPING[key]
    raise LayoutError(
        f"{where}: mode {mode!r} is not in INITIALIZER_MAPPING; allowed: {listed(INITIALIZER_MAPPING)}."
        f"{did_you_mean(mode, INITIALIZER_MAPPING)} A mode of your own is added with "
        f"colonnade.constants.INITIALIZER_MAPPING[{mode!r}] = 'YourInitializer'.",
        code="C010",
    )


def _replicate(config: Any) -> Any:
    """The axis on which the shards of stage 3 are replicas."""
    zero = config.get("zero")
    return zero.get("replicate") if isinstance(zero, Mapping) and zero.get("stage") == _SHARDED else None


def _further_axis(spec: AxisSpec) -> Axis:
    mode = ParallelMode(spec.mode or spec.name)
    return Axis(spec.name, spec.size, mode, mode.data)


def _check_one_axis_per_mode(tensor_mode: str | None, further: tuple[Axis, ...]) -> None:
    held = {"tensor": tensor_mode} if tensor_mode is not None else {}
    for axis in further:
        for other, mode in held.items():
            if axis.mode.value == mode:
                raise LayoutError(
                    f"parallel: the axes {other!r} and {axis.name!r} both have {axis.mode}; a mode belongs to one axis",
                    code="C010",
                )
        held[axis.name] = axis.mode.value


def _tensor_data(mode: str | None) -> Any:
    """Ranks of the tensor axis see the same data, unless its mode is one that declares otherwise."""
    return ParallelMode(mode).data if mode is not None and mode in ParallelMode else "same"


def _data_size(sizes: ParallelSizes, further: tuple[Axis, ...], world_size: int) -> int:
    named = {"pipeline": sizes.pipeline, **{axis.name: axis.size for axis in further}, "tensor": sizes.tensor}
    rest = prod(named.values())
    product = " x ".join(f"{name} {size}" for name, size in named.items() if size > 1) or "no other axis"
    if world_size % rest:
        near = sorted({rest * max(1, world_size // rest), rest * (world_size // rest + 1)})
        raise LayoutError(
            f"parallel: {product} = {rest} does not divide the world of {world_size} ranks. "
            f"What would fit: {_fitting(named, world_size)}a world of {listed(near)} ranks.",
            code="C010",
        )
    left = world_size // rest
    if sizes.data is not None and sizes.data != left:
        raise LayoutError(
            f"parallel: data {sizes.data} x {product} = {sizes.data * rest} is not the world of {world_size} "
            f"ranks; data={left} would fit. Leave `data` out and it takes what is left.",
            code="C010",
        )
    return left


def _fitting(named: dict[str, int], world_size: int) -> str:
    """Changes, each of which would make the sizes divide the world: "tensor=2, or "."""
    rest = prod(named.values())
    changes = []
    for name, size in named.items():
        largest, remainder = divmod(world_size, rest // size)
        if largest and not remainder:
            best = min((d for d in range(1, largest + 1) if largest % d == 0), key=lambda d: (abs(d - size), d))
            changes.append(f"{name}={best}, or ")
    return "".join(changes)
