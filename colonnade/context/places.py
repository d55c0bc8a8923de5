"""Where each rank stands on every axis, read from groups that an initializer wrote down by hand.

The grid numbers ranks by the axes alone. An initializer may group the ranks of an axis otherwise, [[0, 3], [1, 2]] say. The place
of a rank on that axis is then its position in its group, and its place in the data is the number of its replica: of the ranks that
are reached along all axes but data. Modes that follow from the axes (DATA, MODEL, ...) are grouped by these places.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import prod

from colonnade.context.grid import Grid, Listed, Partition
from colonnade.context.layout import Axis, Layout
from colonnade.context.parallel_mode import ParallelMode
from colonnade.context.sizes import grid_of
from colonnade.errors import LayoutError, listed

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
