"""The contract of a process group initializer: from sizes to rank lists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from colonnade.context.grid import Grid
from colonnade.context.layout import Axis
from colonnade.context.parallel_mode import ParallelMode
from colonnade.context.sizes import grid_of, world_axes

ModeGroups = dict[ParallelMode, Sequence[list[int]]]


class ProcessGroupInitializer:
    """Says which ranks form the groups of one or several modes.

    `ParallelContext` passes the first six arguments by position, and whatever else the config's section
    holds by keyword. A subclass may hand all six or only the first three to `super().__init__`; the sizes
    are then read from the config.

    Implement `init_parallel_groups()` and return `{mode: [[ranks], ...]}` for the whole world: it creates
    nothing, so a layout can be planned and tested for any number of ranks. `ParallelContext` creates the
    torch groups. (`init_dist_group()` and its tuples, which create their groups themselves, work after
    `colonnade.compat.install()`.)
    """

    whole_world = True
    """Whether every rank must be in a group of each mode that is returned."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        config: Any,
        data_parallel_size: int | None = None,
        pipeline_parallel_size: int | None = None,
        tensor_parallel_size: int | None = None,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.config = config
        self.axes: tuple[Axis, ...] = world_axes(config, world_size)
        sizes = {axis.name: axis.size for axis in self.axes}
        self.data_parallel_size = data_parallel_size or sizes["data"]
        self.pipeline_parallel_size = pipeline_parallel_size or sizes["pipeline"]
        self.tensor_parallel_size = tensor_parallel_size or sizes["tensor"]

    @property
    def grid(self) -> Grid:
        """The ranks by their coordinates: `self.grid.groups("data")`, `self.grid.split("tensor", ...)`."""
        return grid_of(self.axes)

    def init_parallel_groups(self) -> Any:
        """Return `{mode: [[ranks], ...]}`, or None if there is nothing to add."""
        raise NotImplementedError(
            f"{type(self).__name__} must define init_parallel_groups() and return {{mode: [[ranks], ...]}}"
        )
