"""Head x data: a parallelism that Colonnade does not have, in this one file, with no change to the library.

The ranks of a group get the same samples. Inside attention, each rank computes its own heads for all samples; everywhere
else, it computes full layers for its own samples. Attention weights are sharded over the group, nothing is computed twice,
and activations between the attention layers are sharded too:

    all samples -> scatter -> own samples -> norm, MLP, ... -> own samples -> gather -> all samples
                               |                             ^
                               all_gather                    reduce_scatter
                               v                             |
                               all samples -> own heads -> partial sum

Import this file before `launch`, and name it in the config: parallel = dict(head_data=dict(size=2, heads=4)).
Layers that mix samples (BatchNorm) are not possible between the attention layers.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from colonnade import ParallelMode, Replicate, Shard, place, placement_of
from colonnade.constants import INITIALIZER_MAPPING
from colonnade.context.dist_group_initializer import ProcessGroupInitializer
from colonnade.engine.gradient_handler import DemandGradientHandler
from colonnade.errors import LayoutError
from colonnade.parallel.collectives import (
    all_gather,
    gather,
    reduce_scatter,
    scatter,
    split_sizes,
)
from colonnade.registry import DIST_GROUP_INITIALIZER, GRADIENT_HANDLER

HEAD_DATA = ParallelMode.register("HEAD_DATA", "head_data", data="same")
INITIALIZER_MAPPING["head_data"] = "HeadDataInitializer"


@DIST_GROUP_INITIALIZER.register_module
class HeadDataInitializer(ProcessGroupInitializer):
    """HEAD_DATA: ranks that share `heads` attention heads; a custom axis, or tensor=dict(mode="head_data")."""

    def __init__(self, *six: Any, heads: int) -> None:
        super().__init__(*six)
        own = [axis for axis in self.axes if axis.mode is HEAD_DATA]
        self.axis = (
            own[0] if own else next(axis for axis in self.axes if axis.name == "tensor")
        )
        if self.axis.size > heads:
            raise LayoutError(
                f"parallel.{self.axis.name}: size={self.axis.size} leaves ranks without a head of {heads}; "
                f"give at most size={heads}"
            )

    def init_parallel_groups(self) -> Any:
        return {HEAD_DATA: self.grid.groups(self.axis.name)}


def own_heads(whole: Tensor, dim: int, heads: int) -> nn.Parameter:
    """This rank's heads of a weight with all heads along `dim`; shards may be uneven."""
    sizes = split_sizes(whole.shape[dim], HEAD_DATA, unit=whole.shape[dim] // heads)
    part = nn.Parameter(scatter(whole.detach(), HEAD_DATA, dim, sizes).clone())
    place(part, {HEAD_DATA: Shard(dim)}, shape=tuple(whole.shape))
    return part


class HeadDataAttention(nn.Module):
    """Self-attention from this rank's samples (sample, position, width) to its samples.

    Every rank draws the full weights and keeps its heads, so that initial weights equal those of
    a single process with the same seed.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.qkv.weight = own_heads(self.qkv.weight, 0, heads)
        self.qkv.bias = own_heads(self.qkv.bias, 0, heads)
        self.out.weight = own_heads(self.out.weight, 1, heads)
        # Added to this rank's samples only, so its local gradient is partial.
        place(self.out.bias, {HEAD_DATA: Replicate(owes="sum")})

    def forward(self, x: Tensor) -> Tensor:
        samples = all_gather(x, HEAD_DATA, dim=0)
        # dimensions: sample, position, head, q or k or v, width
        qkv = self.qkv(samples).unflatten(-1, (-1, 3, self.head_width))
        mixed = F.scaled_dot_product_attention(*qkv.permute(3, 0, 2, 1, 4))
        part = F.linear(mixed.transpose(1, 2).flatten(2), self.out.weight)
        return reduce_scatter(part, HEAD_DATA, dim=0) + self.out.bias


class HeadDataSequential(nn.Sequential):
    """Layers on this rank's samples; input and output are all samples of the group."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        for parameter in self.parameters():
            if not placement_of(parameter).modes:
                place(parameter, {HEAD_DATA: Replicate(owes="sum")})

    def forward(self, x: Tensor) -> Tensor:
        sizes = split_sizes(len(x), HEAD_DATA)
        own = super().forward(scatter(x, HEAD_DATA, 0, sizes))
        return gather(own, HEAD_DATA, 0, sizes)


@GRADIENT_HANDLER.register_module
class HeadDataGradientHandler(DemandGradientHandler):
    """Performs the reductions over HEAD_DATA. Optional: a built-in handler does it otherwise."""

    modes = frozenset({HEAD_DATA})
