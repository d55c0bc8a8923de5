"""A grid of ranks and the groups that its axes make: pure integer arithmetic, nothing listed until it is asked for.

`Grid((("data", 2), ("pipeline", 2), ("tensor", 2)))` numbers 8 ranks so that the tensor coordinate varies
fastest. A rank is thus a number written in digits, one per axis, and every built-in mode is "the ranks that
differ only in these digits". So one rank's group in a world of a million is found without looking at the others.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain, pairwise
from math import prod
from typing import Any, overload

from colonnade.errors import LayoutError, listed

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
        runs, twins = tuple(fine), tuple(coarse)
        return _ByDigits(self.outer + twins, runs), _ByDigits(self.outer + runs, twins)

    def __len__(self) -> int:
        return prod(size for _, size in self.outer)

    def _group(self, index: int) -> list[int]:
        base = 0
        for stride, size in reversed(self.outer):
            index, at = divmod(index, size)
            base += at * stride
        return list(self.group_of(base))


class Listed(Partition):
    """Groups that somebody wrote down, in the order they were given. Their checks are `layout.check_groups`."""

    def __init__(self, groups: Iterable[Iterable[int]], world_size: int) -> None:
        self._groups = [list(group) for group in groups]
        self._world_size = world_size

    @cached_property
    def digits(self) -> tuple[Digit, ...] | None:  # type: ignore[override]
        """Read off the first group; None unless all groups are what these digits make."""
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
