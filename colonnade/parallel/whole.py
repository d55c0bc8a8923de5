"""Where each tensor of a model lies in its whole: under which names, in which boxes, and on which other ranks.

A rank's part of a parameter is placed (`place`), cut by FSDP2 (a DTensor), or both; a pipeline stage holds only some of the
tensors. `locate_tensors` reads all of that and gives one `LocalTensor` for each tensor. Checkpoints, a start on the meta
device, and the proof packages work with these alone, and so know nothing of modes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from colonnade.comm.messages import agree, gather_from_all
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.errors import CheckpointError, as_checkpoint_errors, listed
from colonnade.parallel.boxes import Box, boxes_in_order, moved, places_of, whole_box
from colonnade.parallel.demand import holding
from colonnade.parallel.dtensor import effective_placement, local_part
from colonnade.parallel.flat import packed_runs, part_indices
from colonnade.parallel.placement import Placement, is_dtensor, logical_shape, placement_of

EXTRA_STATE = "_extra_state"
PREFIX = "_colonnade_prefix"
"""Attribute of a pipeline stage: the beginning of its names in the whole model, which its own names lack."""
PartSizes = Mapping[str, Mapping[str, Sequence[int]]]
"""The uneven tensors of a rank: label -> dimension -> (index of its part, size of its part)."""


@dataclass(frozen=True, eq=False)
class LocalTensor:
    """A tensor of this rank's model, and where its elements lie in a whole of `shape`. Made by `locate_tensors`.

    - `label`: one name for it, the same on all ranks that hold some of it. `names`: all names that it has here.
    - `holders`: the ranks that hold the same elements. `sharers`: the ranks that hold any of the whole.
    - `parts`: for each dimension that is split, (index of this part, number of parts). `by_hand`: the same for the placement
      alone, without the cuts that FSDP makes inside it.
    - `places`: boxes of the whole, each with the box of this rank's elements that lies there: one box, or as many as a
      packed weight has sections.
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
        """The elements that this rank holds."""
        return local_part(self.tensor).detach()

    def pieces(self, values: Tensor) -> Iterator[tuple[Box, Tensor]]:
        """The boxes of the whole with views of `values`, which lie as the local part does."""
        everything = whole_box(values.shape)
        for box, here in self.places:
            yield box, values[here.slices_in(everything)]

    @property
    def may_be_uneven(self) -> bool:
        """Whether its box depends on the sizes of other ranks' parts."""
        return bool(self.by_hand) and placement_of(self.tensor).shape is not None


def locate_tensors(
    model: nn.Module, context: ParallelContext, doing: str, own_names: bool = False
) -> list[LocalTensor]:
    """Every parameter and persistent buffer of this rank's model, once. Collective over the world.

    Names are those in the whole model, the same under every layout; with `own_names` those of this rank's model. An error on
    one rank is a CheckpointError on all of them that says what was being done (`doing`).
    """

    with agree(context), as_checkpoint_errors(doing):
        found = _tensors_of(model, context, "" if own_names else prefix_of(model))
    # The sizes of uneven parts are known only to the ranks that hold them, and a part begins where those before it end.
    everyone = gather_from_all(_uneven_sizes(found), context)
    with agree(context), as_checkpoint_errors(doing):
        return [_located(tensor, everyone, context) for tensor in found]


def prefix_of(model: nn.Module) -> str:
    """The beginning of names in the whole model that this rank's part lacks: a stage is cut out of a wrapper of peft."""
    stage = next(iter(model), model) if isinstance(model, nn.ModuleList) else model
    return str(getattr(stage, PREFIX, ""))


def extra_states(model: nn.Module) -> dict[str, Any]:
    """The values that modules add to the model's state by `get_extra_state`, by key."""
    return {f"{prefix_of(model)}{key}": value for key, value in model.state_dict().items() if _is_extra_state(key)}


def memory_order(local: Tensor) -> tuple[int, ...]:
    """The dimensions in the order in which elements lie in memory, slowest first (channels-last weights: 0, 2, 3, 1)."""
    order, strides = range(local.dim()), local.stride()
    return tuple(order if local.is_contiguous() else sorted(order, key=lambda dim: -strides[dim]))


def boxes_in_memory(tensor: LocalTensor, start: int, stop: int, values: Tensor) -> Iterator[tuple[Box, Tensor]]:
    """The boxes of the whole that elements [start, stop) of a tensor, counted as they lie in memory, fill.

    Each comes with its view of `values`, which are these elements in a row.
    """
    order, done = memory_order(tensor.local), 0
    for filled in boxes_in_order(start, stop, whole_box(tensor.local.shape), order):
        view = values[done : done + filled.numel].view([filled.shape[dim] for dim in order]).permute(places_of(order))
        for box, here in tensor.places:
            shared = filled.shared_with(here)
            if shared is not None:
                yield moved(shared, here, box), view[shared.slices_in(filled)]
        done += filled.numel


def _tensors_of(model: nn.Module, context: ParallelContext, prefix: str) -> list[LocalTensor]:
    """The tensors as this rank alone sees them: the shape and the place of each are those of its own part."""
    named: dict[int, tuple[Tensor, list[str]]] = {}
    for key, value in model.state_dict(keep_vars=True).items():
        if not _is_extra_state(key):
            if not isinstance(value, Tensor):
                raise CheckpointError(
                    f"the model's state_dict() holds {key}, a {type(value).__name__}, not a tensor", code="C082"
                )
            named.setdefault(id(value), (value, []))[1].append(key)
    lost = [name for name, parameter in model.named_parameters() if id(parameter) not in named]
    if lost:
        raise CheckpointError(
            f"the model's state_dict() does not hold the parameters {listed(lost[:5])} themselves, so they cannot be "
            f"saved; a hook of the model replaces or drops them",
            code="C082",
        )
    return [_alone(tuple(f"{prefix}{name}" for name in names), tensor, context) for tensor, names in named.values()]


def _is_extra_state(key: str) -> bool:
    return key.rpartition(".")[2] == EXTRA_STATE


def _alone(names: tuple[str, ...], tensor: Tensor, context: ParallelContext) -> LocalTensor:
    layout, rank = context.layout, context.get_global_rank()
    placement = effective_placement(tensor, layout, rank)
    # Tied weights have other names on other stages; the key of the tie is their common label.
    tied = placement.tied
    anywhere = Placement({ParallelMode.PIPELINE: tied} if tied is not None else {})
    box = whole_box(local_part(tensor).shape)
    return LocalTensor(
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


def _uneven_sizes(tensors: Iterable[LocalTensor]) -> PartSizes:
    return {
        tensor.label: {str(dim): [at, tensor.tensor.shape[dim]] for dim, (at, _) in tensor.by_hand.items()}
        for tensor in tensors
        if tensor.may_be_uneven
    }


def _located(found: LocalTensor, everyone: Sequence[PartSizes], context: ParallelContext) -> LocalTensor:
    """The tensor with its place in the whole."""
    layout, rank, tensor = context.layout, context.get_global_rank(), found.tensor
    by_hand = placement_of(tensor)
    sizes = {mode: len(layout.group_of(mode, rank)) for mode in by_hand.shards}
    shape = logical_shape(tensor, by_hand, sizes)
    # FSDP cuts inside the part that was placed: its offset in the mesh is added to that of the part.
    offset = offset_in_dtensor(tensor) if is_dtensor(tensor) else [0] * tensor.dim()
    packed = packed_runs(layout, by_hand, rank)
    for dim, (at, _) in found.by_hand.items():
        if dim not in packed:
            uneven = found.may_be_uneven
            offset[dim] += _uneven_offset(found, dim, shape[dim], everyone) if uneven else at * tensor.shape[dim]
    here = whole_box(found.local.shape)
    places: tuple[tuple[Box, Box], ...] = ((Box(tuple(offset), here.shape), here),)
    for dim, runs in packed.items():
        places = tuple(place for each in places for place in _in_sections(each, dim, runs))
    return replace(found, shape=shape, places=places)


def _in_sections(place: tuple[Box, Box], dim: int, runs: Sequence[tuple[int, int]]) -> list[tuple[Box, Box]]:
    """The places in the sections of a packed weight along `dim`.

    `place` counts as if this rank's parts of all sections, `runs` of the whole, followed each other.
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
    """The box with another extent along one dimension."""
    return Box((*box.offset[:dim], start, *box.offset[dim + 1 :]), (*box.shape[:dim], length, *box.shape[dim + 1 :]))


def _uneven_offset(found: LocalTensor, dim: int, whole: int, everyone: Sequence[PartSizes]) -> int:
    """The offset of this rank's part along a dimension of `whole` elements: the parts before it, added up."""
    index, count = found.by_hand[dim]
    by_part: dict[int, set[int]] = {at: set() for at in range(count)}
    for sizes in everyone:
        if found.label in sizes:
            at, size = sizes[found.label][str(dim)]
            by_part[at].add(size)
    widths = [sizes.pop() if len(sizes) == 1 else None for sizes in by_part.values()]
    known = [width for width in widths if width is not None]
    if len(known) != count or sum(known) != whole:
        raise CheckpointError(
            f"{found.names[0]} is placed as {found.placement} with {whole} elements along dimension {dim}, but its "
            f"{count} parts have {listed(widths)}; ranks that hold the same part must agree, and the parts must add up",
            code="C082",
        )
    return sum(known[:index])


def offset_in_dtensor(tensor: Any) -> list[int]:
    """The offset of this rank's part of a DTensor in its whole."""
    # Imported here: it costs those who have no DTensors two seconds.
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    with torch.device("cpu"):  # torch works it out in a tensor on the default device, and reads that
        return list(compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)[1])
