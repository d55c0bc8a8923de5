"""Builds the layout of a config: runs the process group initializers, checks the rank lists that they return, and merges them.

`build_layout` runs the initializers of all modes (`run_initializers`) and makes a layout of their groups (`layout_of`). An
initializer in the style of Colossal-AI creates its process groups itself. Such initializers are collected in `Build.waiting`, and
`colonnade.compat` runs them when the world has been joined.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

from colonnade.config import parallel_sizes
from colonnade.constants import INITIALIZER_MAPPING
from colonnade.context.dist_group_initializer import ModeGroups, ProcessGroupInitializer
from colonnade.context.layout import (
    Axis,
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
    """The layout of a world of this size, computed without processes or torch.

    Args:
        config: A config with a `parallel` section.
        world_size: The number of ranks.

    Raises:
        LayoutError: The sizes do not fit, groups are invalid, or an initializer creates its own process groups.
    """
    axes = world_axes(config, world_size)
    build = run_initializers(config, world_size, rank=0)
    build.refuse_waiting()
    return layout_of(axes, build.groups, parallel_sizes(config).tensor_mode)


class Waiting(NamedTuple):
    """An initializer that creates its process groups itself, which needs a running world and `colonnade.compat`."""

    initializer: Any
    source: str
    mode: str
    returned: Any


@dataclass
class Build:
    """The results of the initializers: groups of all ranks, and initializers that need a running world."""

    groups: ModeGroups = field(default_factory=dict)
    sources: dict[ParallelMode, str] = field(default_factory=dict)
    waiting: list[Waiting] = field(default_factory=list)

    def add(self, found: ModeGroups, source: str) -> None:
        for mode, groups in found.items():
            if mode in self.groups and self.groups[mode] != groups:
                raise LayoutError(
                    f"{source} and {self.sources[mode]} define different groups for the one mode {mode}. Remove one "
                    "of the two from `parallel`, or register another mode for the second.",
                    code="C011",
                )
            self.groups[mode] = groups
            self.sources[mode] = source

    def refuse_waiting(self) -> None:
        """Raise if an initializer still waits for a running world."""
        if self.waiting:
            raise LayoutError(
                f"{self.waiting[0].source} creates process groups itself, so its layout is known only in a running world. "
                f"Return {{mode: [[ranks], ...]}} from init_parallel_groups() instead, or call colonnade.compat.install() "
                f"before launch to run it unchanged.",
                code="C011",
            )


def run_initializers(config: Any, world_size: int, rank: int) -> Build:
    """Run every initializer that the config needs, in the order data, model, pipeline, tensor, tensor mode, experts, further
    axes.
    """
    axes = world_axes(config, world_size)
    grid = grid_of(axes)
    sizes = parallel_sizes(config)
    wanted: list[
        tuple[str, str, dict[str, Any]]
    ] = []  # (mode of the config, registered initializer, its own arguments)
    wanted += [(mode, check_mode(mode, "parallel"), {}) for mode in ("data", "model", "pipeline", "tensor")]
    if sizes.tensor_mode is not None:
        registered = check_mode(sizes.tensor_mode, "parallel.tensor")
        wanted.append((sizes.tensor_mode, registered, dict(sizes.tensor_kwargs)))
    if sizes.expert is not None:
        arguments = {"size": sizes.expert.size, **sizes.expert.kwargs}
        wanted.append(("expert", check_mode("expert", "parallel.expert"), arguments))
    for axis in sizes.axes:
        mode = axis.mode or axis.name
        if axis.kwargs or mode in INITIALIZER_MAPPING or mode.lower() in INITIALIZER_MAPPING:
            wanted.append((mode, check_mode(mode, f"parallel.{axis.name}"), dict(axis.kwargs)))

    # Initializers get six arguments by position, as in Colossal-AI, and their own ones by keyword.
    six = (rank, world_size, config, grid.sizes["data"], grid.sizes["pipeline"], grid.sizes["tensor"])
    build = Build()
    build.add({ParallelMode.GLOBAL: grid.groups(*grid.sizes)}, "the world")
    for mode, registered, arguments in wanted:
        try:
            initializer = DIST_GROUP_INITIALIZER.get_module(registered)(*six, **arguments)
        except TypeError as error:
            given = listed(f"{key}=" for key in arguments)
            raise LayoutError(
                f"{registered} for the mode {mode!r} of `parallel` could not be built with its own arguments "
                f"({given}): {error}. The first six arguments are passed by position. Put every other argument into "
                "the config, next to `mode`.",
                code="C011",
            ) from error
        source = f"{registered} (mode {mode!r})"
        returned = _call(initializer)
        # Colossal-AI's initializers return one or several tuples of six that describe existing groups.
        results = returned if isinstance(returned, list) else [returned]
        created = bool(results) and all(isinstance(item, tuple) and len(item) == 6 for item in results)
        if returned is NEEDS_WORLD or created:
            build.waiting.append(Waiting(initializer, source, mode, returned))
        else:
            build.add(read_groups(returned, initializer, source, mode), source)

    # A further axis whose mode got no groups from an initializer is grouped by the axis itself.
    for further in axes:
        if further.mode not in build.groups:
            build.add({further.mode: grid.groups(further.name)}, f"axis {further.name!r}")
    return build


def read_groups(returned: Any, initializer: Any, source: str, mode: str) -> ModeGroups:
    """Check and normalise the return value of an initializer: a dict, a list of rank lists, or None."""
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
                f"{source} returned {groups!r} for {key}. Return a list of groups for each mode, where a group is a "
                "list of ranks.",
                code="C011",
            )
        found[ParallelMode(key)] = groups if isinstance(groups, Partition) else [list(group) for group in groups]
    for known, lists in found.items():
        complete = getattr(initializer, "whole_world", True)
        check_groups(known, lists, initializer.world_size, source, complete)
    return found


NEEDS_WORLD = object()


def _call(initializer: Any) -> Any:
    """Run an initializer; `NEEDS_WORLD` if it needs process groups and must run later."""
    own = getattr(type(initializer), "init_parallel_groups", None)
    if own in (None, ProcessGroupInitializer.init_parallel_groups):
        if not hasattr(initializer, "init_dist_group"):
            raise LayoutError(
                f"{type(initializer).__name__} defines neither init_parallel_groups() nor init_dist_group(). Define "
                "init_parallel_groups().",
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


# --------------------------------------------------------------------------------------------------
# The coordinates of ranks, read from groups that a user's initializer lists explicitly.
#
# The grid numbers ranks by the axes alone. An initializer may group the ranks of an axis differently, for example [[0, 3], [1, 2]].
# The coordinate of a rank on that axis is then its position in its group, and its data coordinate is the number of its model
# replica: the ranks reached along all axes but data. Modes derived from the axes (DATA, MODEL, ...) follow these coordinates.
# --------------------------------------------------------------------------------------------------


Groups = Mapping[ParallelMode, Sequence[Sequence[int]]]

_UNORDERED = (ParallelMode.DATA, ParallelMode.MODEL, ParallelMode.GLOBAL, ParallelMode.SEQUENCE_DP)
"""Modes over which ranks only reduce: nothing is sharded by the positions in their groups."""


def layout_of(axes: tuple[Axis, ...], groups: Groups, tensor_mode: str | None = None) -> Layout:
    """Build the layout of these groups.

    If the groups of an axis differ from the default grid, coordinates are read from the groups.

    `tensor_mode`: the mode of the tensor axis in the config; the initializer of this mode may list the groups of the tensor axis.
    """
    # The axes with explicit groups that differ from the grid's.
    grid = grid_of(axes)
    world_size = grid.world_size
    explicit: dict[Axis, list[list[int]]] = {}
    for axis in axes:
        lists = groups.get(axis.mode)
        if axis.name == "tensor" and isinstance(lists, Partition) and tensor_mode in ParallelMode:
            finer = groups.get(ParallelMode(tensor_mode))
            if finer is not None and sum(map(len, finer)) == world_size and {*map(len, finer)} == {axis.size}:
                lists = finer
        if lists is not None and not isinstance(lists, Partition):
            ordered = sorted(list(group) for group in lists)
            if ordered != sorted(grid.groups(axis.name)):
                explicit[axis] = ordered
    if not explicit:
        return Layout(axes, groups)

    # Such groups must have the size of the axis and include every rank.
    for axis, lists in explicit.items():
        odd = next((group for group in lists if len(group) != axis.size), None)
        if odd is not None:
            raise LayoutError(
                f"the axis parallel.{axis.name} has {axis.size} ranks, but {axis.mode} has the group {odd} of "
                f"{len(odd)} ranks. Return groups of {axis.size} ranks. If the groups do not belong to an axis, "
                "register a different mode for them.",
                code="C161",
            )
        inside = {rank for group in lists for rank in group}
        missing = [rank for rank in range(world_size) if rank not in inside]
        if missing:
            raise LayoutError(
                f"rank {listed(missing[:8])} of {world_size} is in no group of {axis.mode}, so it has no coordinate "
                f"on the axis parallel.{axis.name}. Put every rank into a group.",
                code="C161",
            )

    # The coordinate of each rank on each axis but data is its position in its group.
    model = [axis for axis in axes if axis.name != "data"]
    by_axis = {axis: explicit.get(axis) or list(grid.groups(axis.name)) for axis in model}
    coordinates: list[dict[str, int]] = [{} for _ in range(world_size)]
    for axis, lists in by_axis.items():
        for group in lists:
            for at, rank in enumerate(group):
                coordinates[rank][axis.name] = at

    # The ranks of a group must differ in this axis and data only. Explicit groups are reported first, as the likely mistake.
    for axis in sorted(model, key=lambda axis: axis not in explicit):
        for group in by_axis[axis]:
            for other in model:
                apart = {coordinates[rank][other.name] for rank in group}
                if other is not axis and len(apart) > 1:
                    raise LayoutError(
                        f"the group {group} of {axis.mode} contains ranks with the different coordinates "
                        f"{listed(sorted(apart))} on the axis {other.name!r}. In a group of parallel.{axis.name}, "
                        f"coordinates may differ only on the axis {axis.name!r} and on data. Return such groups, or "
                        f"also define the groups of {other.mode} in an initializer.",
                        code="C161",
                    )

    # The data coordinate is the number of the model replica: the ranks reached along all axes but data, numbered by first rank.
    around: list[list[list[int]]] = [[] for _ in range(world_size)]
    for lists in by_axis.values():
        for group in lists:
            for rank in group:
                around[rank].append(group)
    size = prod(axis.size for axis in model)
    replica = [-1] * world_size
    replicas = 0
    for first in range(world_size):
        if replica[first] >= 0:
            continue
        replica[first] = replicas
        reached = [first]
        for rank in reached:  # grows inside the loop: a breadth-first search
            for group in around[rank]:
                for member in group:
                    if replica[member] < 0:
                        replica[member] = replicas
                        reached.append(member)
        if len(reached) != size:
            sized = [axis for axis in model if axis.size > 1]
            product = " x ".join(str(axis.size) for axis in sized)
            raise LayoutError(
                f"the groups of {listed(axis.mode.name for axis in sized)} connect rank {first} with {len(reached)} "
                f"ranks, but a model replica has {product} = {size} ranks. Correct the initializer: a group of one "
                "of these modes must contain ranks of only one replica.",
                code="C161",
            )
        replicas += 1

    # For each place of the grid, the rank that has its coordinates.
    ranks = [-1] * world_size
    for rank, here in enumerate(coordinates):
        ranks[grid.rank_at(data=replica[rank], **here)] = rank
    if ranks == list(range(world_size)):
        _check_data(explicit, grid.groups("data"))
        return Layout(axes, groups)
    places = sorted(range(world_size), key=ranks.__getitem__)
    renumbered = {
        mode: _renumbered(mode, lists, ranks) if isinstance(lists, Partition) else lists
        for mode, lists in groups.items()
    }
    _check_data(explicit, [sorted(ranks[place] for place in group) for group in grid.groups("data")])
    return Layout(axes, renumbered, places)


def _renumbered(mode: ParallelMode, groups: Partition, ranks: Sequence[int]) -> Listed:
    """The groups of the grid with each place replaced by the rank at that place."""
    found = [[ranks[place] for place in group] for group in groups]
    disordered = next((group for group in found if any(low > high for low, high in pairwise(group))), None)
    if disordered is not None and mode not in _UNORDERED:
        raise LayoutError(
            f"the group of {mode} would have the ranks in the order {disordered}, but torch numbers the ranks of a "
            "group in ascending order. Layers would use the wrong shards. Order the groups of your initializer so "
            f"that ranks also ascend along {mode.name}.",
            code="C161",
        )
    return Listed(sorted(sorted(group) for group in found), len(ranks))


def _check_data(explicit: Mapping[Axis, list[list[int]]], data: Sequence[Sequence[int]]) -> None:
    """Raise if explicit groups of DATA have ranks that differ in more than their data."""
    for axis, groups in explicit.items():
        right = {rank: list(group) for group in data for rank in group}
        wrong = next((group for group in groups if right[group[0]] != group), None) if axis.name == "data" else None
        if wrong is not None:
            raise LayoutError(
                f"the group {wrong} of {axis.mode} (parallel.data) contains ranks with different coordinates on "
                f"other axes, so they do not store the same parameters. The replicas of rank {wrong[0]} are the "
                f"ranks {right[wrong[0]]}. Return the group {right[wrong[0]]}, or change the groups of the other "
                "axes to match.",
                code="C161",
            )
