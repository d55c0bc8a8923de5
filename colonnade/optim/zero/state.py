"""The sharded optimizer state as whole parameters see it: gathered, cut, or as the ranges that this rank has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from colonnade.errors import CheckpointError
from colonnade.optim.zero.inner import Part, cut
from colonnade.parallel.dtensor import local_part
from colonnade.parallel.flat import flattened, view_like
from colonnade.parallel.shards import MASTER, FlatShard
from colonnade.reduce.values import BucketValues


class ShardedState:
    """Reads and writes `inner.state` by parameter."""

    def __init__(self, inner: Optimizer, values: Sequence[BucketValues], parts: Sequence[Part]) -> None:
        self._inner = inner
        self._parts = {id(part.parameter): part for part in parts}
        self._values = {id(parameter): one for one in values for parameter in one.bucket.parameters}

    def knows(self, parameter: Tensor) -> bool:
        """Whether the parameter is sharded here, if only into other ranks' slices."""
        return id(parameter) in self._values

    def shard_of(self, parameter: Tensor) -> FlatShard | None:
        """This rank's part of a parameter; None if it has none, or the parameter is not sharded at all."""
        part = self._parts.get(id(parameter))
        if part is None:
            return None
        return FlatShard(part.start, part.stop, self._values[id(parameter)].group.ranks, self._kept(part))

    def whole(self, parameter: Tensor) -> dict[str, Any]:
        """Everything kept for a sharded parameter, as if it were not sharded. Collective over its group."""
        part = self._parts.get(id(parameter))
        kept: dict[str, Any] = {}
        notes: dict[str, list[Any]] = {}
        told: dict[str, list[Any]] = {}
        if part is not None:
            kept = self._kept(part)
            notes = {name: _kind(value, part) for name, value in kept.items()}
        for note in self._values[id(parameter)].group.gather_objects(notes):
            told.update(note)
        return {name: self._gathered(parameter, kept.get(name), kind) for name, kind in told.items()}

    def whole_gradient(self, parameter: Tensor) -> Tensor | None:
        """The final gradient of a sharded parameter. Collective over its group; None where no rank had one."""
        bucket = self._values[id(parameter)].bucket
        index = next(at for at, one in enumerate(bucket.parameters) if one is parameter)
        if index in bucket.absent:
            return None
        span = next((span for span in bucket.spans if span.index == index), None)
        own = bucket.gradient[span.at : span.at + span.numel] if span is not None else None
        gradient: Tensor = self._gathered(parameter, own, ["like", _name(bucket.gradient.dtype)])
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
        for part in self._parts.values():
            given = dict(states.get(id(part.parameter), {}))
            self._set_master(part, given.pop(MASTER, None))
            if given:
                state[numbers[id(part.value)]] = {k: _fitting(v, part, k) for k, v in given.items()}
        return {"state": state, "param_groups": groups}

    def _kept(self, part: Part) -> dict[str, Any]:
        kept = dict(self._inner.state.get(part.value, {}))
        # A copy that only lies on another device is no state: it is the parameter.
        return {**kept, MASTER: part.value} if part.value.dtype != part.local.dtype else kept

    @torch.no_grad()
    def _set_master(self, part: Part, given: Any) -> None:
        if self._values[id(part.parameter)].has_master:
            part.value.copy_(
                flattened(part.local)[part.start : part.stop] if given is None else _fitting(given, part, MASTER)
            )

    def _gathered(self, parameter: Tensor, value: Any, kind: Sequence[Any]) -> Any:
        if kind[0] == "value":
            return _decoded(kind)
        group, part, like = self._values[id(parameter)].group, self._parts.get(id(parameter)), local_part(parameter)
        whole = torch.zeros(like.numel(), dtype=getattr(torch, kind[1]), device=like.device)
        if part is not None and value is not None:
            whole[part.start : part.stop] = value
        if not group.alone:
            # As bytes: every element is somebody's and zero elsewhere, so that the sum has the same bits.
            dist.all_reduce(whole.view(torch.uint8), group=group.group)
        return view_like(whole, like.detach())


def _kind(value: Any, part: Part) -> list[Any]:
    """["like", dtype] for a tensor with an element per element; ["value", ...] for one value of all."""
    if isinstance(value, Tensor):
        if value.shape == part.value.shape:
            return ["like", _name(value.dtype)]
        if value.numel() != 1:
            raise CheckpointError(f"state of shape {tuple(value.shape)} belongs neither to elements nor to a parameter")
        return ["value", _name(value.dtype), value.item(), list(value.shape)]
    return ["value", None, value]


def _decoded(kind: Sequence[Any]) -> Any:
    if kind[1] is None:
        return kind[2]
    return torch.tensor(kind[2], dtype=getattr(torch, kind[1]), device="cpu").reshape(kind[3])


def _fitting(value: Any, part: Part, name: str) -> Any:
    """What was loaded, cut to the part if it is for the whole parameter."""
    if isinstance(value, Tensor) and name != "step" and value.shape == part.value.shape:
        return value
    return cut(value, part, name)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
