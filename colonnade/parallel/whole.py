"""The position of each local tensor in its full tensor: names, boxes, and the ranks that store the other elements of the full
tensor.

A parameter is sharded by a placement (`place`), by FSDP2 (a DTensor), or by both; a pipeline stage has only some of the tensors.
`locate_tensors` reads these facts and returns one `LocalTensor` per tensor. Checkpoints, meta-device initialization and `proof`
use only these records, not modes or placements.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from colonnade.comm.messages import agree, gather_from_all
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.errors import CheckpointError, as_checkpoint_errors, listed
from colonnade.parallel.boxes import Box, boxes_in_order, full_box, moved, places_of
from colonnade.parallel.demand import holding
from colonnade.parallel.flat import packed_runs, part_indices
from colonnade.parallel.placement import (
    Placement,
    effective_placement,
    is_dtensor,
    local_part,
    logical_shape,
    placement_of,
)

EXTRA_STATE = "_extra_state"
PREFIX = "_colonnade_prefix"
"""Attribute of a pipeline stage: the prefix of its names in the full model, which its own names lack."""
ShardSizes = Mapping[str, Mapping[str, Sequence[int]]]
"""The unevenly sharded tensors of a rank: label -> dimension -> (index of its shard, size of its shard)."""


@dataclass(frozen=True, eq=False)
class LocalTensor:
    """A tensor of this rank's model, and the position of its elements in the full tensor. Made by `locate_tensors`.

    - `label`: a name that is equal on all ranks that store elements of the full tensor; `names`: all names of the tensor on this
      rank.
    - `holders`: the ranks that store the same elements; `sharers`: all ranks that store some elements of the full tensor.
    - `parts`: for each sharded dimension, (index of this shard, number of shards); `by_hand`: the same, but only for the sharding
      by `place`, without the sharding by FSDP inside it.
    - `shape`: the shape of the full tensor.
    - `places`: pairs of boxes, (in the full tensor, in the local tensor): one pair, or one per section of a packed weight.
    """

    label: str
    names: tuple[str, ...]
    tensor: Tensor
    placement: Placement
    holders: tuple[int, ...]
    sharers: tuple[int, ...]
    parts: Mapping[int, tuple[int, int]]
    by_hand: Mapping[int, tuple[int, int]]
    shape: tuple[int, ...]
    places: tuple[tuple[Box, Box], ...]

    @property
    def local(self) -> Tensor:
        """The elements that this rank stores."""
        return local_part(self.tensor).detach()

    def pieces(self, values: Tensor) -> Iterator[tuple[Box, Tensor]]:
        """Yield (box in the full tensor, view of `values` with its elements) for each box; `values` is a tensor of the local
        shape."""
        everything = full_box(values.shape)
        for box, here in self.places:
            yield box, values[here.slices_in(everything)]

    @property
    def may_be_uneven(self) -> bool:
        """Whether the offset of this shard depends on the sizes of other ranks' shards."""
        return bool(self.by_hand) and placement_of(self.tensor).shape is not None


def locate_tensors(
    model: nn.Module, context: ParallelContext, doing: str, own_names: bool = False
) -> list[LocalTensor]:
    """Every parameter and persistent buffer of this rank's model, once. Collective over the world.

    Args:
        model: The model of this rank.
        context: The parallel context.
        doing: The caller's activity, for error messages.
        own_names: Use the names of this rank's model, not those of the full model, which are the same under every layout.

    Raises:
        CheckpointError: On all ranks, if the tensors of any rank cannot be located.
    """
    layout, rank = context.layout, context.get_global_rank()
    prefix = "" if own_names else prefix_of(model)

    # First, every tensor as this rank sees it, with the shape and the box of its shard.
    found = []
    with agree(context), as_checkpoint_errors(doing):
        named: dict[int, tuple[Tensor, list[str]]] = {}
        for key, value in model.state_dict(keep_vars=True).items():
            if not _is_extra_state(key):
                if not isinstance(value, Tensor):
                    raise CheckpointError(
                        f"state_dict() of the model has {key}, which is a {type(value).__name__} and not a tensor. "
                        "Only tensors can be saved.",
                        code="C082",
                    )
                named.setdefault(id(value), (value, []))[1].append(key)
        lost = [name for name, parameter in model.named_parameters() if id(parameter) not in named]
        if lost:
            raise CheckpointError(
                f"state_dict() of the model does not contain the parameters {listed(lost[:5])}, so they cannot be "
                "saved. Correct the hook of the model that replaces or drops them.",
                code="C082",
            )
        for tensor, keys in named.values():
            names = tuple(f"{prefix}{key}" for key in keys)
            placement = effective_placement(tensor, layout, rank)
            # Tied weights have other names at other stages; the key of the tie is their common label.
            tied = placement.tied
            anywhere = Placement({ParallelMode.PIPELINE: tied} if tied is not None else {})
            box = full_box(local_part(tensor).shape)
            found.append(
                LocalTensor(
                    label=names[0] if tied is None else f"tie:{tied.key}",
                    names=names,
                    tensor=tensor,
                    placement=placement,
                    holders=holding(layout, placement, rank).ranks,
                    sharers=holding(layout, anywhere, rank).ranks,
                    parts=part_indices(layout, placement, rank),
                    by_hand=part_indices(layout, placement_of(tensor), rank),
                    shape=box.shape,
                    places=((box, box),),
                )
            )

    # The sizes of uneven shards are known only to the ranks that store them, and a shard begins where the previous one ends.
    uneven = {
        tensor.label: {str(dim): [at, tensor.tensor.shape[dim]] for dim, (at, _) in tensor.by_hand.items()}
        for tensor in found
        if tensor.may_be_uneven
    }
    sizes_of_ranks = gather_from_all(uneven, context)

    # Then, the position in the full tensor.
    located = []
    with agree(context), as_checkpoint_errors(doing):
        for entry in found:
            tensor = entry.tensor
            by_hand = placement_of(tensor)
            mode_sizes = {mode: len(layout.group_of(mode, rank)) for mode in by_hand.shards}
            shape = logical_shape(tensor, by_hand, mode_sizes)
            # FSDP shards the shard of the placement: its offset in the mesh is added to that of the placement.
            offset = offset_in_dtensor(tensor) if is_dtensor(tensor) else [0] * tensor.dim()
            packed = packed_runs(layout, by_hand, rank)
            for dim, (at, _) in entry.by_hand.items():
                if dim in packed:
                    continue
                if entry.may_be_uneven:
                    offset[dim] += _uneven_offset(entry, dim, shape[dim], sizes_of_ranks)
                else:
                    offset[dim] += at * tensor.shape[dim]
            here = full_box(entry.local.shape)
            places: tuple[tuple[Box, Box], ...] = ((Box(tuple(offset), here.shape), here),)
            for dim, runs in packed.items():
                places = tuple(pair for place in places for pair in _in_sections(place, dim, runs))
            located.append(replace(entry, shape=shape, places=places))
    return located


def prefix_of(model: nn.Module) -> str:
    """The prefix that parameter names have in the full model but not in this rank's model.

    Empty unless a stage was taken out of a peft wrapper.
    """
    stage = next(iter(model), model) if isinstance(model, nn.ModuleList) else model
    return str(getattr(stage, PREFIX, ""))


def extra_states(model: nn.Module) -> dict[str, Any]:
    """The values that modules add to the state dict with `get_extra_state`, by key of the state dict."""
    return {f"{prefix_of(model)}{key}": value for key, value in model.state_dict().items() if _is_extra_state(key)}


def memory_order(local: Tensor) -> tuple[int, ...]:
    """The dimensions of a tensor in memory order, slowest first (channels-last weights: 0, 2, 3, 1)."""
    order, strides = range(local.dim()), local.stride()
    return tuple(order if local.is_contiguous() else sorted(order, key=lambda dim: -strides[dim]))


def boxes_in_memory(tensor: LocalTensor, start: int, stop: int, values: Tensor) -> Iterator[tuple[Box, Tensor]]:
    """Split the range [start, stop) of a local tensor's elements, in memory order, into boxes of the full tensor.

    Yields (box, view of `values` with its elements); `values` is a 1-d tensor with the elements of the range.
    """
    order, done = memory_order(tensor.local), 0
    for filled in boxes_in_order(start, stop, full_box(tensor.local.shape), order):
        view = values[done : done + filled.numel].view([filled.shape[dim] for dim in order]).permute(places_of(order))
        for box, here in tensor.places:
            shared = filled.shared_with(here)
            if shared is not None:
                yield moved(shared, here, box), view[shared.slices_in(filled)]
        done += filled.numel


def _is_extra_state(key: str) -> bool:
    return key.rpartition(".")[2] == EXTRA_STATE


def _in_sections(place: tuple[Box, Box], dim: int, runs: Sequence[tuple[int, int]]) -> list[tuple[Box, Box]]:
    """Split one pair of boxes along `dim` at the sections of a packed weight.

    Args:
        place: Its first box is counted as if this rank's shards of all sections were contiguous in the full tensor.
        dim: The dimension with the sections.
        runs: (start, length) in the full tensor of this rank's shard of each section.
    """
    box, here = place
    found, before = [], 0
    for start, length in runs:
        first = max(box.offset[dim], before)
        stop = min(box.stop[dim], before + length)
        if first < stop:
            inside = here.offset[dim] + first - box.offset[dim]
            found.append(
                (
                    _along(box, dim, start + first - before, stop - first),
                    _along(here, dim, inside, stop - first),
                )
            )
        before += length
    return found or [(_along(box, dim, box.offset[dim], 0), _along(here, dim, here.offset[dim], 0))]


def _along(box: Box, dim: int, start: int, length: int) -> Box:
    """A copy of the box whose extent along one dimension is replaced."""
    return Box((*box.offset[:dim], start, *box.offset[dim + 1 :]), (*box.shape[:dim], length, *box.shape[dim + 1 :]))


def _uneven_offset(found: LocalTensor, dim: int, length: int, sizes_of_ranks: Sequence[ShardSizes]) -> int:
    """The offset of this rank's shard along a dimension of `length` elements: the sum of the shards before it."""
    index, count = found.by_hand[dim]
    by_shard: dict[int, set[int]] = {at: set() for at in range(count)}
    for sizes in sizes_of_ranks:
        if found.label in sizes:
            at, size = sizes[found.label][str(dim)]
            by_shard[at].add(size)
    widths = [sizes.pop() if len(sizes) == 1 else None for sizes in by_shard.values()]
    known = [width for width in widths if width is not None]
    if len(known) != count or sum(known) != length:
        raise CheckpointError(
            f"{found.names[0]} is placed as {found.placement} with {length} elements along dimension {dim}, but its "
            f"{count} shards have {listed(widths)}. Ranks that store the same shard must have equal lengths, and the "
            f"lengths of the shards must add up to {length}.",
            code="C082",
        )
    return sum(known[:index])


def offset_in_dtensor(tensor: Any) -> list[int]:
    """The offset of this rank's shard of a DTensor in the full tensor."""
    # Imported here, because it takes two seconds, which models without DTensors should not pay.
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    with torch.device("cpu"):  # torch computes it in a tensor on the default device, and reads that tensor
        return list(compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)[1])
