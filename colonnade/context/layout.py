"""Layout: the rank lists of every mode (a dimension of the device mesh). Integers only; no torch, no processes.

A layout answers questions about any rank of any world, so plans and tests can look at a million ranks from one process. Bottom up:

- a rank is a mixed-radix number with one digit per axis (`Digit`, `ranks_with`, `refine`, `joined`);
- a `Partition` is the groups of one mode: computed from digits, or listed explicitly by a user's initializer;
- a `Grid` assigns ranks to named axes, and has the groups of any combination of axes;
- a `Layout` has the partitions of all modes, returned by the initializers and checked by `check_groups`;
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

from colonnade.config import parallel_sizes
from colonnade.constants import INITIALIZER_MAPPING
from colonnade.context.parallel_mode import DataKind, ParallelMode
from colonnade.errors import ContextError, LayoutError, did_you_mean, listed
from colonnade.texts import digest_of

# --------------------------------------------------------------------------------------------------
# Digits and partitions: pure integer arithmetic; rank lists are made only on request.
#
# `Grid((("data", 2), ("pipeline", 2), ("tensor", 2)))` numbers 8 ranks so that the tensor coordinate varies
# fastest. A rank is a number with one digit per axis, and a group of a built-in mode is the set of ranks that
# differ only in certain digits. One rank's group in a world of a million is therefore found without looking at other ranks.
# --------------------------------------------------------------------------------------------------


Digit = tuple[int, int]
"""A digit of a rank: (stride, size), the difference between neighbours and the number of values."""


class Ranks(Sequence[int]):
    """A sequence of evenly spaced ranks, stored as a range, that compares equal to a list or tuple of the same ranks.

    A million ranks take no memory.
    """

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
    """The groups of one mode: a sequence of ascending rank lists; a rank is in at most one of them.

    Made by `Grid.groups` and `split_into_runs` (correct by construction, so a million ranks need no check) or `Listed`.
    """

    digits: tuple[Digit, ...] | None = None
    """The digits in which the ranks of a group differ, slowest first; None if the groups are not such a product."""

    @abstractmethod
    def group_of(self, rank: int) -> Sequence[int]:
        """The group of `rank`."""

    @abstractmethod
    def position(self, rank: int) -> int:
        """The position of `rank` in its group; -1 if it has no group."""

    @abstractmethod
    def describe(self) -> str:
        """A text that identifies the partition: equal texts mean equal partitions."""

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
    """Groups of ranks that differ only in the digits `inner`; the other digits, `outer`, number the groups, slowest first."""

    def __init__(self, outer: tuple[Digit, ...], inner: tuple[Digit, ...]) -> None:
        self.outer, self.inner = outer, inner
        self.digits = inner

    def group_of(self, rank: int) -> Sequence[int]:
        return ranks_with(rank, [(digit, range(digit[1])) for digit in self.inner])

    def position(self, rank: int) -> int:
        return _number(rank, self.inner)

    def describe(self) -> str:
        return f"{self.outer}{self.inner}"

    def split_into_runs(self, size: int) -> tuple[Partition, Partition]:
        """Split every group into runs of `size` ranks: (the runs, the groups of ranks at the same position in their runs)."""
        # Starting at the fastest digit, as much of each digit as still fits goes into the run; the rest numbers the runs.
        left = size
        coarse: list[Digit] = []
        fine: list[Digit] = []
        for stride, length in reversed(self.inner):
            run = min(left, length)
            if left % run or length % run:
                # A run that ends inside an axis is not a product of digits, so its groups are listed.
                world_size = len(self) * prod(length for _, length in self.inner)
                listed_runs = [group[at : at + size] for group in self for at in range(0, len(group), size)]
                across = [group[at::size] for group in self for at in range(size)]
                return Listed(listed_runs, world_size), Listed(across, world_size)
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
    """Explicitly listed groups, in the given order; `check_groups` validates them."""

    def __init__(self, groups: Iterable[Iterable[int]], world_size: int) -> None:
        self._groups = [list(group) for group in groups]
        self._world_size = world_size

    @cached_property
    def digits(self) -> tuple[Digit, ...] | None:  # type: ignore[override]
        """The digits in which the ranks of a group differ; None if the listed groups are not a product of digits."""
        # The group of rank 0 reveals its digits. The first difference is the stride of the fastest digit, whose size is the length
        # of the run with this difference. Every size-th rank then gives the next digit in the same way.
        first = next((group for group in self._groups if 0 in group), [])
        digits: list[Digit] = []
        left = first
        while len(left) > 1:
            stride = left[1]
            size = next((at for at, rank in enumerate(left) if rank != at * stride), len(left))
            digits.insert(0, (stride, size))
            left = left[::size]
        # All other groups must follow from the same digits, and together include every rank.
        refined = refine([digits], self._world_size)
        complete = sum(map(len, self._groups)) == self._world_size
        full = [(digit, range(digit[1])) for digit in digits]
        if refined is None or not complete or any(ranks_with(group[0], full) != group for group in self._groups):
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
    """Named axes, and the numbering of ranks by their coordinates on these axes."""

    def __init__(self, axes: tuple[tuple[str, int], ...]) -> None:
        self.axes = axes
        self.sizes = dict(axes)
        self.world_size = prod(self.sizes.values())

    @cached_property
    def digits(self) -> dict[str, Digit]:
        """The digit (stride, size) of each axis: the difference between neighbouring ranks on the axis, and the size of the
        axis."""
        digits, step = {}, 1
        for name, size in reversed(self.axes):
            digits[name] = (step, size)
            step *= size
        return digits

    def groups(self, *names: str) -> _ByDigits:
        """All groups of ranks that differ only in the named axes, ordered by first rank."""
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
        """The rank with these coordinates; axes that are not named have coordinate 0."""
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
    """Return the fewest digits, slowest first, of which every digit in `products` is a product; None if two digits overlap only
    partly.
    """
    # A digit starts at its stride and ends at stride * size. Sorted, each of these bounds must divide the next.
    bounds = {1, world_size}
    for stride, size in chain.from_iterable(products):
        if size > 1:
            bounds |= {stride, stride * size}
    steps = list(pairwise(sorted(bounds)))
    if any(high % low for low, high in steps):
        return None
    return tuple((low, high // low) for low, high in reversed(steps))


def joined(digits: Iterable[Digit]) -> list[Digit]:
    """Merge adjacent digits (given slowest first) into one. The result is a canonical form: equal results mean equal products."""
    found: list[Digit] = []
    for stride, size in digits:
        if found and found[-1][0] == stride * size:
            found[-1] = (stride, found[-1][1] * size)
        elif size > 1:
            found.append((stride, size))
    return found


def ranks_with(rank: int, values: Iterable[tuple[Digit, Sequence[int]]]) -> Sequence[int]:
    """The ranks, ascending, that equal `rank` in all digits except those in `values`, which may take the given values.

    `values` lists the digits slowest first, each with its allowed values in ascending order."""
    # `base` is the lowest of these ranks; `steps` has, for each digit with several values, their distances from the lowest value.
    base = rank
    steps: list[Sequence[int]] = []
    for (stride, size), allowed in values:
        base += (allowed[0] - rank // stride % size) * stride
        if len(allowed) == size > 1:
            last = steps[-1] if steps else ()
            if isinstance(last, range) and last.step == stride * size:  # two adjacent complete digits merge into one
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
            # A shifted range is a range, so a large list is filled by slices instead of a Python step for each rank.
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
    """The number formed by these digits of the rank, slowest first."""
    number = 0
    for stride, size in digits:
        number = number * size + rank // stride % size
    return number


@dataclass(frozen=True)
class Axis:
    """An axis of the grid of ranks: its name in the config, its size, its mode, and whether its ranks see the same data."""

    name: str
    size: int
    mode: ParallelMode
    data: DataKind

    @property
    def seeded_apart(self) -> bool:
        """Whether ranks along this axis have different default seeds, and so draw different numbers outside the random streams."""
        return self.data == "distinct" or self.mode is ParallelMode.PIPELINE


class Layout:
    """The groups of every mode over a world of ranks.

    Questions about one rank are answered by arithmetic; rank lists of the full world are made only on request.

    Args:
        axes: The axes, slowest first, whose sizes multiply to the world size.
        groups: The rank lists of each mode.
        places: For a custom initializer that orders ranks differently: for each rank, its place in the grid, which is the rank
            that has the same coordinates in the default order. None for the default order.
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
        """A cache for values that other modules derive from this layout, by a key of the module."""

    @property
    def modes(self) -> tuple[ParallelMode, ...]:
        """Every mode that has groups in this layout."""
        return tuple(self._groups)

    def groups(self, mode: ParallelMode) -> Partition:
        """All groups of a mode: a sequence of lists of global ranks, each made on access.

        Raises:
            ContextError: The mode has no groups here (code C012).
        """
        if mode not in self._groups:
            raise ContextError(
                f"{mode} has no groups in this layout. The modes with groups are "
                f"{listed(known.name for known in self._groups)}. Add {mode} under `parallel` in the config.",
                code="C012",
            )
        return self._groups[mode]

    def has(self, mode: ParallelMode, rank: int | None = None) -> bool:
        """Whether the mode has groups in this layout and, if given, whether the rank is in one of them."""
        return mode in self._groups and (rank is None or self._position(mode, rank) >= 0)

    def group_of(self, mode: ParallelMode, rank: int) -> Sequence[int]:
        """The group of `mode` with `rank`; raises ContextError if there is none."""
        self.local_rank(mode, rank)
        return self._groups[mode].group_of(rank)

    def local_rank(self, mode: ParallelMode, rank: int) -> int:
        """The position of `rank` in its group of `mode`; raises ContextError if there is none."""
        position = self._position(mode, rank)
        if position < 0:
            members = sorted(member for group in self.groups(mode) for member in group)
            raise ContextError(
                f"rank {rank} is in no group of {mode}. The ranks in groups of this mode are "
                f"{listed(members[:16])}{' ...' if len(members) > 16 else ''}. Check layout.has(mode, rank) before "
                "the call.",
                code="C012",
            )
        return position

    def coordinates(self, rank: int) -> dict[str, int]:
        """The coordinate of a rank on each axis."""
        inside = self.places is not None and 0 <= rank < self.world_size
        return self.grid.coordinates(self.places[rank] if inside and self.places is not None else rank)

    def rank_at(self, **coordinates: int) -> int:
        """The rank with these coordinates on the axes; axes that are not named have coordinate 0."""
        place = self.grid.rank_at(**coordinates)
        return place if self.places is None else self.at_places[place]

    @cached_property
    def at_places(self) -> tuple[int, ...]:
        """The rank at each place of the grid: the inverse of `places`."""
        places = range(self.world_size) if self.places is None else self.places
        return tuple(sorted(range(self.world_size), key=places.__getitem__))

    @cached_property
    def on_grid(self) -> Layout:
        """The same layout with ranks renumbered by their places in the grid, so that axes are digits of a rank; `self` if
        `places` is None."""
        if self.places is None:
            return self
        axes = {axis.mode: axis.name for axis in self.axes}
        moved: dict[ParallelMode, Sequence[Sequence[int]]] = {}
        for mode, groups in self._groups.items():
            # The order of the ranks is kept: it is the order of positions, by which tensors are sharded and gathered.
            renumbered = [[self.places[rank] for rank in group] for group in groups]
            known = self.grid.groups(axes[mode]) if mode in axes else None
            moved[mode] = known if known is not None and sorted(renumbered) == sorted(known) else renumbered
        return Layout(self.axes, moved)

    @property
    def is_regular(self) -> bool:
        """Whether the groups of every mode are products of axes (or parts of axes), and so have the same form for every rank."""
        return all(groups.digits is not None for groups in self._groups.values())

    def rank_sets(self, rank: int | None = None) -> list[tuple[int, ...]]:
        """Every distinct group of every mode (or only those of `rank`), in the same order on all ranks; the world comes first."""
        if rank is not None:
            return list(dict.fromkeys(tuple(self.group_of(mode, rank)) for mode in self.modes if self.has(mode, rank)))
        return list(dict.fromkeys(tuple(group) for mode in self._groups for group in self._groups[mode]))

    def is_group(self, ranks: Sequence[int]) -> bool:
        """Whether these ranks (ascending) are a group of any mode."""
        return any(self.has(mode, ranks[0]) and self.group_of(mode, ranks[0]) == list(ranks) for mode in self.modes)

    @property
    def distinct_data(self) -> int:
        """The number of ranks with distinct data: the divisor of a mean over the global batch."""
        seen = 1
        for axis in self.axes:
            seen *= axis.size if axis.data == "distinct" else 1
        return seen

    @property
    def sample_axes(self) -> tuple[Axis, ...]:
        """The axes whose ranks get different samples: those with distinct data, except for the axis that shards sequences."""
        # That is the axis of the mode SEQUENCE, or the tensor axis with mode="sequence".
        sharded = {ParallelMode.SEQUENCE, ParallelMode.TENSOR} if self.has(ParallelMode.SEQUENCE) else set()
        return tuple(axis for axis in self.axes if axis.data == "distinct" and axis.mode not in sharded)

    def digest(self) -> int:
        """A 62-bit hash of the axes and groups."""
        text = repr([(mode.value, groups.describe()) for mode, groups in self._groups.items()]) + repr(self.axes)
        return digest_of(text)

    def describe(self, mode_groups: int = 4) -> str:
        """A table of modes and their groups as text, with at most `mode_groups` groups per mode."""
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
    mode: ParallelMode, groups: Sequence[Sequence[int]], world_size: int, source: str, complete: bool
) -> None:
    """Raise LayoutError if rank lists overlap, contain a rank outside the world, do not ascend or, with `complete`, miss a rank."""
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
                    f"A rank can be in only one group of a mode; use two modes instead.",
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
    if missing and complete:
        raise LayoutError(
            f"{where}do not contain rank{'s' if len(missing) > 1 else ''} "
            f"{listed(missing[:8])}{' ...' if len(missing) > 8 else ''} of {world_size}. Put each missing rank into "
            "a group; a group of one rank is allowed. If these ranks take no part in the mode, set `whole_world = "
            "False` on the initializer.",
            code="C011",
        )


# --------------------------------------------------------------------------------------------------
# From the `parallel` section of a config to the axes of a world of a given size.
# --------------------------------------------------------------------------------------------------


_SHARDED = 3
"""The ZeRO stage that can have replicas of its shards (hybrid sharding)."""


def world_axes(config: Any, world_size: int) -> tuple[Axis, ...]:
    """The axes of the world, slowest first: data, pipeline, further axes in the config's order, tensor.

    With `zero.replicate`: that axis, pipeline, data, other further axes, tensor. The data axis takes the ranks that the other
    axes leave over, unless the config sets its size.

    Raises:
        LayoutError: The sizes do not multiply to the world size; the message names factors that would fit.
    """
    if world_size < 1:
        raise LayoutError(f"a world has at least one rank, not {world_size}", code="C010")
    sizes = parallel_sizes(config)
    modes = [(spec, ParallelMode(spec.mode or spec.name)) for spec in sizes.axes]
    further = tuple(Axis(spec.name, spec.size, mode, mode.data) for spec, mode in modes)

    # A mode identifies its axis, so no two axes may share a mode.
    taken = {"tensor": sizes.tensor_mode} if sizes.tensor_mode is not None else {}
    for axis in further:
        for other, value in taken.items():
            if axis.mode.value == value:
                raise LayoutError(
                    f"parallel.{other} and parallel.{axis.name} are two axes of the one mode {axis.mode}. Give "
                    "one of them another mode.",
                    code="C010",
                )
        taken[axis.name] = axis.mode.value

    # The size of the data axis.
    named = {"pipeline": sizes.pipeline, **{axis.name: axis.size for axis in further}, "tensor": sizes.tensor}
    rest = prod(named.values())
    factors = [f"{name}={size}" for name, size in named.items() if size > 1]
    product = " x ".join(factors) + (f" = {rest}" if len(factors) > 1 else "")
    data = world_size // rest
    if world_size % rest:
        near = sorted({rest * max(1, data), rest * (data + 1)})
        raise LayoutError(
            f"parallel: {product} does not divide world_size={world_size}. "
            f"Possible: {_fitting(named, world_size)}a world of {listed(near)} ranks.",
            code="C010",
        )
    if sizes.data is not None and sizes.data != data:
        factors = [f"data={sizes.data}", *factors]
        product = " x ".join(factors) + (f" = {sizes.data * rest}" if len(factors) > 1 else "")
        raise LayoutError(
            f"parallel: {product} is not world_size={world_size}; data={data} would fit. Leave `data` out to give the axis all remaining ranks.",
            code="C010",
        )

    # Ranks are numbered host by host. With `zero.replicate`, the ranks of the data axis all-gather and reduce-scatter every layer,
    # so they should be on one host: the axis becomes faster. Replicas only all-reduce, and are put on different hosts.
    zero = config.get("zero")
    replicate = zero.get("replicate") if isinstance(zero, Mapping) and zero.get("stage") == _SHARDED else None
    replicas = tuple(axis for axis in further if axis.name == replicate and axis.data == "distinct")
    first = (
        Axis("data", data, ParallelMode.DATA, "distinct"),
        Axis("pipeline", sizes.pipeline, ParallelMode.PIPELINE, "same"),
    )
    # Tensor ranks see the same data unless the mode of the axis (such as context parallelism) declares otherwise.
    known = sizes.tensor_mode is not None and sizes.tensor_mode in ParallelMode
    tensor_data = ParallelMode(sizes.tensor_mode).data if known else "same"
    return (
        *replicas,
        *(reversed(first) if replicas else first),
        *(axis for axis in further if axis not in replicas),
        Axis("tensor", sizes.tensor, ParallelMode.TENSOR, tensor_data),
    )


@lru_cache(maxsize=4)
def grid_of(axes: tuple[Axis, ...]) -> Grid:
    """The grid of these axes; cached, because all initializers of a world use the same one."""
    return Grid(tuple((axis.name, axis.size) for axis in axes))


def check_mode(mode: str, where: str) -> str:
    """Look up the registered name of the initializer for a mode of the config in `INITIALIZER_MAPPING`."""
    for key in (mode, mode.lower()):
        if key in INITIALIZER_MAPPING:
            return INITIALIZER_MAPPING[key]
    raise LayoutError(
        f"{where}: mode {mode!r} is not in INITIALIZER_MAPPING; allowed: {listed(INITIALIZER_MAPPING)}."
        f"{did_you_mean(mode, INITIALIZER_MAPPING)} Add a custom mode by "
        f"colonnade.constants.INITIALIZER_MAPPING[{mode!r}] = 'YourInitializer'.",
        code="C010",
    )


def _fitting(named: dict[str, int], world_size: int) -> str:
    """Single changes that would make the sizes divide the world, such as "tensor=2, or "."""
    rest = prod(named.values())
    changes = []
    for name, size in named.items():
        largest, remainder = divmod(world_size, rest // size)
        if largest and not remainder:
            best = min((d for d in range(1, largest + 1) if largest % d == 0), key=lambda d: (abs(d - size), d))
            changes.append(f"{name}={best}, or ")
    return "".join(changes)
