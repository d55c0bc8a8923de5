"""Initializer of expert parallelism: EXPERT and its twin EXPERT_DATA, cut out of the ranks of one stage."""

from __future__ import annotations

from typing import Any

from colonnade.context.dist_group_initializer.base import ModeGroups, ProcessGroupInitializer
from colonnade.context.parallel_mode import ParallelMode
from colonnade.errors import LayoutError, listed
from colonnade.registry import DIST_GROUP_INITIALIZER

_OVER = ("data", "data*tensor")


@DIST_GROUP_INITIALIZER.register_module
class Initializer_Expert(ProcessGroupInitializer):
    """EXPERT: ranks that hold different experts; EXPERT_DATA: ranks that hold the same ones.

    `over="data"` cuts each data group into runs of `size` ranks, so that experts may be split over tensor
    as well. `over="data*tensor"` cuts all ranks of a stage. Unless it is given, data is taken where the
    size divides it, else both. Expert groups do not make the world larger.
    """

    def __init__(self, *args: Any, size: int = 1, over: str | None = None) -> None:
        super().__init__(*args)
        data, tensor = self.data_parallel_size, self.tensor_parallel_size
        if over is not None and over not in _OVER:
            raise LayoutError(f"parallel.expert: over={over!r}; allowed: {listed(_OVER)}")
        self.over = over or ("data" if data % size == 0 else "data*tensor")
        room = data if self.over == "data" else data * tensor
        if room % size:
            fitting = [divisor for divisor in range(1, room + 1) if room % divisor == 0]
            named = f"data {data}" if self.over == "data" else f"data {data} x tensor {tensor} = {room}"
            raise LayoutError(f"parallel.expert: size={size} does not divide {named}; allowed: {listed(fitting)}")
        self.expert_parallel_size = size

    def init_parallel_groups(self) -> ModeGroups:
        blocks = self.grid.groups(*self.over.split("*"))
        expert, twin = blocks.cut(self.expert_parallel_size)
        return {
            ParallelMode.EXPERT: expert,
            ParallelMode.EXPERT_DATA: twin,
            ParallelMode.MOE_MODEL: expert,
            ParallelMode.MOE_DATA: twin,
        }
