"""Optimizer state keyed by parameter name, which is independent of the layout: reading for a save, and loading.

`read_groups` and `read_state` return all state to save. `OptimizerLoader` builds the state dict that an optimizer on this layout
loads from a checkpoint, and raises if the state is that of another kind of optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from torch import Tensor

from colonnade.checkpoint.manifest import TensorRecord
from colonnade.checkpoint.tensor_files import TensorReader, dtype_of, memory_for
from colonnade.checkpoint.values import Encoded, SavedValues, encode
from colonnade.errors import CheckpointError, listed
from colonnade.logging import get_dist_logger
from colonnade.parallel.flat import MASTER, FlatShard, ShardedOptimizer
from colonnade.parallel.placement import as_dtensor, is_dtensor, local_part
from colonnade.parallel.whole import LocalTensor, boxes_in_memory

_NOT_OPTIONS = ("params", "param_names")
_IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")
"""Options that choose an implementation; the running optimizer keeps its own, whatever the checkpoint has."""


@dataclass(frozen=True, eq=False)
class ParameterState:
    """The value `name` in the optimizer state of a parameter. Made by `read_state`.

    With `like_parameter`, the value is a tensor of the parameter's shape, sharded like the parameter; if `shard` is set, too, the
    tensor has only the elements of this ZeRO shard. Without `like_parameter`, the value belongs to the full parameter, such as its
    step count.
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
    """A parameter group: its index, its parameters, its options, and the class of its optimizer. Made by `read_groups`."""

    index: int
    members: tuple[LocalTensor, ...]
    options: Encoded
    optimizer: str


def read_groups(optimizer: Any, tensors: Iterable[LocalTensor]) -> list[ParameterGroup]:
    """Read the parameter groups of the optimizer. Their parameters are returned as `LocalTensor`s of the model."""
    return [
        ParameterGroup(at, members, encode(_options(group), f"param_groups[{at}]"), class_name(optimizer))
        for at, (group, members) in enumerate(zip(optimizer.param_groups, _members(optimizer, tensors), strict=True))
    ]


def class_name(optimizer: Any) -> str:
    """The name of the optimizer's class; for a sharded optimizer, the class of the user's optimizer."""
    return _lineage(optimizer)[0]


def _lineage(optimizer: Any) -> list[str]:
    """The names of an optimizer's class and its bases, up to and including the first class of torch."""
    kind: type[Any] = getattr(optimizer, "optimizer_class", type(optimizer))
    own = list(takewhile(lambda base: not base.__module__.startswith("torch."), kind.__mro__))
    return [base.__name__ for base in kind.__mro__[: len(own) + 1]]


def read_state(optimizer: Any, tensors: Iterable[LocalTensor]) -> list[ParameterState]:
    """The state of all parameters, as `state_dict()` returns it; for a sharded optimizer, this rank's shards of the state.

    Raises:
        CheckpointError: A state tensor has no defined place in the layout (code C083).
    """
    groups = _members(optimizer, tensors)
    states = []
    if isinstance(optimizer, ShardedOptimizer):
        for parameter in (parameter for members in groups for parameter in members):
            shard = optimizer.flat_shard(parameter.tensor)
            if shard is not None:
                size = (shard.stop - shard.start,)
                states += [
                    ParameterState(parameter, name, value, isinstance(value, Tensor) and value.shape == size, shard)
                    for name, value in shard.state.items()
                ]
        return states

    # torch numbers the parameters of a state_dict in the order of the groups.
    saved = optimizer.state_dict()
    for group, members in zip(saved["param_groups"], groups, strict=True):
        for number, parameter in zip(group["params"], members, strict=True):
            for name, value in saved["state"].get(number, {}).items():
                like = isinstance(value, Tensor) and local_part(value).shape == parameter.local.shape
                state = ParameterState(parameter, name, value, like)
                states.append(state)
                if not isinstance(value, Tensor):
                    if encode(value, str(state)).tensors:
                        raise CheckpointError(
                            f"{state} is a {type(value).__name__} of tensors. Colonnade does not know how these "
                            "tensors are sharded over ranks. Store each tensor under its own key in the optimizer "
                            "state.",
                            code="C083",
                        )
                    continue

                # A tensor of the parameter's shape is sharded like the parameter. Any other tensor must be one value for the
                # full parameter, or its layout would be unknown.
                placements = getattr(value, "placements", None)
                if is_dtensor(value) and (not like or placements != getattr(parameter.tensor, "placements", None)):
                    raise CheckpointError(
                        f"{state} is a DTensor, and its placements differ from those of the parameter, so it cannot "
                        "be saved. Give the state and the parameter the same placements.",
                        code="C083",
                    )
                if not like and parameter.parts and value.numel() != 1:
                    raise CheckpointError(
                        f"{state} has shape {tuple(value.shape)}, but the parameter has shape "
                        f"{tuple(parameter.local.shape)}. For a sharded parameter, state must have the shape of the "
                        "parameter or one element. Change the shape of the state.",
                        code="C083",
                    )
    return states


def _members(optimizer: Any, tensors: Iterable[LocalTensor]) -> list[tuple[LocalTensor, ...]]:
    """The model's tensors in each group of the optimizer."""
    by_tensor = {id(tensor.tensor): tensor for tensor in tensors}
    groups = []
    for at, group in enumerate(optimizer.param_groups):
        unknown = [parameter for parameter in group["params"] if id(parameter) not in by_tensor]
        if unknown:
            raise CheckpointError(
                f"group {at} of the optimizer has a parameter of shape {tuple(unknown[0].shape)} that is not in the "
                "model. Save and load the optimizer together with the model that owns its parameters.",
                code="C083",
            )
        groups.append(tuple(by_tensor[id(parameter)] for parameter in group["params"]))
    return groups


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _NOT_OPTIONS}


# --- Loading ---


class OptimizerLoader:
    """Reads options and state from a checkpoint, for the parameters that an optimizer has on this rank."""

    def __init__(
        self,
        tensors: Sequence[LocalTensor],
        record_of: Callable[[LocalTensor], TensorRecord],
        reader: TensorReader,
        values: SavedValues,
    ) -> None:
        if reader.manifest.groups is None:
            raise CheckpointError(
                "the checkpoint contains no optimizer state. Load it with optimizer=None.", code="C083"
            )
        self._groups = reader.manifest.groups
        self._tensors, self._record_of, self._reader, self._values = tensors, record_of, reader, values
        self._rounded: list[str] = []
        self._records: dict[str, list[TensorRecord]] = {}
        for record in reader.manifest.tensors:
            if record.state_name:
                self._records.setdefault(record.label, []).append(record)

    def state_dict_for(self, optimizer: Any) -> dict[str, Any]:
        """Build the state dict for this optimizer, in the format of `load_state_dict`.

        Raises:
            CheckpointError: The groups, options or class of the optimizer do not match the checkpoint (code C083).
        """
        groups: list[dict[str, Any]] = []
        state: dict[int, dict[str, Any]] = {}
        number = 0
        base: str | None = None  # a base class of the optimizer, whose state the checkpoint has
        kind, *bases = _lineage(optimizer)
        members = _members(optimizer, self._tensors)
        for index, (group, parameters) in enumerate(zip(optimizer.param_groups, members, strict=True)):
            # Groups are matched by their parameters, because their order and number may differ between layouts. A group that has
            # no parameters on this rank is matched by its index.
            labels = {self._record_of(parameter).label for parameter in parameters}
            if labels:
                records = [record for record in self._groups if labels.intersection(record.names)]
            else:
                records = [record for record in self._groups if record.index == index]
            lost = sorted(labels.difference(*(record.names for record in records)))
            if lost:
                raise CheckpointError(
                    f"group {index} of the optimizer has the parameters {listed(lost[:5])}, but the saved optimizer "
                    "did not have them. Use the same parameter groups, or load with optimizer=None.",
                    code="C083",
                )
            found = [self._values.decoded(record.options) for record in records]
            if len({encode(options, "options").digest() for options in found}) > 1:
                raise CheckpointError(
                    f"group {index} of the optimizer contains {records[0].names[0]} and {records[1].names[0]}, but "
                    "these parameters had different options in the checkpoint. Use the parameter groups of the saved "
                    "run.",
                    code="C083",
                )

            # Every option of this optimizer must be in the checkpoint, with the same type. For a missing option, the optimizer
            # would silently use its default. A different type means a different optimizer class, or an edited file.
            own = _options(group)
            options = next(iter(found), own)
            unknown = [key for key in own if key not in options and key not in _IMPLEMENTATION]
            if unknown:
                raise CheckpointError(
                    f"group {index} of the optimizer has the options {listed(unknown)}, but the saved optimizer did "
                    "not have them. The saved optimizer was of another class. Load with that class, or with "
                    "optimizer=None.",
                    code="C083",
                )
            for key, value in own.items():
                if key in options and key not in _IMPLEMENTATION and not _is_alike(key, options[key], value):
                    raise CheckpointError(
                        f"the checkpoint has {key}={options[key]!r} for group {index} of the optimizer, but the "
                        f"optimizer has {key}={value!r}. The two values have different types, so the file may have "
                        "been changed. Load another checkpoint, or load with optimizer=None.",
                        code="C083",
                    )
            saved = next((record.optimizer for record in records if record.optimizer not in (None, kind)), None)
            if saved is not None and saved not in bases:
                raise CheckpointError(
                    f"the checkpoint has the state of {saved}, but this optimizer is {kind}, which has a different "
                    f"update rule. Load with {saved}, or with optimizer=None to start with fresh state.",
                    code="C083",
                )
            base = saved or base

            kept = {key: group[key] for key in (*_NOT_OPTIONS, *_IMPLEMENTATION) if key in group}
            groups.append({**options, **kept, "params": list(range(number, number + len(parameters)))})
            for parameter in parameters:
                values = self._state_of(parameter, optimizer)
                if values:
                    state[number] = values
                number += 1

        # A subclass may continue with the state of its base class, unless it is seen to keep more state than that.
        if base is not None:
            names = {name for values in state.values() for name in values}
            needed = {name for values in getattr(optimizer, "state", {}).values() for name in values}
            more = sorted(needed - names - {MASTER}) if names else []
            if more:
                raise CheckpointError(
                    f"the checkpoint has the state of {base}, but this optimizer is its subclass {kind}. The "
                    f"subclass also needs the state {listed(more)}. Load with {base}, or with optimizer=None to "
                    "start with fresh state.",
                    code="C083",
                )
            get_dist_logger().warning(
                f"the checkpoint has the state of {base}, and this optimizer is its subclass {kind}. Training "
                f"continues with the state of {base}.",
                ranks=[0],
            )
        if self._rounded:
            get_dist_logger().warning(
                f"the checkpoint has optimizer state of fp32 master weights, for example of {self._rounded[0]}, but "
                f"this optimizer has no master weights. {len(self._rounded)} tensors were rounded to the dtypes of "
                "their parameters.",
                ranks=[0],
            )
        return {"state": state, "param_groups": groups}

    def _state_of(self, parameter: LocalTensor, optimizer: Any) -> dict[str, Any] | None:
        """The state of a parameter on this rank; None if a sharded optimizer keeps all of it on other ranks."""
        shard = None
        if isinstance(optimizer, ShardedOptimizer):
            shard = optimizer.flat_shard(parameter.tensor)
            if shard is None:
                return None
        weight = self._record_of(parameter)
        state: dict[str, Any] = {}
        records = self._records.get(weight.label, ())
        has_master = any(record.state_name == MASTER for record in records)
        for record in records:
            # One value for the full parameter. The name tells `step` from a moment if the parameter has no dimensions, too.
            if record.shape != weight.shape or record.state_name == "step":
                state[record.state_name] = self._reader.full(record)
            elif shard is not None:
                # Only the elements of the shard are read.
                elements = memory_for([shard.stop - shard.start], dtype_of(record))
                for box, view in boxes_in_memory(parameter, shard.start, shard.stop, elements):
                    self._reader.fill(view, box, record)
                state[record.state_name] = elements
            elif record.state_name != MASTER:
                value = self._reader.local(parameter, record)
                if has_master and value.dtype != parameter.local.dtype:
                    # Moments of a master copy have its dtype, but an optimizer of the parameter itself needs the parameter's.
                    self._rounded.append(str(value.dtype))
                    value = value.to(parameter.local.dtype)
                if is_dtensor(parameter.tensor):
                    value = as_dtensor(value.to(parameter.local.device), parameter.tensor)
                state[record.state_name] = value
        return {**state, **self._values.optimizer_state_of(weight.label)}


def _is_alike(key: str, saved: Any, here: Any) -> bool:
    """Whether a saved option can replace this one: both numbers, or both strings. None replaces anything but a learning rate."""
    if saved is None or here is None:
        return key != "lr" or here is None
    if isinstance(here, (list, tuple)):
        fits = isinstance(saved, (list, tuple)) and len(saved) == len(here)
        return fits and all(_is_alike("", *pair) for pair in zip(saved, here, strict=True))
    kinds: tuple[Any, ...] = (bool | int | float | Tensor, str, dict)
    return all(isinstance(saved, kind) for kind in kinds if isinstance(here, kind))


def load_optimizer(optimizer: Any, state_dict: dict[str, Any]) -> None:
    """Call `load_state_dict` of the optimizer, so that its hooks run, but keep state tensors in the dtype in which they were
    saved."""
    optimizer.load_state_dict(state_dict)
    if isinstance(optimizer, ShardedOptimizer):
        return
    # torch's load_state_dict has cast every state tensor to the dtype of its parameter. Undo that.
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, saved in state_dict["state"].items():
        loaded = optimizer.state[parameters[number]]
        for name, value in saved.items():
            if isinstance(value, Tensor) and isinstance(loaded.get(name), Tensor) and loaded[name].dtype != value.dtype:
                loaded[name] = value.to(loaded[name].device)
