"""SavePlan: what one rank writes. Each distinct block is written once, by the first of the ranks that hold it.

Then every rank's note of what it wrote makes one manifest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from colonnade.checkpoint.format.boxes import Box, whole_box
from colonnade.checkpoint.format.manifest import (
    Block,
    FileRecord,
    GroupRecord,
    ItemRecord,
    TensorRecord,
    check_tiled,
    tensors_file,
)
from colonnade.checkpoint.format.records import Damaged
from colonnade.checkpoint.format.tensors import Entry, type_name
from colonnade.checkpoint.format.values import Encoded, encode, is_stateful
from colonnade.checkpoint.plan.optimizer import ParameterGroup, ParameterState, read_groups, read_state
from colonnade.checkpoint.plan.tensors import LocalTensor, boxes_in_memory, extra_states
from colonnade.checkpoint.plan.values import RANDOM
from colonnade.checkpoint.random_state import random_state
from colonnade.context.parallel_context import ParallelContext
from colonnade.errors import CheckpointError
from colonnade.parallel.dtensor import local_part


class LocalState:
    """The state of this rank: its model, its optimizer, and everything that is a value. Refuses what cannot be saved."""

    def __init__(
        self,
        tensors: Sequence[LocalTensor],
        model: nn.Module,
        optimizer: Any,
        extra: Mapping[str, Any] | None,
        context: ParallelContext,
    ) -> None:
        self.tensors = tensors
        for tensor in tensors:
            type_name(tensor.local, tensor.names[0])
        self.items = {RANDOM: encode(random_state(context), "the random state")}
        for name, value in extra_states(model).items():
            self.items[f"model/{name}"] = encode(value, f"the model's {name}")
        for name, value in (extra or {}).items():
            state = value.state_dict() if is_stateful(value) else value
            self.items[f"extra/{name}"] = encode(state, f"extra[{name!r}]")
        self.optimizer = read_state(optimizer, tensors) if optimizer is not None else []
        self.groups = read_groups(optimizer, tensors) if optimizer is not None else None

    def note(self) -> dict[str, Any]:
        """What the other ranks must know, to agree with this one on who writes what."""
        stepped = {state.parameter.label for state in self.optimizer}
        members = {one.label: one.label in stepped for group in self.groups or () for one in group.members}
        return {"optimizer": members, "items": {name: item.digest() for name, item in self.items.items()}}


@dataclass
class RankNote:
    """All that one rank adds to the manifest: tensors with the blocks that it wrote, if any, values, and its file.

    `groups` come with the digest of their options: those of equal index and digest are one. None: no optimizer.
    """

    rank: int
    groups: list[tuple[str, GroupRecord]] | None
    tensors: list[TensorRecord] = field(default_factory=list)
    items: list[ItemRecord] = field(default_factory=list)
    file: FileRecord | None = None


@dataclass
class SavePlan:
    """What one rank writes: its note, and the tensors for its file."""

    note: RankNote
    entries: list[Entry] = field(default_factory=list)

    @property
    def size(self) -> int:
        """The bytes of its tensors."""
        return sum(entry.size for entry in self.entries)

    def copy_to_host(self) -> None:
        """Copy every tensor to the host now, so that training may go on while they are written."""
        copies = [(entry.key, _host_copy(entry.read())) for entry in self.entries]
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()
        self.entries = [Entry.of(key, copy) for key, copy in copies]

    def add_tensor(self, record: TensorRecord, key: str, box: Box, local: Tensor, writes: bool) -> None:
        """A tensor that the rank knows of, and the block of it that it writes."""
        if writes:
            block = Block(tensors_file(self.note.rank), key, box.offset, box.shape)
            record = replace(record, blocks=(block,))
            self.entries.append(Entry.of(key, local))
        self.note.tensors.append(record)

    def add_item(self, name: str, ranks: tuple[int, ...], item: Encoded) -> ItemRecord:
        """The record of a value, whose tensors the rank writes."""
        file = tensors_file(self.note.rank) if item.tensors else None
        record = ItemRecord(name, ranks, item.value, len(item.tensors), file, key=name)
        self.entries += [Entry.of(record.entry(at), tensor) for at, tensor in enumerate(item.tensors)]
        return record


def plan_save(state: LocalState, notes: Sequence[Mapping[str, Any]], rank: int) -> SavePlan:
    """What this rank writes, now that every rank's note is known. Pure; the same choice on every rank."""
    plan = SavePlan(RankNote(rank, None if state.groups is None else []))
    for tensor in state.tensors:
        _plan_weight(plan, tensor)
    with_state = [{label for label, stepped in note["optimizer"].items() if stepped} for note in notes]
    for kept in state.optimizer:
        _plan_optimizer(plan, kept, [at for at in kept.parameter.sharers if kept.parameter.label in with_state[at]])
    for group in state.groups or ():
        _plan_group(plan, group, [note["optimizer"] for note in notes])
    for name, item in state.items.items():
        ranks = [at for at, note in enumerate(notes) if note["items"].get(name) == notes[rank]["items"][name]]
        if ranks[0] == rank:
            plan.note.items.append(plan.add_item(name, tuple(ranks), item))
    return plan


def _plan_weight(plan: SavePlan, tensor: LocalTensor) -> None:
    writes = tensor.holders[0] == plan.note.rank and tensor.box.numel > 0
    if writes or tensor.sharers[0] == plan.note.rank or tensor.placement.tied is not None:
        key = f"model/{tensor.label}"
        record = TensorRecord(tensor.label, "", tensor.names, tensor.shape, type_name(tensor.local, key), ())
        plan.add_tensor(record, key, tensor.box, tensor.local, writes)


def _plan_optimizer(plan: SavePlan, kept: ParameterState, stepped: Sequence[int]) -> None:
    """`stepped` are the ranks that keep state for the parameter."""
    parameter, first = kept.parameter, stepped[0] == plan.note.rank
    key = f"optimizer/{kept.name}/{parameter.label}"
    if not isinstance(kept.value, Tensor):
        if first:
            plan.note.items.append(plan.add_item(key, (plan.note.rank,), encode(kept.value, str(kept))))
        return
    value = local_part(kept.value).detach()
    record = TensorRecord(parameter.label, kept.name, (), parameter.shape, type_name(value, str(kept)), ())
    if not kept.like_parameter:
        if first:
            box = whole_box(value.shape)
            plan.add_tensor(replace(record, shape=box.shape), key, box, value, writes=box.numel > 0)
    elif kept.shard is None:
        holder = next(at for at in stepped if at in parameter.holders)
        writes = holder == plan.note.rank and parameter.box.numel > 0
        if writes or first:
            plan.add_tensor(record, key, parameter.box, value, writes)
    elif parameter.holders[0] in kept.shard.ranks:  # the team of the first of all that hold the parameter
        boxes = boxes_in_memory(parameter, kept.shard.start, kept.shard.stop, value)
        for at, (box, part) in enumerate(boxes):
            plan.add_tensor(record, f"{key}/{at}", box, part, writes=True)


def _plan_group(plan: SavePlan, group: ParameterGroup, members: Sequence[Mapping[str, bool]]) -> None:
    """Each member is named by the first rank whose optimizer has it; `members` are those of every rank."""
    names = tuple(
        one.label
        for one in group.members
        if plan.note.rank == next(at for at in one.sharers if one.label in members[at])
    )
    if names and plan.note.groups is not None:
        options = plan.add_item(f"optimizer/options/{group.index}", (plan.note.rank,), group.options)
        plan.note.groups.append((group.options.digest(), GroupRecord(group.index, names, options)))


def _host_copy(tensor: Tensor) -> Tensor:
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return copy.copy_(tensor.detach(), non_blocking=tensor.is_cuda)


def merge_tensors(notes: Sequence[RankNote]) -> tuple[TensorRecord, ...]:
    """The whole tensors; refuses one that ranks see differently, or whose blocks overlap or leave a gap."""
    found: dict[tuple[str, str], list[tuple[int, TensorRecord]]] = {}
    for note in notes:
        for record in note.tensors:
            found.setdefault((record.label, record.state_name), []).append((note.rank, record))
    return tuple(map(_merged, found.values()))


def merge_groups(notes: Sequence[RankNote]) -> tuple[GroupRecord, ...] | None:
    """The parameter groups, or None where no optimizer was saved."""
    if all(note.groups is None for note in notes):
        return None
    found: dict[tuple[int, str], list[GroupRecord]] = {}
    for note in notes:
        for digest, record in note.groups or ():
            found.setdefault((record.index, digest), []).append(record)
    return tuple(
        replace(records[0], names=tuple(dict.fromkeys(name for record in records for name in record.names)))
        for _, records in sorted(found.items(), key=lambda pair: pair[0])
    )


def _merged(told: Sequence[tuple[int, TensorRecord]]) -> TensorRecord:
    """One tensor from what (rank, record) each rank said of it."""
    first_rank, first = told[0]
    for rank, record in told:
        if (record.shape, record.dtype) != (first.shape, first.dtype):
            raise CheckpointError(
                f"ranks do not agree on {first.label}: rank {first_rank} has {first.dtype} of shape {list(first.shape)} as "
                f"a whole, rank {rank} has {record.dtype} of {list(record.shape)}. Stages must have the names of the "
                f"whole model; uneven shards need place(..., shape=<whole shape>)."
            )
    names = tuple(dict.fromkeys(name for _, record in told for name in record.names))
    merged = replace(first, names=names, blocks=tuple(block for _, record in told for block in record.blocks))
    try:
        check_tiled(merged)
    except Damaged as error:
        writers = ", ".join(str(rank) for rank, record in told if record.blocks)
        raise CheckpointError(
            f"{error} (from ranks {writers or 'none'}). Two stages may use one name for different tensors (stages must "
            f"have the names of the whole model), or the placements do not add up."
        ) from None
    return merged
