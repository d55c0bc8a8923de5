"""A grid of ranks: named axes, slowest first; pure integer arithmetic.

`Grid((("data", 2), ("pipeline", 2), ("tensor", 2)))` numbers 8 ranks so that the tensor coordinate varies
fastest. Every built-in mode is "the ranks that differ only in these axes" of such a grid.
"""

from __future__ import annotations

from functools import cached_property
from itertools import product
from math import prod

from colonnade.errors import LayoutError, listed

Groups = list[list[int]]


class Partition(list[list[int]]):
    """Groups that hold every rank exactly once, in ascending order, by the way they were made.

    Marked by its type, so that a layout of a million ranks need not be checked rank by rank.
    """

    def cut(self, size: int) -> tuple[Partition, Partition]:
        """Cut every group into runs of `size` ranks: (the runs, the ranks at the same place in their run)."""
        runs = Partition(block[at : at + size] for block in self for at in range(0, len(block), size))
        twins = Partition(block[at::size] for block in self for at in range(size))
        return runs, twins


class Grid:
    """Named axes and the rank numbers they give."""

    def __init__(self, axes: tuple[tuple[str, int], ...], ranks: list[int] | None = None) -> None:
        self.axes = axes
        self.sizes = dict(axes)
        self.world_size = prod(self.sizes.values())
        # One shared list: slices of it share the int objects, which saves most of the memory of large worlds.
        self._ranks = list(range(self.world_size)) if ranks is None else ranks

    @cached_property
    def strides(self) -> dict[str, int]:
        """How far apart two ranks are that differ by one in an axis."""
        strides, step = {}, 1
        for name, size in reversed(self.axes):
            strides[name] = step
            step *= size
        return strides

    def groups(self, *names: str) -> Partition:
        """All groups of ranks that differ only in the named axes; ascending inside and by first rank."""
        self._check(names)
        varying = [name for name, _ in self.axes if name in names]
        fixed = [name for name, _ in self.axes if name not in names]
        ranks = self._ranks
        bases = self._offsets(fixed)
        if len(varying) == 1:
            # One axis is one slice: this is what makes a million ranks a matter of milliseconds.
            step = self.strides[varying[0]]
            reach = step * self.sizes[varying[0]]
            return Partition(ranks[base : base + reach : step] for base in bases)
        offsets = self._offsets(varying)
        return Partition([ranks[base + offset] for offset in offsets] for base in bases)

    def split(self, name: str, **parts: int) -> Grid:
        """A finer grid in which axis `name` is replaced by `parts`, slowest first."""
        self._check((name,))
        if prod(parts.values()) != self.sizes[name]:
            raise LayoutError(f"axis {name!r} of size {self.sizes[name]} cannot be split into {parts}")
        finer: list[tuple[str, int]] = []
        for axis, size in self.axes:
            finer.extend(parts.items() if axis == name else [(axis, size)])
        return Grid(tuple(finer), self._ranks)

    def coordinates(self, rank: int) -> dict[str, int]:
        """The coordinate of a rank on each axis."""
        if not 0 <= rank < self.world_size:
            raise LayoutError(f"rank {rank} is outside the world of {self.world_size} ranks")
        return {name: rank // self.strides[name] % size for name, size in self.axes}

    def rank_at(self, **coordinates: int) -> int:
        """The rank with these coordinates; axes not named are at 0."""
        self._check(tuple(coordinates))
        for name, at in coordinates.items():
            if not 0 <= at < self.sizes[name]:
                raise LayoutError(f"axis {name!r} has size {self.sizes[name]}; there is no coordinate {at}")
        return sum(self.strides[name] * at for name, at in coordinates.items())

    def _offsets(self, names: list[str]) -> list[int]:
        """Rank offsets of all coordinates on `names`, ascending."""
        steps = [range(0, self.sizes[name] * self.strides[name], self.strides[name]) for name in names]
        return [sum(at) for at in product(*steps)] if len(steps) != 1 else list(steps[0])

    def _check(self, names: tuple[str, ...]) -> None:
        for name in names:
            if name not in self.sizes:
                raise LayoutError(f"no axis {name!r}; the axes are {listed(self.sizes)}")
