"""Layout: for every mode, the rank lists of the whole world. Integers only; no torch, no processes.

A layout is what the initializers return, checked. It answers for any rank of any world, so that plans and
tests can look at a million ranks from one process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from colonnade.context.grid import Grid, Listed, Partition
from colonnade.context.parallel_mode import DataKind, ParallelMode
from colonnade.errors import ContextError, LayoutError, listed


@dataclass(frozen=True)
class Axis:
    """One factor of the world: its name in the config, its size, its mode, and what data its ranks see."""

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
        """What others worked out from this layout, by a key of theirs: it lives as long as the layout."""

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
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 2

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
