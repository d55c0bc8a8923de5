"""The sharded optimizer state as whole parameters see it: gathered, cut, or as the ranges that this rank has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from colonnade.errors import CheckpointError
from colonnade.optim.zero.bucket import Piece, ShardedBucket
from colonnade.optim.zero.inner import cut
from colonnade.parallel.flat import view_like
from colonnade.parallel.shards import MASTER, FlatShard


class ShardedState:
    """Reads and writes `inner.state` by parameter."""

    def __init__(self, inner: Optimizer, buckets: Sequence[ShardedBucket]) -> None:
        self._inner = inner
        self._buckets = list(buckets)
        self._place: dict[int, tuple[ShardedBucket, Piece | None]] = {}
        for bucket in buckets:
            mine = {id(piece.member): piece for piece in bucket.pieces}
            for member in bucket.members:
                self._place[id(member.parameter)] = (bucket, mine.get(id(member)))

    def knows(self, parameter: Tensor) -> bool:
        """Whether the parameter is sharded here, if only into other ranks' slices."""
        return id(parameter) in self._place

    def shard_of(self, parameter: Tensor) -> FlatShard | None:
        """This rank's part of a parameter; None if it has none, or the parameter is not sharded at all."""
        bucket, piece = self._place.get(id(parameter), (None, None))
        if bucket is None or piece is None:
            return None
        return FlatShard(piece.start, piece.stop, bucket.team.ranks, self._kept(bucket, piece))

    def whole(self, parameter: Tensor) -> dict[str, Any]:
        """Everything kept for a parameter, as if it were not sharded. Collective over its team."""
        bucket, piece = self._place.get(id(parameter), (None, None))
        if bucket is None:
            return {}
        kept = self._kept(bucket, piece) if piece is not None else {}
        notes = {name: _kind(value, piece) for name, value in kept.items()}
        told: dict[str, Any] = {}
        for note in bucket.team.party.gather_objects(notes):
            told.update(note)
        return {name: self._gathered(bucket, parameter, kept.get(name), kind, piece) for name, kind in told.items()}

    def whole_gradient(self, parameter: Tensor) -> Tensor | None:
        """The final gradient of a sharded parameter. Collective over its team; None where no rank had one."""
        bucket, piece = self._place[id(parameter)]
        here = piece is not None and piece.value.grad is not None
        if not any(bucket.team.party.gather_objects(here)):
            return None
        kind = ["like", _name(bucket.grads.dtype)]
        gradient: Tensor = self._gathered(bucket, parameter, piece.grad if piece is not None else None, kind, piece)
        return gradient

    def load(self, states: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
        """The dictionary that `inner` is to load: by id of parameter, whole state or just this rank's part of it."""
        numbers: dict[int, int] = {}
        groups = []
        for group in self._inner.param_groups:
            first = len(numbers)
            for value in group["params"]:
                numbers[id(value)] = len(numbers)
            groups.append({**group, "params": list(range(first, len(numbers)))})
        state: dict[int, dict[str, Any]] = {}
        for bucket in self._buckets:
            for piece in bucket.pieces:
                given = dict(states.get(id(piece.member.parameter), {}))
                self._set_master(bucket, piece, given.pop(MASTER, None))
                if given:
                    state[numbers[id(piece.value)]] = {k: _fitting(v, piece, k) for k, v in given.items()}
        return {"state": state, "param_groups": groups}

    def _kept(self, bucket: ShardedBucket, piece: Piece) -> dict[str, Any]:
        kept = dict(self._inner.state.get(piece.value, {}))
        return {**kept, MASTER: piece.value} if bucket.has_masters and bucket.dtype != bucket.wide else kept

    @torch.no_grad()
    def _set_master(self, bucket: ShardedBucket, piece: Piece, given: Any) -> None:
        if bucket.has_masters:
            own = bucket.flat.own[bucket.own][piece.at : piece.at + piece.numel]
            piece.value.copy_(own if given is None else _fitting(given, piece, MASTER))

    def _gathered(
        self, bucket: ShardedBucket, parameter: Tensor, value: Any, kind: Sequence[Any], piece: Piece | None
    ) -> Any:
        if kind[0] == "value":
            return _decoded(kind)
        member = next(member for member in bucket.members if member.parameter is parameter)
        whole = torch.zeros(member.local.numel(), dtype=getattr(torch, kind[1]), device=bucket.team.device)
        if piece is not None and value is not None:
            whole[piece.start : piece.stop] = value
        if not bucket.team.alone:
            # As bytes: every element is somebody's and zero elsewhere, so that the sum has the same bits.
            dist.all_reduce(whole.view(torch.uint8), group=bucket.team.group)
        return view_like(whole, member.local)


def _kind(value: Any, piece: Piece | None) -> list[Any]:
    """["like", dtype] for a tensor with an element per element; ["value", ...] for one value of all."""
    if isinstance(value, Tensor):
        if piece is not None and value.shape == piece.value.shape and value.dim() == 1:
            return ["like", _name(value.dtype)]
        if value.numel() != 1:
            raise CheckpointError(f"state of shape {tuple(value.shape)} belongs neither to elements nor to a parameter")
        return ["value", _name(value.dtype), value.item(), list(value.shape)]
    return ["value", None, value]


def _decoded(kind: Sequence[Any]) -> Any:
    if kind[1] is None:
        return kind[2]
    return torch.tensor(kind[2], dtype=getattr(torch, kind[1])).reshape(kind[3])


def _fitting(value: Any, piece: Piece, name: str) -> Any:
    """What was loaded, cut to the piece if it is for the whole parameter."""
    if isinstance(value, Tensor) and name != "step" and value.dim() == 1 and value.numel() == piece.numel:
        return value
    return cut(value, piece, name)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
