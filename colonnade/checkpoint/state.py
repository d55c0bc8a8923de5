"""What a checkpoint holds beside tensors of the model: values, the state of objects, and the random streams."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Literal

import torch
from torch import Tensor

from colonnade.checkpoint.manifest import GroupRecord, ItemRecord, LayoutRecord, Manifest, TensorRecord
from colonnade.checkpoint.tensor_files import (
    Encoded,
    TensorReader,
    decode,
    dtype_of,
    encode,
    is_stateful,
    memory_for,
    raw_bytes,
    type_name,
)
from colonnade.checkpoint.tensors import LocalTensor, boxes_in_memory
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.random import derive_seed
from colonnade.context.random_state import set_random_state, why_not_here
from colonnade.errors import CheckpointError, did_you_mean, listed
from colonnade.logging import get_dist_logger
from colonnade.parallel.dtensor import as_dtensor, local_part
from colonnade.parallel.flat import MASTER, FlatShard, ShardedOptimizer
from colonnade.parallel.placement import is_dtensor

RANDOM = "random"
"""The name of the random state among the values."""
BUFFER = "buffer/"
"""What the names of buffers begin with that were not the same on all ranks that hold them."""
RandomSource = Literal["restored", "re-derived"]


class SavedValues:
    """The values of one checkpoint as this rank sees them.

    A value that was the same on every rank is everybody's. One that differed belongs to the rank that had it, and
    can be asked for only on the layout that saved it.
    """

    def __init__(self, manifest: Manifest, reader: TensorReader, context: ParallelContext) -> None:
        self.same_layout = manifest.layout == LayoutRecord.of(context.layout)
        self._manifest = manifest
        self._reader = reader
        self._context = context
        self._items: dict[str, list[ItemRecord]] = {}
        self._state_names: dict[str, list[str]] = {}
        for item in manifest.items:
            self._items.setdefault(item.name, []).append(item)
            if item.name.startswith("optimizer/"):
                _, state_name, label = item.name.split("/", 2)
                self._state_names.setdefault(label, []).append(state_name)

    def has(self, name: str) -> bool:
        """Whether the checkpoint has such a value."""
        return name in self._items

    def get(self, name: str) -> Any:
        """This rank's value; raises where there is none that can be its."""
        found = self._mine(name)
        if found is None:
            raise CheckpointError(
                f"{name} was not the same on all ranks when it was saved on {self._manifest.layout}, and this is "
                f"{LayoutRecord.of(self._context.layout)}: no rank here is the one that had it. Load without it."
            )
        return self.decoded(found)

    def decoded(self, item: ItemRecord) -> Any:
        """The value of a record."""
        return decode(item.value, lambda at: self._reader.entry(item.file or "", item.entry(at)))

    def optimizer_state_of(self, label: str) -> dict[str, Any]:
        """What the optimizer kept for a parameter that is not a tensor."""
        return {name: self.get(f"optimizer/{name}/{label}") for name in self._state_names.get(label, ())}

    def extras(self, extra: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """What was saved as `extra`: the state of the objects that are here to take it, and all other values."""
        known = [name.removeprefix("extra/") for name in self._items if name.startswith("extra/")]
        for name in extra:
            if name not in known:
                raise CheckpointError(
                    f"the checkpoint has no extra {name!r}; it has {listed(known)}.{did_you_mean(name, known)}"
                )
        states: dict[str, Any] = {}
        plain: dict[str, Any] = {}
        for name in known:
            if name in extra and is_stateful(extra[name]):
                states[name] = self.get(f"extra/{name}")
            elif name in extra or self._mine(f"extra/{name}") is not None:
                plain[name] = self.get(f"extra/{name}")
        return states, plain

    def own_buffer(self, label: str) -> Tensor | None:
        """What this rank had in a buffer where that was not what the first of its holders had, or None.

        On another layout no rank is the one that had it, so all get the first holder's; the log says so.
        """
        found = self._items.get(f"{BUFFER}{label}", [])
        if found and not self.same_layout:
            get_dist_logger().warning(
                f"{label} was not the same on all ranks when it was saved on {self._manifest.layout}: all ranks get what "
                f"the first had. (Statistics of BatchNorm drift apart; SyncBatchNorm keeps them together.)",
                ranks=[0],
            )
        mine = self._mine(f"{BUFFER}{label}") if found else None
        return None if mine is None else self.decoded(mine)

    def random_state(self) -> tuple[Mapping[str, Any] | None, str]:
        """Where the random streams of this rank stood, or None and why they cannot be put back."""
        if not self.has(RANDOM):
            return None, "it was imported, without any"
        if not self.same_layout:
            return None, f"it was saved on {self._manifest.layout}"
        state = self.get(RANDOM)
        reason = why_not_here(state, self._context)
        return (state, "") if reason is None else (None, reason)

    def restore_random(self, state: Mapping[str, Any] | None, reason: str) -> RandomSource:
        """Put the random streams back to the bit, or derive new ones from the saved and say so in the log."""
        if state is not None:
            set_random_state(state, self._context)
            return "restored"
        seed = self._derived_seed()
        self._context.set_seed(seed)
        get_dist_logger().warning(
            f"the random streams of step {self._manifest.step} cannot be carried over: {reason}, and this is "
            f"{LayoutRecord.of(self._context.layout)} on {self._context.device.type}. New ones were derived from it (seed {seed}).",
            ranks=[0],
        )
        return "re-derived"

    def _mine(self, name: str) -> ItemRecord | None:
        found = self._items[name]
        first, *others = found
        if not others and name != RANDOM and not name.startswith(BUFFER):
            return first
        rank = self._context.get_global_rank()
        return next((item for item in found if self.same_layout and rank in item.ranks), None)

    def _derived_seed(self) -> int:
        """The same on every rank and in every repetition; another one for another step."""
        digest = hashlib.sha256()
        first = next(iter(self._items.get(RANDOM, ())), None)
        if first is not None:
            for at in range(first.tensors):
                digest.update(raw_bytes(self._reader.entry(first.file or "", first.entry(at))))
        return derive_seed(self._manifest.step, digest.hexdigest())


# --------------------------------------------------------------------------------------------------
# LoadPlan: the tensors of a model and of a checkpoint, matched by name. What does not fit is listed, on every rank.
# --------------------------------------------------------------------------------------------------


_SHOWN = 12


class LoadPlan:
    """For every tensor of this rank's model, what the checkpoint has under any of its names."""

    def __init__(self, tensors: Sequence[LocalTensor], manifest: Manifest) -> None:
        self.tensors, self.manifest = tensors, manifest
        self._records: dict[int, TensorRecord] = {}
        self._missing: list[str] = []
        self._mismatched: list[str] = []
        known: dict[str, TensorRecord] = {}
        self._masters = {record.label: record for record in manifest.tensors if record.state_name == MASTER}
        self._sources: dict[int, TensorRecord] = {}
        self._others: dict[int, list[TensorRecord]] = {}
        for record in manifest.tensors:
            if not record.state_name:
                for name in (record.label, *record.names):
                    known.setdefault(name, record)
        for tensor in tensors:
            found = [known[name] for name in (*tensor.names, tensor.label) if name in known]
            if found:
                first, *self._others[id(tensor)] = {id(record): record for record in found}.values()
                self._match(tensor, first)
            else:
                self._missing.append(tensor.names[0])

    def record_of(self, tensor: LocalTensor) -> TensorRecord:
        """What the checkpoint has of a tensor."""
        return self._records[id(tensor)]

    def note(self) -> dict[str, list[str]]:
        """What the other ranks must know, for `check`."""
        others = (record for records in self._others.values() for record in records)
        used = sorted({record.label for record in (*self._records.values(), *others)})
        return {"used": used, "missing": self._missing, "mismatched": self._mismatched}

    def check(self, notes: Sequence[dict[str, list[str]]], where: str) -> None:
        """Raise the same error on every rank unless all tensors of the checkpoint and of all ranks found each other."""
        used = {label for note in notes for label in note["used"]}
        problems = {
            "missing in the checkpoint": _union(note["missing"] for note in notes),
            "in the checkpoint, but not in the model": [
                (record.names or (record.label,))[0]
                for record in self.manifest.tensors
                if not record.state_name and record.label not in used
            ],
            "of another shape or type": _union(note["mismatched"] for note in notes),
        }
        lines = [f"  {what} ({len(names)}): {_some(names)}" for what, names in problems.items() if names]
        if lines:
            raise CheckpointError(
                f"{where} does not fit this model:\n" + "\n".join(lines) + "\nBuild the model that "
                "was saved (names, sizes and types are in the manifest), or load another checkpoint.",
                code="C082",
            )

    def read_tensors(self, reader: TensorReader, values: SavedValues) -> list[Tensor]:
        """What every parameter and buffer of this rank is to hold, in new memory, reading only what it needs."""
        found = []
        for tensor in self.tensors:
            record = self.record_of(tensor)
            own = values.own_buffer(record.label)
            found.append(read_local(reader, tensor, self._sources.get(id(tensor), record)) if own is None else own)
            for other in self._others[id(tensor)]:
                if not torch.equal(read_local(reader, tensor, other), read_local(reader, tensor, record)):
                    raise CheckpointError(
                        f"{listed(tensor.names)} are one tensor in the model, and {record} and {other} have different values in "
                        f"the checkpoint: the model that was saved had not tied them",
                        code="C082",
                    )
        return found

    def set_tensors(self, found: Iterable[Tensor]) -> None:
        """Give every parameter and buffer, in place, what `read_tensors` found."""
        with torch.no_grad():
            for tensor, value in zip(self.tensors, found, strict=True):
                tensor.local.copy_(value)

    def _match(self, tensor: LocalTensor, record: TensorRecord) -> None:
        self._records[id(tensor)] = record
        dtype = type_name(tensor.local, listed(tensor.names))
        master = self._masters.get(record.label)
        if master is not None and (dtype, tensor.shape) == (master.dtype, master.shape):
            self._sources[id(tensor)] = master  # the weight itself, before it was rounded
        elif (dtype, tensor.shape) != (record.dtype, record.shape):
            self._mismatched.append(
                f"{tensor.names[0]}: {record.dtype} {list(record.shape)} in the checkpoint, {dtype} "
                f"{list(tensor.shape)} here"
            )


def read_local(reader: TensorReader, tensor: LocalTensor, record: TensorRecord) -> Tensor:
    """What this rank holds of a saved tensor, as a new one."""
    values = memory_for(tensor.local.shape, dtype_of(record))
    for box, view in tensor.pieces(values):
        reader.fill(view, box, record)
    return values


def _union(lists: Iterable[Iterable[str]]) -> list[str]:
    return list(dict.fromkeys(name for names in lists for name in names))


def _some(names: Sequence[str]) -> str:
    return listed(names[:_SHOWN]) + (" ..." if len(names) > _SHOWN else "")


# --------------------------------------------------------------------------------------------------
# An optimizer's state by the names of its parameters, so that it means the same on every layout: read, and loaded.
# --------------------------------------------------------------------------------------------------


_NOT_OPTIONS = ("params", "param_names")
_IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")
"""Options that choose an implementation; they are the running optimizer's, never the checkpoint's."""


@dataclass(frozen=True, eq=False)
class ParameterState:
    """One thing the optimizer keeps for a parameter, under `name`.

    `like_parameter`: it is a tensor of the parameter's shape, and lies as the parameter does. Else it is one value for
    the whole parameter, such as its count of steps. With a `shard`, such a tensor has only the shard's elements.
    """

    parameter: LocalTensor
    name: str
    value: Any
    like_parameter: bool
    shard: FlatShard | None = None

    def __str__(self) -> str:
        return f"the optimizer's {self.name} of {self.parameter.names[0]}"


@dataclass(frozen=True, eq=False)
class ParameterGroup:
    """A parameter group: its place, its members, its options, and the class of its optimizer."""

    index: int
    members: tuple[LocalTensor, ...]
    options: Encoded
    optimizer: str


def read_groups(optimizer: Any, tensors: Iterable[LocalTensor]) -> list[ParameterGroup]:
    """The optimizer's groups, their parameters found in the model."""
    return [
        ParameterGroup(at, members, encode(_options(group), f"param_groups[{at}]"), class_name(optimizer))
        for at, (group, members) in enumerate(zip(optimizer.param_groups, _members(optimizer, tensors), strict=True))
    ]


def class_name(optimizer: Any) -> str:
    """The class whose state it is; of a sharded optimizer the one that it shards."""
    return _lineage(optimizer)[0]


def _lineage(optimizer: Any) -> list[str]:
    """Its class and those that it is a subclass of, up to the first of torch's, which each step in their own way."""
    kind: type[Any] = getattr(optimizer, "optimizer_class", type(optimizer))
    own = list(takewhile(lambda base: not base.__module__.startswith("torch."), kind.__mro__))
    return [base.__name__ for base in kind.__mro__[: len(own) + 1]]


def read_state(optimizer: Any, tensors: Iterable[LocalTensor]) -> list[ParameterState]:
    """All that is kept for the parameters, as `state_dict()` gives it; of a sharded optimizer, this rank's shards."""
    groups = _members(optimizer, tensors)
    if isinstance(optimizer, ShardedOptimizer):
        return [state for members in groups for parameter in members for state in _shard_state(optimizer, parameter)]
    saved = optimizer.state_dict()
    return [
        _whole_state(parameter, name, value)
        for group, members in zip(saved["param_groups"], groups, strict=True)
        for number, parameter in zip(group["params"], members, strict=True)
        for name, value in saved["state"].get(number, {}).items()
    ]


def _shard_state(optimizer: ShardedOptimizer, parameter: LocalTensor) -> list[ParameterState]:
    shard = optimizer.flat_shard(parameter.tensor)
    if shard is None:
        return []
    size = (shard.stop - shard.start,)
    return [
        ParameterState(parameter, name, value, isinstance(value, Tensor) and value.shape == size, shard)
        for name, value in shard.state.items()
    ]


def _whole_state(parameter: LocalTensor, name: str, value: Any) -> ParameterState:
    like = isinstance(value, Tensor) and local_part(value).shape == parameter.local.shape
    state = ParameterState(parameter, name, value, like)
    if not isinstance(value, Tensor):
        if encode(value, str(state)).tensors:
            raise CheckpointError(
                f"{state} is a {type(value).__name__} of tensors, which has no place in a layout", code="C083"
            )
        return state
    lies = getattr(value, "placements", None)
    if is_dtensor(value) and (not like or lies != getattr(parameter.tensor, "placements", None)):
        raise CheckpointError(f"{state} is a DTensor that does not lie as the parameter does", code="C083")
    if not like and parameter.parts and value.numel() != 1:
        raise CheckpointError(
            f"{state} has shape {tuple(value.shape)}, not the parameter's {tuple(parameter.local.shape)}; of a parameter "
            f"that is split over ranks, only state of its own shape or of one element can be saved",
            code="C083",
        )
    return state


def _members(optimizer: Any, tensors: Iterable[LocalTensor]) -> list[tuple[LocalTensor, ...]]:
    """The model's tensors in each group of the optimizer."""
    by_tensor = {id(tensor.tensor): tensor for tensor in tensors}
    groups = []
    for at, group in enumerate(optimizer.param_groups):
        strangers = [parameter for parameter in group["params"] if id(parameter) not in by_tensor]
        if strangers:
            raise CheckpointError(
                f"group {at} of the optimizer has a parameter of shape {tuple(strangers[0].shape)} that the model does "
                f"not have; save and load the optimizer with the model whose parameters it was made for",
                code="C083",
            )
        groups.append(tuple(by_tensor[id(parameter)] for parameter in group["params"]))
    return groups


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _NOT_OPTIONS}


class OptimizerLoader:
    """Reads the options and the state of an optimizer's own parameters, whichever those are on this rank."""

    def __init__(self, plan: LoadPlan, reader: TensorReader, values: SavedValues) -> None:
        if plan.manifest.groups is None:
            raise CheckpointError(
                "the checkpoint was saved without an optimizer; load it with optimizer=None", code="C083"
            )
        self._groups = plan.manifest.groups
        self._plan, self._reader, self._values = plan, reader, values
        self._rounded: list[str] = []
        self._inherited = ""
        self._records: dict[str, list[TensorRecord]] = {}
        for record in plan.manifest.tensors:
            if record.state_name:
                self._records.setdefault(record.label, []).append(record)

    def state_dict_for(self, optimizer: Any) -> dict[str, Any]:
        """What this optimizer is to load, in torch's format; refuses groups that do not fit."""
        groups: list[dict[str, Any]] = []
        state: dict[int, dict[str, Any]] = {}
        number = 0
        members = _members(optimizer, self._plan.tensors)
        for index, (group, parameters) in enumerate(zip(optimizer.param_groups, members, strict=True)):
            labels = {self._plan.record_of(one).label for one in parameters}
            options = self._saved_options(index, group, labels, _lineage(optimizer))
            kept = {key: group[key] for key in (*_NOT_OPTIONS, *_IMPLEMENTATION) if key in group}
            groups.append({**options, **kept, "params": list(range(number, number + len(parameters)))})
            for parameter in parameters:
                found = self._state_of(parameter, optimizer)
                if found:
                    state[number] = found
                number += 1
        if self._inherited:
            self._check_inherited(optimizer, state)
        if self._rounded:
            get_dist_logger().warning(
                f"the checkpoint has moments of master copies in {self._rounded[0]}, and this optimizer keeps no master "
                f"copies: {len(self._rounded)} of them were rounded to the types of their parameters",
                ranks=[0],
            )
        return {"state": state, "param_groups": groups}

    def _check_inherited(self, optimizer: Any, state: Mapping[int, Mapping[str, Any]]) -> None:
        """Refuse a subclass of what was saved that is seen to keep more; else say whose state it gets."""
        kind = class_name(optimizer)
        saved = {name for found in state.values() for name in found}
        held = {name for kept in getattr(optimizer, "state", {}).values() for name in kept}
        more = sorted(held - saved - {MASTER}) if saved else []
        if more:
            raise CheckpointError(
                f"the checkpoint has the state of {self._inherited}, and this is {kind}, a subclass that keeps {listed(more)} "
                f"too, which the checkpoint has not. Load with {self._inherited}, or with optimizer=None to begin with fresh "
                f"state.",
                code="C083",
            )
        get_dist_logger().warning(
            f"the checkpoint has the state of {self._inherited}, and this is {kind}, a subclass of it, which goes on with "
            f"that state",
            ranks=[0],
        )

    def _saved_options(
        self, index: int, group: Mapping[str, Any], labels: set[str], lineage: Sequence[str]
    ) -> dict[str, Any]:
        """The options that these parameters had; for a group without any here, those of the group in its place."""
        records = self._records_of_group(index, labels)
        found = [self._values.decoded(record.options) for record in records]
        if len({encode(options, "options").digest() for options in found}) > 1:
            raise CheckpointError(
                f"group {index} of the optimizer joins parameters that had different options when they were saved: "
                f"{records[0].names[0]} and {records[1].names[0]}. Make the groups as they were.",
                code="C083",
            )
        options = next(iter(found), _options(group))
        unknown = [key for key in _options(group) if key not in options and key not in _IMPLEMENTATION]
        if unknown:
            raise CheckpointError(
                f"group {index} of the optimizer has the options {listed(unknown)}, which the saved one had not: it was "
                f"another kind of optimizer. Load with that kind, or with optimizer=None.",
                code="C083",
            )
        for key, value in _options(group).items():
            if key in options and key not in _IMPLEMENTATION and not _is_alike(key, options[key], value):
                raise CheckpointError(
                    f"group {index} of the optimizer has {key}={options[key]!r} in the checkpoint, and {key}={value!r} here: it is no value "
                    f"of that kind. Was the checkpoint changed? Load another one, or with optimizer=None.",
                    code="C083",
                )
        kind, *_ = lineage
        saved = next((record.optimizer for record in records if record.optimizer not in (None, kind)), None)
        if saved is not None and saved not in lineage:
            raise CheckpointError(
                f"the checkpoint has the state of {saved}, and this is {kind}, which would step on it in another way. "
                f"Load with {saved}, or with optimizer=None to begin with fresh state.",
                code="C083",
            )
        self._inherited = saved or self._inherited
        return options

    def _records_of_group(self, index: int, labels: set[str]) -> list[GroupRecord]:
        if not labels:
            return [record for record in self._groups if record.index == index]
        found = [record for record in self._groups if labels.intersection(record.names)]
        lost = sorted(labels.difference(*(record.names for record in found)))
        if lost:
            raise CheckpointError(
                f"the optimizer that was saved did not have {listed(lost[:5])}, which group {index} has; make the groups "
                f"as they were, or load with optimizer=None",
                code="C083",
            )
        return found

    def _state_of(self, parameter: LocalTensor, optimizer: Any) -> dict[str, Any] | None:
        shard = None
        if isinstance(optimizer, ShardedOptimizer):
            shard = optimizer.flat_shard(parameter.tensor)
            if shard is None:  # all of it is other ranks'
                return None
        weight = self._plan.record_of(parameter)
        state: dict[str, Any] = {}
        records = self._records.get(weight.label, ())
        has_master = any(record.state_name == MASTER for record in records)
        for record in records:
            if record.shape != weight.shape or record.state_name == "step":
                state[record.state_name] = self._reader.whole(record)
            elif shard is not None:
                state[record.state_name] = self._shard(parameter, shard, record)
            elif record.state_name != MASTER:
                value = read_local(self._reader, parameter, record)
                if has_master and value.dtype != parameter.local.dtype:
                    # Moments of a master copy have its type; an optimizer of the parameter itself takes only its own.
                    self._rounded.append(str(value.dtype))
                    value = value.to(parameter.local.dtype)
                if is_dtensor(parameter.tensor):
                    value = as_dtensor(value.to(parameter.local.device), parameter.tensor)
                state[record.state_name] = value
        return {**state, **self._values.optimizer_state_of(weight.label)}

    def _shard(self, parameter: LocalTensor, shard: FlatShard, record: TensorRecord) -> Tensor:
        """Just the elements of the shard."""
        values = memory_for([shard.stop - shard.start], dtype_of(record))
        for box, view in boxes_in_memory(parameter, shard.start, shard.stop, values):
            self._reader.fill(view, box, record)
        return values


def _is_alike(key: str, saved: Any, here: Any) -> bool:
    """Whether a saved option can take the place of this one: a number of a number, a text of a text. None says nothing."""
    if saved is None or here is None:
        return key != "lr" or here is None
    if isinstance(here, (list, tuple)):
        fits = isinstance(saved, (list, tuple)) and len(saved) == len(here)
        return fits and all(_is_alike("", *pair) for pair in zip(saved, here, strict=True))
    kinds: tuple[Any, ...] = (bool | int | float | Tensor, str, dict)
    return all(isinstance(saved, kind) for kind in kinds if isinstance(here, kind))


def load_optimizer(optimizer: Any, state_dict: dict[str, Any]) -> None:
    """Load it by the optimizer's own method, so that its hooks run; every moment keeps the type it was saved with."""
    optimizer.load_state_dict(state_dict)
    if not isinstance(optimizer, ShardedOptimizer):  # which takes its elements as they are
        _keep_types(optimizer, state_dict["state"])


def _keep_types(optimizer: Any, state: Mapping[int, Mapping[str, Any]]) -> None:
    """Undo the cast of `load_state_dict`, which gives every moment the type of its parameter."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, saved in state.items():
        held = optimizer.state[parameters[number]]
        for name, value in saved.items():
            if isinstance(value, Tensor) and isinstance(held.get(name), Tensor) and held[name].dtype != value.dtype:
                held[name] = value.to(held[name].device)
