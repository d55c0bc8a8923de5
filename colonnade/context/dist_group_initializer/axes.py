"""Initializers of the modes that follow from the axes alone: data, model, pipeline, tensor, sequence."""

from __future__ import annotations

from colonnade.context.dist_group_initializer.base import ModeGroups, ProcessGroupInitializer
from colonnade.context.parallel_mode import ParallelMode
from colonnade.registry import DIST_GROUP_INITIALIZER


@DIST_GROUP_INITIALIZER.register_module
class Initializer_Data(ProcessGroupInitializer):
    """DATA: ranks that hold the same part of the model and see different samples."""

    def init_parallel_groups(self) -> ModeGroups:
        return {ParallelMode.DATA: self.grid.groups("data")}


@DIST_GROUP_INITIALIZER.register_module
class Initializer_Model(ProcessGroupInitializer):
    """MODEL: ranks that together hold one replica of the model; all axes but data."""

    def init_parallel_groups(self) -> ModeGroups:
        model = [axis.name for axis in self.axes if axis.name != "data"]
        return {ParallelMode.MODEL: self.grid.groups(*model)}


@DIST_GROUP_INITIALIZER.register_module
class Initializer_Pipeline(ProcessGroupInitializer):
    """PIPELINE: ranks that hold consecutive stages of one replica."""

    def init_parallel_groups(self) -> ModeGroups:
        return {ParallelMode.PIPELINE: self.grid.groups("pipeline")}


@DIST_GROUP_INITIALIZER.register_module
class Initializer_Tensor(ProcessGroupInitializer):
    """TENSOR: ranks that share the layers of one stage; consecutive ranks."""

    def init_parallel_groups(self) -> ModeGroups:
        return {ParallelMode.TENSOR: self.grid.groups("tensor")}


@DIST_GROUP_INITIALIZER.register_module
class Initializer_Sequence(ProcessGroupInitializer):
    """SEQUENCE: ranks that each see a part of the same sequences; SEQUENCE_DP: all that see distinct tokens.

    The sequence axis is the tensor axis with mode='sequence', or an axis of its own. SEQUENCE_DP joins it
    with data *at the same pipeline stage*: stages hold different parameters and must not be mixed.
    """

    def init_parallel_groups(self) -> ModeGroups:
        own = any(axis.name == "sequence" for axis in self.axes)
        axis = "sequence" if own else "tensor"
        return {
            ParallelMode.SEQUENCE: self.grid.groups(axis),
            ParallelMode.SEQUENCE_DP: self.grid.groups("data", axis),
        }
