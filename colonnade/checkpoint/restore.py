"""Put weights and optimizer state back from a verified checkpoint, reading only the slices that this rank needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from colonnade.checkpoint.boxes import Box, whole_box
from colonnade.checkpoint.locate import EXTRA_STATE, Located
from colonnade.checkpoint.manifest import GroupRecord, Manifest, TensorRecord
from colonnade.checkpoint.match import Matches
from colonnade.checkpoint.optimizer_state import HOW_NOT_WHAT, NOT_OPTIONS, members_of, merged_options
from colonnade.checkpoint.ranges import located_boxes
from colonnade.checkpoint.restore_values import Values
from colonnade.checkpoint.tensors_file import TensorReader
from colonnade.checkpoint.values import encode
from colonnade.errors import CheckpointError, listed
from colonnade.optim.zero.optimizer import ZeroOptimizer
from colonnade.optim.zero.state import MASTER, FlatShard
from colonnade.parallel.placement import is_dtensor


def restore_weights(
    model: nn.Module, places: Sequence[Located], matches: Matches, reader: TensorReader, values: Values
) -> None:
    """Fill every parameter and buffer in place, and give modules the extra state they had."""
    for place in places:
        record = matches.of(place)
        reader.fill(place.piece.local, place.box, record.blocks, record.dtype)
    for name, module in model.named_modules():
        key = f"model/{name}{'.' if name else ''}{EXTRA_STATE}"
        if values.has(key):
            module.set_extra_state(values.get(key))


class OptimizerReader:
    """Reads the options and the state of an optimizer's own parameters, whichever those are on this rank."""

    def __init__(
        self, manifest: Manifest, places: Sequence[Located], matches: Matches, reader: TensorReader, values: Values
    ) -> None:
        if manifest.groups is None:
            raise CheckpointError("the checkpoint was saved without an optimizer; load it with optimizer=None")
        self._groups = manifest.groups
        self._places = {id(place.piece): place for place in places}
        self._matches = matches
        self._reader = reader
        self._values = values
        self._records: dict[str, list[TensorRecord]] = {}
        for record in manifest.tensors:
            if record.slot:
                self._records.setdefault(record.label, []).append(record)

    def state_dict_for(self, optimizer: Any) -> dict[str, Any]:
        """What this optimizer is to load, in torch's format; refuses groups that do not fit."""
        members = members_of(optimizer, [place.piece for place in self._places.values()])
        groups: list[dict[str, Any]] = []
        state: dict[int, dict[str, Any]] = {}
        number = 0
        for index, (group, pieces) in enumerate(zip(optimizer.param_groups, members, strict=True)):
            places = [self._places[id(piece)] for piece in pieces]
            options = self._options(index, group, [self._matches.of(place).label for place in places])
            groups.append({**merged_options(group, options), "params": list(range(number, number + len(places)))})
            for place in places:
                slots = self._slots(place, optimizer)
                if slots:
                    state[number] = slots
                number += 1
        return {"state": state, "param_groups": groups}

    def _options(self, index: int, group: Mapping[str, Any], labels: Sequence[str]) -> dict[str, Any]:
        """The options that these parameters had; for a group without any here, those of the group in its place."""
        records = self._records_of_group(index, labels)
        found = [self._values.decoded(record.options) for record in records]
        if len({encode(options, "options").digest() for options in found}) > 1:
            raise CheckpointError(
                f"group {index} of the optimizer joins parameters that had different options when they were saved: "
                f"{records[0].names[0]} and {records[1].names[0]}. Make the groups as they were."
            )
        options = found[0] if found else {key: value for key, value in group.items() if key not in NOT_OPTIONS}
        unknown = [key for key in group if key not in options and key not in (*NOT_OPTIONS, *HOW_NOT_WHAT)]
        if unknown:
            raise CheckpointError(
                f"group {index} of the optimizer has the options {listed(unknown)}, which the saved one had not: it was "
                f"another kind of optimizer. Load with that kind, or with optimizer=None."
            )
        return options

    def _records_of_group(self, index: int, labels: Sequence[str]) -> list[GroupRecord]:
        wanted = set(labels)
        if not wanted:
            return [record for record in self._groups if record.index == index]
        found = [record for record in self._groups if wanted.intersection(record.names)]
        lost = sorted(wanted.difference(*(record.names for record in found)))
        if lost:
            raise CheckpointError(
                f"the optimizer that was saved did not have {listed(lost[:5])}, which group {index} has; make the groups "
                f"as they were, or load with optimizer=None"
            )
        return found

    def _slots(self, place: Located, optimizer: Any) -> dict[str, Any]:
        weight = self._matches.of(place)
        sharded = isinstance(optimizer, ZeroOptimizer) and optimizer.shards(place.piece.tensor)
        shard = optimizer.flat_shard(place.piece.tensor) if sharded else None
        if sharded and shard is None:  # all of it is other ranks'
            return {}
        slots: dict[str, Any] = {}
        for record in self._records.get(weight.label, ()):
            like = record.shape == weight.shape and record.slot != "step"
            if like and shard is not None:
                slots[record.slot] = self._shard(place, shard, record)
            elif like and record.slot != MASTER:
                value = self._reader.new(place.box, record.blocks, record.dtype)
                slots[record.slot] = _as_parameter(value, place.piece.tensor)
            elif not like:
                slots[record.slot] = self._reader.new(whole_box(record.shape), record.blocks, record.dtype)
        slots.update(self._values.slots_of(weight.label))
        return slots

    def _shard(self, place: Located, shard: FlatShard, record: TensorRecord) -> Tensor:
        """Just the elements of the shard."""
        values = self._reader.new(Box((0,), (shard.stop - shard.start,)), (), record.dtype)
        for box, view in located_boxes(place, shard.start, shard.stop, values):
            self._reader.fill(view, box, record.blocks, record.dtype)
        return values


def load_optimizer(optimizer: Any, state_dict: dict[str, Any]) -> None:
    """Load it by the optimizer's own method, so that its hooks run; every moment keeps the type it was saved with."""
    optimizer.load_state_dict(state_dict)
    _keep_types(optimizer, state_dict["state"])


def _as_parameter(value: Tensor, parameter: Any) -> Tensor:
    """A DTensor around this rank's part where the parameter is one."""
    if not is_dtensor(parameter):
        return value
    # Imported here: it costs those who have no DTensors two seconds.
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        value.to(parameter.to_local().device),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _keep_types(optimizer: Any, state: Mapping[int, Mapping[str, Any]]) -> None:
    """Undo the cast of `load_state_dict`, which gives every moment the type of its parameter."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, slots in state.items():
        held = optimizer.state[parameters[number]]
        for name, value in slots.items():
            if isinstance(value, Tensor) and isinstance(held.get(name), Tensor) and held[name].dtype != value.dtype:
                held[name] = value.to(held[name].device)
