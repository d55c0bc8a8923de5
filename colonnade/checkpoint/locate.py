"""Where each tensor of a model lies in its whole, read from its placement: the names, the box, the holders.

Sizes of uneven shards are known only to the ranks that hold them, so this goes in two steps: `survey` looks at
this rank alone, and `locate` at what all ranks have said of their sizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from colonnade.checkpoint.boxes import Box
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.errors import CheckpointError, listed
from colonnade.parallel.demand import holding
from colonnade.parallel.dtensor import effective_placement, local_part
from colonnade.parallel.placement import Placement, is_dtensor, logical_shape, placement_of

EXTRA_STATE = "_extra_state"
Sizes = Mapping[str, Mapping[str, Sequence[int]]]
"""What a rank says of its uneven tensors: label -> dimension -> (index of its part, size of its part)."""


@dataclass(frozen=True, eq=False)
class Piece:
    """One tensor of this rank's model, under all the names it has here.

    `label` is the same on all ranks that hold some of it. `holders` hold the same elements, `sharers` any of
    the whole. `parts` says for each split dimension: (index of this part, number of parts); `position` for each
    mode that splits it: this rank's place on it.
    """

    label: str
    names: tuple[str, ...]
    tensor: Tensor
    placement: Placement
    holders: tuple[int, ...]
    sharers: tuple[int, ...]
    parts: Mapping[int, tuple[int, int]]
    position: Mapping[ParallelMode, int] = field(default_factory=dict)

    @property
    def local(self) -> Tensor:
        """The elements that this rank holds."""
        return local_part(self.tensor).detach()


@dataclass(frozen=True, eq=False)
class Located:
    """A piece and the box it fills in a whole of this shape."""

    piece: Piece
    shape: tuple[int, ...]
    box: Box


def survey(model: nn.Module, context: ParallelContext) -> list[Piece]:
    """Every parameter and persistent buffer of this rank's model, once."""
    named = _named_tensors(model)
    seen = {id(tensor) for tensor, _ in named}
    lost = [name for name, parameter in model.named_parameters() if id(parameter) not in seen]
    if lost:
        raise CheckpointError(
            f"the model's state_dict() does not hold the parameters {listed(lost[:5])} themselves, so they cannot be "
            f"saved; a hook of the model replaces or drops them"
        )
    return [_piece(names, tensor, context) for tensor, names in named]


def model_items(model: nn.Module) -> dict[str, Any]:
    """What modules add to the model's state by `get_extra_state`, by key."""
    state = model.state_dict(keep_vars=True)
    return {key: value for key, value in state.items() if _is_item(key)}


def uneven_sizes(pieces: Iterable[Piece]) -> dict[str, dict[str, list[int]]]:
    """What the other ranks must know of this one."""
    return {
        piece.label: {str(dim): [at, piece.local.shape[dim]] for dim, (at, _) in piece.parts.items()}
        for piece in pieces
        if _may_be_uneven(piece)
    }


def locate(pieces: Iterable[Piece], everyone: Sequence[Sizes], context: ParallelContext) -> list[Located]:
    """Where each piece lies, from what every rank has said of its sizes."""
    layout, rank = context.layout, context.get_global_rank()
    sizes = {mode: len(layout.group_of(mode, rank)) for mode in layout.modes if layout.has(mode, rank)}
    return [_located(piece, everyone, sizes) for piece in pieces]


def _named_tensors(model: nn.Module) -> list[tuple[Tensor, tuple[str, ...]]]:
    found: dict[int, tuple[Tensor, list[str]]] = {}
    for key, value in model.state_dict(keep_vars=True).items():
        if not _is_item(key):
            if not isinstance(value, Tensor):
                raise CheckpointError(f"the model's state_dict() holds {key}, a {type(value).__name__}, not a tensor")
            found.setdefault(id(value), (value, []))[1].append(key)
    return [(tensor, tuple(names)) for tensor, names in found.values()]


def _is_item(key: str) -> bool:
    return key.rpartition(".")[2] == EXTRA_STATE


def _piece(names: tuple[str, ...], tensor: Tensor, context: ParallelContext) -> Piece:
    layout, rank = context.layout, context.get_global_rank()
    placement = effective_placement(tensor, layout, rank)
    tied = placement.tied
    anywhere = Placement({ParallelMode.PIPELINE: tied} if tied is not None else {})
    parts: dict[int, tuple[int, int]] = {}
    for mode, shard in placement.shards.items():
        at, count = parts.get(shard.dim, (0, 1))
        size = len(layout.group_of(mode, rank))
        parts[shard.dim] = (at * size + layout.local_rank(mode, rank), count * size)
    return Piece(
        label=names[0] if tied is None else f"tie:{tied.key}",
        names=names,
        tensor=tensor,
        placement=placement,
        holders=holding(layout, placement, rank).ranks,
        sharers=holding(layout, anywhere, rank).ranks,
        parts=parts,
        position={mode: layout.local_rank(mode, rank) for mode in placement.shards},
    )


def _may_be_uneven(piece: Piece) -> bool:
    return bool(piece.parts) and piece.placement.shape is not None and not is_dtensor(piece.tensor)


def _located(piece: Piece, everyone: Sequence[Sizes], sizes: Mapping[ParallelMode, int]) -> Located:
    local = tuple(piece.local.shape)
    if is_dtensor(piece.tensor):
        return _located_dtensor(piece, sizes)
    shape = logical_shape(piece.tensor, piece.placement, sizes)
    offset = [0] * len(local)
    for dim, (at, count) in piece.parts.items():
        if _may_be_uneven(piece):
            offset[dim] = _uneven_offset(piece, dim, count, shape[dim], everyone)
        else:
            offset[dim] = at * local[dim]
    return Located(piece, shape, Box(tuple(offset), local))


def _located_dtensor(piece: Piece, sizes: Mapping[ParallelMode, int]) -> Located:
    """From its mesh, inside the part that was cut by hand where there is one."""
    by_hand = placement_of(piece.tensor)
    shape = logical_shape(piece.tensor, by_hand, sizes)
    offset = list(_dtensor_offset(piece.tensor))
    outer: dict[int, tuple[int, int]] = {}
    for mode, shard in by_hand.shards.items():
        at, count = outer.get(shard.dim, (0, 1))
        outer[shard.dim] = (at * sizes[mode] + piece.position[mode], count * sizes[mode])
    for dim, (at, count) in outer.items():
        if shape[dim] != count * piece.tensor.shape[dim]:
            raise CheckpointError(
                f"{piece.names[0]} is cut by hand into uneven parts ({by_hand}) and sharded by FSDP: where a part lies "
                f"cannot be told. Cut it evenly, or use zero stage 1 or 2."
            )
        offset[dim] += at * piece.tensor.shape[dim]
    return Located(piece, shape, Box(tuple(offset), tuple(piece.local.shape)))


def _uneven_offset(piece: Piece, dim: int, count: int, whole: int, everyone: Sequence[Sizes]) -> int:
    told: dict[int, set[int]] = {at: set() for at in range(count)}
    for sizes in everyone:
        if piece.label in sizes:
            at, size = sizes[piece.label][str(dim)]
            told[at].add(size)
    widths = [sizes.pop() if len(sizes) == 1 else None for sizes in told.values()]
    known = [width for width in widths if width is not None]
    if len(known) != count or sum(known) != whole:
        raise CheckpointError(
            f"{piece.names[0]} is placed as {piece.placement} with {whole} elements along dimension {dim}, but its "
            f"{count} parts have {listed(widths)}; ranks that hold the same part must agree, and the parts must add up"
        )
    return sum(known[: piece.parts[dim][0]])


def _dtensor_offset(tensor: Any) -> tuple[int, ...]:
    # Imported here: it costs those who have no DTensors two seconds.
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(offset)
