"""SavePlan: the pieces of tensors that one rank gives, and what it tells the others of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from colonnade.checkpoint.format.boxes import Box, boxes_in_order, whole_box
from colonnade.checkpoint.format.entries import Entry, memory_for, type_name
from colonnade.checkpoint.format.manifest import ItemRecord, tensors_file
from colonnade.checkpoint.format.values import Encoded
from colonnade.checkpoint.plan.notes import Outline, RankNote, entry_key
from colonnade.checkpoint.plan.tensors import LocalTensor, boxes_in_memory, memory_order
from colonnade.parallel.shards import FlatShard


@dataclass
class SavePlan:
    """What one rank writes: its note, and the tensors for its file."""

    note: RankNote
    entries: list[Entry] = field(default_factory=list)
    _pieces: dict[tuple[Outline, int, int], list[tuple[str, str]]] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """The bytes of its tensors."""
        return sum(entry.size for entry in self.entries)

    def copy_to_host(self) -> None:
        """Copy every tensor to the host now, so that training may go on while they are written."""
        copies = [(entry.key, _host_copy(entry.read())) for entry in self.entries]
        if torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()
        self.entries = [Entry.of(key, copy) for key, copy in copies]

    def add_box(self, outline: Outline, box: Box, state_name: str, value: Tensor, writes: bool) -> None:
        """A tensor that the rank knows of, and the box of it that it writes, if any: some rows of the outline's."""
        start, stop = (box.offset[0], box.stop[0]) if box.shape else (0, 1)
        self.add(outline, start, stop if writes and box.numel else start, state_name, value)

    def add(self, outline: Outline, start: int, stop: int, state_name: str, value: Tensor) -> None:
        """What the rank writes of a tensor, from `start` to `stop` of its outline. A `state_name` is the optimizer's."""
        key = entry_key(outline.label, state_name, outline.section)
        self.add_entry(outline, start, stop, state_name, Entry.of(key, value))

    def add_entry(self, outline: Outline, start: int, stop: int, state_name: str, entry: Entry) -> None:
        """As `add`, with an entry whose content may be asked for later."""
        self._pieces.setdefault((outline, start, stop), []).append((state_name, entry.dtype))
        if start < stop:
            self.entries.append(entry)

    def close(self) -> None:
        """Put all tensors into the note: those that are cut alike are one outline."""
        for (outline, start, stop), states in self._pieces.items():
            self.note.add(replace(outline, states=tuple(states)), start, stop)

    def add_item(self, name: str, ranks: tuple[int, ...], item: Encoded) -> ItemRecord:
        """The record of a value, whose tensors the rank writes."""
        file = tensors_file(self.note.rank) if item.tensors else None
        record = ItemRecord(name, ranks, item.value, len(item.tensors), file, key=name)
        self.entries += [Entry.of(record.entry(at), tensor) for at, tensor in enumerate(item.tensors)]
        return record


def plan_weight(plan: SavePlan, tensor: LocalTensor, value: Tensor) -> None:
    """What this rank gives of a weight or buffer; `value` is what it holds of it."""
    writes = tensor.holders[0] == plan.note.rank
    if writes or next(iter(tensor.sharers)) == plan.note.rank or tensor.placement.tied is not None:
        plan_pieces(plan, tensor, tensor.names, "", value, writes)


def plan_pieces(
    plan: SavePlan, tensor: LocalTensor, names: tuple[str, ...], state_name: str, value: Tensor, writes: bool
) -> None:
    """Of a `value` that lies as `tensor` does, a piece for each of its places."""
    for number, (box, view) in enumerate(tensor.pieces(value)):
        outline = replace(Outline.of_rows(tensor.label, names, tensor.shape, box), section=number)
        plan.add_box(outline, box, state_name, view, writes)


def plan_shard(plan: SavePlan, tensor: LocalTensor, shard: FlatShard, state_name: str, value: Tensor) -> None:
    """Of the elements of a shard, those of each place: in the place, too, they follow each other."""
    order, local = memory_order(tensor.local), whole_box(tensor.local.shape)
    for number, (box, here) in enumerate(tensor.places):
        outline = Outline(tensor.label, (), tensor.shape, box.offset, box.shape, order, section=number)
        if len(tensor.places) == 1:
            plan.add(outline, shard.start, shard.stop, state_name, value)
            continue
        start, stop = (_shared_with_first(here, end, local, order) for end in (shard.start, shard.stop))
        key = entry_key(tensor.label, state_name, number)
        read = partial(_elements_at, tensor, shard, value, box)
        plan.add_entry(outline, start, stop, state_name, Entry(key, type_name(value, key), (stop - start,), read))


def _shared_with_first(here: Box, count: int, local: Box, order: Sequence[int]) -> int:
    """How many of the first `count` elements of a local part are in the box `here` of it."""
    shared = (here.shared_with(filled) for filled in boxes_in_order(0, count, local, order))
    return sum(box.numel for box in shared if box is not None)


def _elements_at(tensor: LocalTensor, shard: FlatShard, value: Tensor, box: Box) -> Tensor:
    """Those elements of a shard that lie in this box of the whole, in order."""
    order = memory_order(tensor.local)
    found = boxes_in_memory(tensor, shard.start, shard.stop, value)
    return torch.cat([view.permute(order).flatten() for part, view in found if part.shared_with(box) is not None])


def _host_copy(tensor: Tensor) -> Tensor:
    copy = memory_for(tensor.shape, tensor.dtype, pinned=tensor.is_cuda)
    return copy.copy_(tensor.detach(), non_blocking=tensor.is_cuda)
