"""An optimizer's state by the names of its parameters, so that it means the same on every layout."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from colonnade.checkpoint.locate import Piece
from colonnade.checkpoint.values import Encoded, encode
from colonnade.errors import CheckpointError
from colonnade.optim.zero.optimizer import ZeroOptimizer
from colonnade.optim.zero.state import FlatShard
from colonnade.parallel.dtensor import local_part
from colonnade.parallel.placement import is_dtensor

NOT_OPTIONS = ("params", "param_names")
HOW_NOT_WHAT = ("foreach", "fused", "capturable", "differentiable")
"""Options that choose an implementation; they are the running optimizer's, never the checkpoint's."""


@dataclass(frozen=True, eq=False)
class Slot:
    """One thing the optimizer keeps for a parameter.

    `like`: it is a tensor of the parameter's shape, and lies as the parameter does. Else it is one value for the
    whole parameter, such as its count of steps. With a `shard`, a tensor that is `like` has only the shard's elements.
    """

    piece: Piece
    name: str
    value: Any
    like: bool
    shard: FlatShard | None = None

    @property
    def what(self) -> str:
        return f"the optimizer's {self.name} of {self.piece.names[0]}"


@dataclass(frozen=True, eq=False)
class Group:
    """A parameter group: its place, its members and its options."""

    index: int
    members: tuple[Piece, ...]
    options: Encoded


def read_groups(optimizer: Any, pieces: Iterable[Piece]) -> list[Group]:
    """The optimizer's groups, their parameters found in the model."""
    return [
        Group(at, members, encode(_options(group), f"param_groups[{at}]"))
        for at, (group, members) in enumerate(zip(optimizer.param_groups, members_of(optimizer, pieces), strict=True))
    ]


def read_slots(optimizer: Any, pieces: Iterable[Piece]) -> list[Slot]:
    """Everything the optimizer keeps for its parameters, as its `state_dict()` gives it; of a sharded one, its shards."""
    if isinstance(optimizer, ZeroOptimizer):
        return _shard_slots(optimizer, pieces)
    state = optimizer.state_dict()
    found = []
    for group, members in zip(state["param_groups"], members_of(optimizer, pieces), strict=True):
        for index, piece in zip(group["params"], members, strict=True):
            for name, value in state["state"].get(index, {}).items():
                found.append(_slot(piece, name, value))
    return found


def _shard_slots(optimizer: ZeroOptimizer, pieces: Iterable[Piece]) -> list[Slot]:
    found = []
    for members in members_of(optimizer, pieces):
        for piece in members:
            shard = optimizer.flat_shard(piece.tensor)
            for name, value in (shard.state if shard is not None else {}).items():
                like = isinstance(value, Tensor) and shard is not None and value.shape == (shard.stop - shard.start,)
                found.append(Slot(piece, name, value, like, shard))
    return found


def members_of(optimizer: Any, pieces: Iterable[Piece]) -> list[tuple[Piece, ...]]:
    """The model's pieces in each group of the optimizer."""
    by_tensor = {id(piece.tensor): piece for piece in pieces}
    groups = []
    for at, group in enumerate(optimizer.param_groups):
        strangers = [parameter for parameter in group["params"] if id(parameter) not in by_tensor]
        if strangers:
            raise CheckpointError(
                f"group {at} of the optimizer has a parameter of shape {tuple(strangers[0].shape)} that the model does "
                f"not have; save and load the optimizer with the model whose parameters it was made for"
            )
        groups.append(tuple(by_tensor[id(parameter)] for parameter in group["params"]))
    return groups


def merged_options(group: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """A group's options after loading: the saved ones, but for those that only choose an implementation."""
    kept = {key: group[key] for key in (*NOT_OPTIONS, *HOW_NOT_WHAT) if key in group}
    return {**saved, **kept}


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in NOT_OPTIONS}


def _slot(piece: Piece, name: str, value: Any) -> Slot:
    if not isinstance(value, Tensor):
        slot = Slot(piece, name, value, like=False)
        if encode(value, slot.what).tensors:
            raise CheckpointError(f"{slot.what} is a {type(value).__name__} of tensors, which has no place in a layout")
        return slot
    like = local_part(value).shape == piece.local.shape
    slot = Slot(piece, name, value, like)
    lies = getattr(value, "placements", None)
    if is_dtensor(value) and (not like or lies != getattr(piece.tensor, "placements", None)):
        raise CheckpointError(f"{slot.what} is a DTensor that does not lie as the parameter does")
    if not like and piece.parts and value.numel() != 1:
        raise CheckpointError(
            f"{slot.what} has shape {tuple(value.shape)}, not the parameter's {tuple(piece.local.shape)}; of a parameter "
            f"that is split over ranks, only state of its own shape or of one element can be saved"
        )
    return slot
