"""From a config to a layout: which initializers a world needs, and what they return, checked and joined.

`build_layout` runs the initializers of every mode (`run_initializers`), which return rank lists, and makes a layout of them
(`layout_of`). An initializer as Colossal-AI has them creates its process groups itself: it waits (`Build.waiting`) until there is
a world, where `colonnade.compat` takes it on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

from colonnade.config import parallel_sizes
from colonnade.constants import INITIALIZER_MAPPING
from colonnade.context.dist_group_initializer import ModeGroups, ProcessGroupInitializer
from colonnade.context.layout import (
    Axis,
    Grid,
    Layout,
    Listed,
    Partition,
    check_groups,
    check_mode,
    grid_of,
    world_axes,
)
from colonnade.context.parallel_mode import ParallelMode
from colonnade.errors import LayoutError, listed
from colonnade.registry import DIST_GROUP_INITIALIZER


def build_layout(config: Any, world_size: int) -> Layout:
    """The layout of a world of this size, with no process group and no torch.

    An initializer that creates its own groups cannot be planned this way; it is an error that names it.
    """
    axes = world_axes(config, world_size)
    build = run_initializers(config, world_size, rank=0)
    build.refuse_waiting()
    return layout_of(axes, build.groups, parallel_sizes(config).tensor_mode)


class Waiting(NamedTuple):
    """An initializer that creates its groups itself, so only in a running world: `colonnade.compat` takes it on."""

    initializer: Any
    source: str
    mode: str
    returned: Any


@dataclass
class Build:
    """The results of the initializers: groups of the whole world, and initializers that need a running world."""

    groups: ModeGroups = field(default_factory=dict)
    sources: dict[ParallelMode, str] = field(default_factory=dict)
    waiting: list[Waiting] = field(default_factory=list)

    def add(self, found: ModeGroups, source: str) -> None:
        for mode, groups in found.items():
            if mode in self.groups and self.groups[mode] != groups:
                raise LayoutError(
                    f"{source} and {self.sources[mode]} both define {mode}, with different groups. "
                    f"Remove one from `parallel`, or register a mode of its own for it.",
                    code="C011",
                )
            self.groups[mode] = groups
            self.sources[mode] = source

    def refuse_waiting(self) -> None:
        """Initializers that create groups themselves are an error where nobody takes them on."""
        if self.waiting:
            raise LayoutError(
                f"{self.waiting[0].source} creates process groups itself, so its layout is known only in a running world. "
                f"Let init_parallel_groups() return {{mode: [[ranks], ...]}} instead, or call colonnade.compat.install() "
                f"before launch to run it as it is.",
                code="C011",
            )


def run_initializers(config: Any, world_size: int, rank: int) -> Build:
    """Run every initializer that the config asks for, in the documented order."""
    axes = world_axes(config, world_size)
    grid = grid_of(axes)
    six = (rank, world_size, config, grid.sizes["data"], grid.sizes["pipeline"], grid.sizes["tensor"])
    build = Build()
    build.add({ParallelMode.GLOBAL: grid.groups(*grid.sizes)}, "the world")
    for mode, registered, kwargs in _wanted(config):
        initializer = _construct(registered, mode, six, kwargs)
        source = f"{registered} (mode {mode!r})"
        returned = _call(initializer)
        if returned is NEEDS_WORLD or _is_made(returned):
            build.waiting.append(Waiting(initializer, source, mode, returned))
        else:
            build.add(read_groups(returned, initializer, source, mode), source)
    # A further axis whose initializer (if any) says nothing about its mode is grouped by the axis itself.
    for axis in axes:
        if axis.mode not in build.groups:
            build.add({axis.mode: grid.groups(axis.name)}, f"axis {axis.name!r}")
    return build


def read_groups(returned: Any, initializer: Any, source: str, mode: str) -> ModeGroups:
    """Check and normalise what an initializer returned: a dict, a list of rank lists, or None."""
    if returned is None:
        return {}
    if _is_list_of_rank_lists(returned):
        returned = {ParallelMode(mode): returned}
    if not isinstance(returned, dict):
        raise LayoutError(
            f"{source} returned {returned!r}; return {{mode: [[ranks], ...]}}, or None if it adds nothing", code="C011"
        )
    found: ModeGroups = {}
    for key, groups in returned.items():
        if not isinstance(groups, Partition) and not _is_list_of_rank_lists(groups):
            raise LayoutError(
                f"{source} returned {groups!r} for {key}; a mode's groups are a list of rank lists", code="C011"
            )
        found[ParallelMode(key)] = groups if isinstance(groups, Partition) else [list(group) for group in groups]
    for known, lists in found.items():
        whole = getattr(initializer, "whole_world", True)
        check_groups(known, lists, initializer.world_size, source, whole)
    return found


NEEDS_WORLD = object()


def _wanted(config: Any) -> Iterable[tuple[str, str, dict[str, Any]]]:
    """(mode of the config, registered initializer, its own arguments), in order."""
    sizes = parallel_sizes(config)
    for mode in ("data", "model", "pipeline", "tensor"):
        yield mode, check_mode(mode, "parallel"), {}
    if sizes.tensor_mode is not None:
        yield (
            sizes.tensor_mode,
            check_mode(sizes.tensor_mode, "parallel.tensor"),
            dict(sizes.tensor_kwargs),
        )
    if sizes.expert is not None:
        yield (
            "expert",
            check_mode("expert", "parallel.expert"),
            {"size": sizes.expert.size, **sizes.expert.kwargs},
        )
    for axis in sizes.axes:
        mode = axis.mode or axis.name
        if axis.kwargs or mode in INITIALIZER_MAPPING or mode.lower() in INITIALIZER_MAPPING:
            yield mode, check_mode(mode, f"parallel.{axis.name}"), dict(axis.kwargs)


def _construct(registered: str, mode: str, six: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    initializer = DIST_GROUP_INITIALIZER.get_module(registered)
    try:
        return initializer(*six, **kwargs)
    except TypeError as error:
        given = listed(f"{key}=" for key in kwargs)
        raise LayoutError(
            f"parallel, mode {mode!r}: {registered} could not be built with its own arguments ({given}): {error}. "
            f"The first six arguments come by position; every further one must stand in the config beside `mode`.",
            code="C011",
        ) from error


def _call(initializer: Any) -> Any:
    """Run a pure initializer; one that needs a process group is told apart and runs later."""
    own = getattr(type(initializer), "init_parallel_groups", None)
    if own in (None, ProcessGroupInitializer.init_parallel_groups):
        if not hasattr(initializer, "init_dist_group"):
            raise LayoutError(
                f"{type(initializer).__name__} defines neither init_parallel_groups() nor init_dist_group()",
                code="C011",
            )
        return NEEDS_WORLD
    try:
        returned = initializer.init_parallel_groups()
    except (RuntimeError, ValueError) as error:
        if "process group has not been initialized" in str(error):
            return NEEDS_WORLD
        raise
    return returned


def _is_list_of_rank_lists(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(item, (list, tuple, range)) for item in value)


def _is_made(returned: Any) -> bool:
    """Whether these are groups that exist: tuples as Colossal-AI's initializers return them, one or several."""
    made = returned if isinstance(returned, list) else [returned]
    return bool(made) and all(isinstance(item, tuple) and len(item) == 6 for item in made)


# --------------------------------------------------------------------------------------------------
# Where each rank stands on every axis, read from groups that an initializer wrote down by hand.
#
# The grid numbers ranks by the axes alone. An initializer may group the ranks of an axis otherwise, [[0, 3], [1, 2]] say. The place
# of a rank on that axis is then its position in its group, and its place in the data is the number of its replica: of the ranks that
# are reached along all axes but data. Modes that follow from the axes (DATA, MODEL, ...) are grouped by these places.
# --------------------------------------------------------------------------------------------------


Groups = Mapping[ParallelMode, Sequence[Sequence[int]]]

_UNORDERED = (ParallelMode.DATA, ParallelMode.MODEL, ParallelMode.GLOBAL, ParallelMode.SEQUENCE_DP)
"""Modes over which ranks only add up: nothing is cut by the positions in their groups."""
_NUMBERS = "torch numbers the ranks of a group in ascending order"


def layout_of(axes: tuple[Axis, ...], groups: Groups, tensor_mode: str | None = None) -> Layout:
    """The layout of these groups; where an axis has groups that are not the grid's, places are read from them.

    `tensor_mode`: the mode of the tensor axis in the config, whose initializer may group that axis.
    """
    grid = grid_of(axes)
    own = _own_groups(axes, groups, grid, tensor_mode)
    if not own:
        return Layout(axes, groups)
    _check_sizes(axes, own, grid.world_size)
    ranks = _ranks_by_place(axes, own, grid)
    if ranks == list(range(grid.world_size)):
        _check_data(own, grid.groups("data"))
        return Layout(axes, groups)
    places = sorted(range(grid.world_size), key=ranks.__getitem__)
    found = {mode: _moved(mode, each, ranks) if isinstance(each, Partition) else each for mode, each in groups.items()}
    _check_data(own, [sorted(ranks[place] for place in group) for group in grid.groups("data")])
    return Layout(axes, found, places)


def _own_groups(
    axes: tuple[Axis, ...], groups: Groups, grid: Grid, tensor_mode: str | None
) -> dict[Axis, list[list[int]]]:
    """The groups of axes that somebody wrote down and that are not those of the grid."""
    found: dict[Axis, list[list[int]]] = {}
    for axis in axes:
        lists = groups.get(axis.mode)
        if axis.name == "tensor" and isinstance(lists, Partition) and tensor_mode in ParallelMode:
            finer = groups.get(ParallelMode(tensor_mode))
            if finer is not None and sum(map(len, finer)) == grid.world_size and {*map(len, finer)} == {axis.size}:
                lists = finer
        if lists is None or isinstance(lists, Partition):
            continue
        written = sorted(list(group) for group in lists)
        if written != sorted(grid.groups(axis.name)):
            found[axis] = written
    return found


def _check_sizes(axes: tuple[Axis, ...], own: Mapping[Axis, list[list[int]]], world_size: int) -> None:
    for axis, groups in own.items():
        odd = next((group for group in groups if len(group) != axis.size), None)
        if odd is not None:
            raise LayoutError(
                f"parallel.{axis.name}: the axis has {axis.size} ranks, but {axis.mode} has the group {odd} of {len(odd)}; return "
                f"groups of {axis.size} ranks, or register a mode of another name for groups that are not those of an axis",
                code="C161",
            )
        inside = {rank for group in groups for rank in group}
        missing = [rank for rank in range(world_size) if rank not in inside]
        if missing:
            raise LayoutError(
                f"parallel.{axis.name}: rank {listed(missing[:8])} of {world_size} is in no group of {axis.mode}, so it has no place on "
                f"this axis; put every rank into a group",
                code="C161",
            )


def _ranks_by_place(axes: tuple[Axis, ...], own: Mapping[Axis, list[list[int]]], grid: Grid) -> list[int]:
    """For each place on the axes, numbered as the grid numbers its ranks: the rank that stands there."""
    model = [axis for axis in axes if axis.name != "data"]
    groups = {axis: own.get(axis) or list(grid.groups(axis.name)) for axis in model}
    place: list[dict[str, int]] = [{} for _ in range(grid.world_size)]
    for axis, lists in groups.items():
        for group in lists:
            for at, rank in enumerate(group):
                place[rank][axis.name] = at
    for axis in sorted(model, key=lambda each: each not in own):  # what somebody wrote down is named first
        for group in groups[axis]:
            for other in model:
                apart = {place[rank][other.name] for rank in group}
                if other is not axis and len(apart) > 1:
                    raise LayoutError(
                        f"parallel.{axis.name}: the group {group} of {axis.mode} has ranks at places {listed(sorted(apart))} of the axis "
                        f"{other.name!r}. Ranks of a group of one axis stand at one place of all others but data: return such "
                        f"groups, or let an initializer group {other.mode} too",
                        code="C161",
                    )
    replica = _replicas(model, groups, grid.world_size)
    ranks = [-1] * grid.world_size
    for rank, here in enumerate(place):
        ranks[grid.rank_at(data=replica[rank], **here)] = rank
    return ranks


def _replicas(model: list[Axis], groups: Mapping[Axis, list[list[int]]], world_size: int) -> list[int]:
    """The number of the replica that each rank is in, by first rank: the ranks reached along all axes but data."""
    around: list[list[list[int]]] = [[] for _ in range(world_size)]
    for lists in groups.values():
        for group in lists:
            for rank in group:
                around[rank].append(group)
    size = prod(axis.size for axis in model)
    number = [-1] * world_size
    replicas = 0
    for first in range(world_size):
        if number[first] >= 0:
            continue
        number[first] = replicas
        reached = [first]
        for rank in reached:
            for group in around[rank]:
                for other in group:
                    if number[other] < 0:
                        number[other] = replicas
                        reached.append(other)
        if len(reached) != size:
            sized = [axis for axis in model if axis.size > 1]
            raise LayoutError(
                f"parallel: along the groups of {listed(axis.mode.name for axis in sized)} rank {first} reaches {len(reached)} ranks, but a "
                f"replica of the model has {' x '.join(str(axis.size) for axis in sized)} = {size}, so the ranks have no one place in "
                f"the data. Ranks that see other data are in no common group of these modes; correct the initializer",
                code="C161",
            )
        replicas += 1
    return number


def _moved(mode: ParallelMode, groups: Partition, ranks: Sequence[int]) -> Listed:
    """Groups of places as groups of the ranks that stand there."""
    moved = [[ranks[place] for place in group] for group in groups]
    disordered = next((group for group in moved if any(low > high for low, high in pairwise(group))), None)
    if disordered is not None and mode not in _UNORDERED:
        raise LayoutError(
            f"the places of {mode} would be taken by the ranks {disordered}, in this order, but {_NUMBERS}, so layers would cut "
            f"by other places. Number the groups of your initializer so that ranks ascend along {mode.name} too",
            code="C161",
        )
    return Listed(sorted(sorted(group) for group in moved), len(ranks))


def _check_data(own: Mapping[Axis, list[list[int]]], data: Sequence[Sequence[int]]) -> None:
    """Groups of DATA that were written down must be those of ranks that differ in their data alone."""
    for axis, groups in own.items():
        right = {rank: list(group) for group in data for rank in group}
        wrong = next((group for group in groups if right[group[0]] != group), None) if axis.name == "data" else None
        if wrong is not None:
            raise LayoutError(
                f"parallel.data: the group {wrong} of {axis.mode} has ranks at several places of the other axes, so their "
                f"gradients are not of the same parameters; ranks that hold what rank {wrong[0]} holds are {right[wrong[0]]}. Return that, "
                f"or group the other axes to fit",
                code="C161",
            )
