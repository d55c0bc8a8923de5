"""An optimizer's state by the names of its parameters, so that it means the same on every layout: read, and loaded.

`read_groups` and `read_state` say what there is to save. `OptimizerLoader` finds in a checkpoint what an optimizer on this layout
is to load, and refuses state that it would step on in another way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from torch import Tensor

from colonnade.checkpoint.manifest import GroupRecord, TensorRecord
from colonnade.checkpoint.tensor_files import TensorReader, dtype_of, memory_for
from colonnade.checkpoint.values import Encoded, SavedValues, encode
from colonnade.errors import CheckpointError, listed
from colonnade.logging import get_dist_logger
from colonnade.parallel.dtensor import as_dtensor, local_part
from colonnade.parallel.flat import MASTER, FlatShard, ShardedOptimizer
from colonnade.parallel.placement import is_dtensor
from colonnade.parallel.whole import LocalTensor, boxes_in_memory

_NOT_OPTIONS = ("params", "param_names")
_IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")
"""Options that choose an implementation; they are the running optimizer's, never the checkpoint's."""


@dataclass(frozen=True, eq=False)
class ParameterState:
    """A value that the optimizer keeps for a parameter, under `name`. Made by `read_state`.

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
    """A parameter group: its place, its members, its options, and the class of its optimizer. Made by `read_groups`."""

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
    """The class of an optimizer and its bases, up to the first of torch's: each of them steps in its own way."""
    kind: type[Any] = getattr(optimizer, "optimizer_class", type(optimizer))
    own = list(takewhile(lambda base: not base.__module__.startswith("torch."), kind.__mro__))
    return [base.__name__ for base in kind.__mro__[: len(own) + 1]]


def read_state(optimizer: Any, tensors: Iterable[LocalTensor]) -> list[ParameterState]:
    """The state of all parameters, as `state_dict()` gives it; of a sharded optimizer, this rank's shards."""
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
    # Where a tensor of the parameter's shape lies is known from the parameter. All else must be one value for the whole.
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


# --- Loading ---


class OptimizerLoader:
    """Reads the options and the state of an optimizer's own parameters, whichever those are on this rank."""

    def __init__(
        self,
        tensors: Sequence[LocalTensor],
        record_of: Callable[[LocalTensor], TensorRecord],
        reader: TensorReader,
        values: SavedValues,
    ) -> None:
        if reader.manifest.groups is None:
            raise CheckpointError(
                "the checkpoint was saved without an optimizer; load it with optimizer=None", code="C083"
            )
        self._groups = reader.manifest.groups
        self._tensors, self._record_of, self._reader, self._values = tensors, record_of, reader, values
        self._rounded: list[str] = []
        self._inherited = ""
        self._records: dict[str, list[TensorRecord]] = {}
        for record in reader.manifest.tensors:
            if record.state_name:
                self._records.setdefault(record.label, []).append(record)

    def state_dict_for(self, optimizer: Any) -> dict[str, Any]:
        """The state that this optimizer is to load, in torch's format; refuses groups that do not fit."""
        groups: list[dict[str, Any]] = []
        state: dict[int, dict[str, Any]] = {}
        number = 0
        members = _members(optimizer, self._tensors)
        for index, (group, parameters) in enumerate(zip(optimizer.param_groups, members, strict=True)):
            labels = {self._record_of(parameter).label for parameter in parameters}
            # Groups are matched by the parameters in them: their order and number may differ between layouts.
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
        # The options of this optimizer must be among the saved ones: it would else step with a value that nobody chose.
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
        # A subclass may take the state of its base, if it is seen to keep no more (`_check_inherited`).
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
        weight = self._record_of(parameter)
        state: dict[str, Any] = {}
        records = self._records.get(weight.label, ())
        has_master = any(record.state_name == MASTER for record in records)
        for record in records:
            # One value for the whole parameter; `step` is one even where the parameter has no dimensions either.
            if record.shape != weight.shape or record.state_name == "step":
                state[record.state_name] = self._reader.whole(record)
            elif shard is not None:
                state[record.state_name] = self._shard(parameter, shard, record)
            elif record.state_name != MASTER:
                value = self._reader.local(parameter, record)
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
