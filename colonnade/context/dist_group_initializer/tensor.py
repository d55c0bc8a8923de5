"""Initializers that cut the tensor axis: 1d, 2d, 2.5d, 3d."""

from __future__ import annotations

from math import isqrt
from typing import Any

from colonnade.context.dist_group_initializer.base import ModeGroups, ProcessGroupInitializer
from colonnade.context.parallel_mode import ParallelMode
from colonnade.errors import LayoutError
from colonnade.registry import DIST_GROUP_INITIALIZER


@DIST_GROUP_INITIALIZER.register_module
class Initializer_1D(ProcessGroupInitializer):
    """PARALLEL_1D: the tensor group itself. `sequence_split` is for the layers: see `colonnade.nn`."""

    def __init__(self, *args: Any, sequence_split: bool = False) -> None:
        super().__init__(*args)
        self.sequence_split = sequence_split

    def init_parallel_groups(self) -> ModeGroups:
        return {ParallelMode.PARALLEL_1D: self.grid.groups("tensor")}


@DIST_GROUP_INITIALIZER.register_module
class Initializer_2D(ProcessGroupInitializer):
    """PARALLEL_2D_ROW and _COL: the tensor group as a square of `summa_dim` x `summa_dim` ranks."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.summa_dim = isqrt(self.tensor_parallel_size)
        if self.summa_dim**2 != self.tensor_parallel_size:
            raise LayoutError(
                f"parallel.tensor: mode '2d' needs a square number of ranks, not size={self.tensor_parallel_size}; "
                f"the nearest are {self.summa_dim**2} and {(self.summa_dim + 1) ** 2}"
            )

    def init_parallel_groups(self) -> ModeGroups:
        square = self.grid.split("tensor", row=self.summa_dim, col=self.summa_dim)
        return {
            ParallelMode.PARALLEL_2D_ROW: square.groups("col"),
            ParallelMode.PARALLEL_2D_COL: square.groups("row"),
        }


@DIST_GROUP_INITIALIZER.register_module
class Initializer_2p5D(ProcessGroupInitializer):
    """PARALLEL_2P5D_ROW, _COL, _DEP, _XZ: `depth` squares of `tesseract_dim` x `tesseract_dim` ranks."""

    def __init__(self, *args: Any, depth: int | None = None) -> None:
        super().__init__(*args)
        size = self.tensor_parallel_size
        if not isinstance(depth, int) or depth < 1:
            raise LayoutError(
                f"parallel.tensor: mode '2.5d' needs depth=<positive int>, got {depth!r}; for size={size} "
                f"possible: {_depths(size)}"
            )
        self.tesseract_dep = depth
        self.tesseract_dim = isqrt(size // depth)
        if self.tesseract_dim**2 * depth != size:
            raise LayoutError(
                f"parallel.tensor: mode '2.5d' needs size = dim x dim x depth, but size={size} with depth={depth} "
                f"leaves no square; for size={size} possible: {_depths(size)}"
            )

    def init_parallel_groups(self) -> ModeGroups:
        dim = self.tesseract_dim
        cuboid = self.grid.split("tensor", dep=self.tesseract_dep, row=dim, col=dim)
        return {
            ParallelMode.PARALLEL_2P5D_ROW: cuboid.groups("col"),
            ParallelMode.PARALLEL_2P5D_COL: cuboid.groups("row"),
            ParallelMode.PARALLEL_2P5D_DEP: cuboid.groups("dep"),
            ParallelMode.PARALLEL_2P5D_XZ: cuboid.groups("dep", "row"),
        }


@DIST_GROUP_INITIALIZER.register_module
class Initializer_3D(ProcessGroupInitializer):
    """PARALLEL_3D_INPUT, _WEIGHT, _OUTPUT and their products: the tensor group as a cube."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.depth = round(self.tensor_parallel_size ** (1 / 3))
        if self.depth**3 != self.tensor_parallel_size:
            low = int(self.tensor_parallel_size ** (1 / 3) + 1e-9)
            raise LayoutError(
                f"parallel.tensor: mode '3d' needs a cubic number of ranks, not size={self.tensor_parallel_size}; "
                f"the nearest are {low**3} and {(low + 1) ** 3}"
            )

    def init_parallel_groups(self) -> ModeGroups:
        cube = self.grid.split("tensor", output=self.depth, input=self.depth, weight=self.depth)
        return {
            ParallelMode.PARALLEL_3D_INPUT: cube.groups("input"),
            ParallelMode.PARALLEL_3D_WEIGHT: cube.groups("weight"),
            ParallelMode.PARALLEL_3D_OUTPUT: cube.groups("output"),
            ParallelMode.PARALLEL_3D_INPUT_X_WEIGHT: cube.groups("input", "weight"),
            ParallelMode.PARALLEL_3D_OUTPUT_X_WEIGHT: cube.groups("output", "weight"),
        }


def _depths(size: int) -> str:
    fitting = [
        f"depth={depth} (dim {isqrt(size // depth)})"
        for depth in range(1, size + 1)
        if size % depth == 0 and isqrt(size // depth) ** 2 == size // depth
    ]
    return ", ".join(fitting) or "none; choose another size"
