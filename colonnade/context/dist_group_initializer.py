"""Process group initializers: the base class, and the built-in ones."""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt
from typing import Any

from colonnade.context.layout import Axis, Grid, grid_of, world_axes
from colonnade.context.parallel_mode import ParallelMode
from colonnade.errors import LayoutError, listed
from colonnade.registry import DIST_GROUP_INITIALIZER

# --------------------------------------------------------------------------------------------------
# The contract of a process group initializer: from sizes to rank lists.
# --------------------------------------------------------------------------------------------------


ModeGroups = dict[ParallelMode, Sequence[list[int]]]


class ProcessGroupInitializer:
    """Base class: defines the groups of one or several modes.

    Implement `init_parallel_groups()` and return `{mode: [[ranks], ...]}` for all ranks. The method creates no process groups, so
    layouts can be planned and tested for any number of ranks; `ParallelContext` creates the torch groups. (Initializers with
    `init_dist_group()`, which create their groups themselves, work after `colonnade.compat.install()`.)

    The first six arguments are passed by position, and all other keys of the config's section by keyword. A subclass may pass all
    six or only the first three to `super().__init__`; the sizes are then read from the config.

    Args:
        rank: The rank of this process.
        world_size: The number of ranks.
        config: The config.
        data_parallel_size: The size of the data axis.
        pipeline_parallel_size: The size of the pipeline axis.
        tensor_parallel_size: The size of the tensor axis.
    """

    whole_world = True
    """Whether every rank must be in a group of each returned mode."""

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
        """The numbering of ranks by coordinates, from which groups are computed, such as `self.grid.groups("data")`."""
        return grid_of(self.axes)

    def init_parallel_groups(self) -> Any:
        """Return `{mode: [[ranks], ...]}` for all ranks, or None to add nothing."""
        raise NotImplementedError(
            f"{type(self).__name__} must define init_parallel_groups() and return {{mode: [[ranks], ...]}}"
        )


# --------------------------------------------------------------------------------------------------
# The built-in initializers: modes given by the axes, factorizations of the tensor axis, and experts.
# --------------------------------------------------------------------------------------------------


_OVER = ("data", "data*tensor")


@DIST_GROUP_INITIALIZER.register_module
class Initializer_Data(ProcessGroupInitializer):
    """DATA: ranks with the same part of the model and different samples."""

    def init_parallel_groups(self) -> ModeGroups:
        return {ParallelMode.DATA: self.grid.groups("data")}


@DIST_GROUP_INITIALIZER.register_module
class Initializer_Model(ProcessGroupInitializer):
    """MODEL: ranks that together store one replica of the model; they differ on all axes except data."""

    def init_parallel_groups(self) -> ModeGroups:
        model = [axis.name for axis in self.axes if axis.name != "data"]
        return {ParallelMode.MODEL: self.grid.groups(*model)}


@DIST_GROUP_INITIALIZER.register_module
class Initializer_Pipeline(ProcessGroupInitializer):
    """PIPELINE: ranks that hold the pipeline stages of one replica, in the order of stages."""

    def init_parallel_groups(self) -> ModeGroups:
        return {ParallelMode.PIPELINE: self.grid.groups("pipeline")}


@DIST_GROUP_INITIALIZER.register_module
class Initializer_Tensor(ProcessGroupInitializer):
    """TENSOR: groups of consecutive ranks, over which tensor parallelism shards the layers of a pipeline stage."""

    def init_parallel_groups(self) -> ModeGroups:
        return {ParallelMode.TENSOR: self.grid.groups("tensor")}


@DIST_GROUP_INITIALIZER.register_module
class Initializer_Sequence(ProcessGroupInitializer):
    """Context parallelism. SEQUENCE: ranks with parts of the same sequences; SEQUENCE_DP: all ranks with distinct tokens.

    The sequence axis is the tensor axis with mode="sequence", or an axis of its own. SEQUENCE_DP joins this axis with data *within
    a pipeline stage*, because stages have different parameters. `attention`, "ring" or "ulysses", is read by
    `colonnade.hf.attention_patch` for transformers models.
    """

    def __init__(self, *args: Any, attention: str = "ring") -> None:
        super().__init__(*args)
        self.attention = attention

    def init_parallel_groups(self) -> ModeGroups:
        own = any(axis.name == "sequence" for axis in self.axes)
        axis = "sequence" if own else "tensor"
        return {
            ParallelMode.SEQUENCE: self.grid.groups(axis),
            ParallelMode.SEQUENCE_DP: self.grid.groups("data", axis),
        }


@DIST_GROUP_INITIALIZER.register_module
class Initializer_1D(ProcessGroupInitializer):
    """PARALLEL_1D (Megatron-style tensor parallelism): the same groups as TENSOR.

    The layers of `colonnade.nn` read `sequence_split`.
    """

    def __init__(self, *args: Any, sequence_split: bool = False) -> None:
        super().__init__(*args)
        self.sequence_split = sequence_split

    def init_parallel_groups(self) -> ModeGroups:
        return {ParallelMode.PARALLEL_1D: self.grid.groups("tensor")}


@DIST_GROUP_INITIALIZER.register_module
class Initializer_2D(ProcessGroupInitializer):
    """PARALLEL_2D_ROW and _COL (SUMMA): the tensor group as a square of `summa_dim` x `summa_dim` ranks."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.summa_dim = isqrt(self.tensor_parallel_size)
        if self.summa_dim**2 != self.tensor_parallel_size:
            raise LayoutError(
                f"parallel.tensor: mode '2d' needs a square number of ranks, not size={self.tensor_parallel_size}; "
                f"the nearest are {self.summa_dim**2} and {(self.summa_dim + 1) ** 2}",
                code="C010",
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
                f"parallel.tensor has depth={depth!r}, but mode '2.5d' needs a positive integer depth. For "
                f"size={size} the possible values are: {_depths(size)}",
                code="C010",
            )
        self.tesseract_dep = depth
        self.tesseract_dim = isqrt(size // depth)
        if self.tesseract_dim**2 * depth != size:
            raise LayoutError(
                f"parallel.tensor has size={size} and depth={depth}, but size must be dim x dim x depth in mode "
                f"'2.5d'. For size={size} the possible values are: {_depths(size)}",
                code="C010",
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
            low = int(self.tensor_parallel_size ** (1 / 3))
            raise LayoutError(
                f"parallel.tensor: mode '3d' needs a cubic number of ranks, not size={self.tensor_parallel_size}; "
                f"the nearest are {low**3} and {(low + 1) ** 3}",
                code="C010",
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


@DIST_GROUP_INITIALIZER.register_module
class Initializer_Expert(ProcessGroupInitializer):
    """EXPERT: ranks with different experts; EXPERT_DATA: ranks with replicas of the same experts.

    `over="data"` splits each data group into runs of `size` ranks, so experts can be sharded over tensor as well.
    `over="data*tensor"` splits all ranks of a pipeline stage. The default is "data" if the size divides the data axis, else
    "data*tensor". Expert groups reuse existing ranks; they do not enlarge the world.
    """

    def __init__(self, *args: Any, size: int, over: str | None = None) -> None:
        super().__init__(*args)
        data, tensor = self.data_parallel_size, self.tensor_parallel_size
        if over is not None and over not in _OVER:
            raise LayoutError(f"parallel.expert has over={over!r}; allowed are {listed(_OVER)}", code="C010")
        self.over = over or ("data" if data % size == 0 else "data*tensor")
        ranks = data if self.over == "data" else data * tensor
        if ranks % size:
            fitting = [divisor for divisor in range(1, ranks + 1) if ranks % divisor == 0]
            named = f"data {data}" if self.over == "data" else f"data {data} x tensor {tensor} = {ranks}"
            raise LayoutError(
                f"parallel.expert has size={size}, which does not divide {named}; allowed are {listed(fitting)}",
                code="C010",
            )
        self.expert_parallel_size = size

    def init_parallel_groups(self) -> ModeGroups:
        blocks = self.grid.groups(*self.over.split("*"))
        expert, expert_data = blocks.split_into_runs(self.expert_parallel_size)
        return {
            ParallelMode.EXPERT: expert,
            ParallelMode.EXPERT_DATA: expert_data,
            ParallelMode.MOE_MODEL: expert,
            ParallelMode.MOE_DATA: expert_data,
        }


def _depths(size: int) -> str:
    fitting = [
        f"depth={depth} (dim {isqrt(size // depth)})"
        for depth in range(1, size + 1)
        if size % depth == 0 and isqrt(size // depth) ** 2 == size // depth
    ]
    return ", ".join(fitting) or "none; choose another size"


__all__ = [
    "Initializer_1D",
    "Initializer_2D",
    "Initializer_2p5D",
    "Initializer_3D",
    "Initializer_Data",
    "Initializer_Expert",
    "Initializer_Model",
    "Initializer_Pipeline",
    "Initializer_Sequence",
    "Initializer_Tensor",
    "ProcessGroupInitializer",
]
