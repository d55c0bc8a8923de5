"""What one rank writes of a checkpoint: each distinct block once, by the first of the ranks that hold it."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from colonnade.checkpoint.boxes import whole_box
from colonnade.checkpoint.locate import Located, Piece, locate, model_items, survey, uneven_sizes
from colonnade.checkpoint.manifest import Block, ItemRecord
from colonnade.checkpoint.optimizer_state import Group, Slot, read_groups, read_slots
from colonnade.checkpoint.parts import BlockNote, GroupNote, Part, rank_file
from colonnade.checkpoint.ranges import located_boxes
from colonnade.checkpoint.tensors_file import Entry, given, type_name
from colonnade.checkpoint.values import Encoded, encode
from colonnade.context.parallel_context import ParallelContext
from colonnade.parallel.dtensor import local_part

RANDOM = "random"


@dataclass(frozen=True, eq=False)
class Contents:
    """The state of this rank: its model, its optimizer, and everything that is a value."""

    pieces: list[Piece]
    slots: list[Slot]
    groups: list[Group] | None
    items: dict[str, Encoded]

    def note(self) -> dict[str, Any]:
        """What the other ranks must know, to agree with this one on who writes what."""
        stepped = {slot.piece.label for slot in self.slots}
        members = {piece.label: piece.label in stepped for group in self.groups or () for piece in group.members}
        return {
            "sizes": uneven_sizes(self.pieces),
            "optimizer": members,
            "items": {name: item.digest() for name, item in self.items.items()},
        }


@dataclass(eq=False)
class RankPart:
    """What this rank writes: the notes for the manifest, and the tensors for its file."""

    part: Part
    entries: list[Entry] = field(default_factory=list)

    @property
    def size(self) -> int:
        """The bytes of its tensors."""
        return sum(entry.size for entry in self.entries)

    def on_host(self) -> None:
        """Copy every tensor to the host now, so that training may go on while they are written."""
        copies = [_host_copy(entry.read()) for entry in self.entries]
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()
        self.entries = [
            Entry(entry.key, entry.dtype, entry.shape, given(copy))
            for entry, copy in zip(self.entries, copies, strict=True)
        ]


def contents_of(
    model: nn.Module, optimizer: Any, extra: Mapping[str, Any] | None, context: ParallelContext
) -> Contents:
    """Look at everything that is to be saved; refuses what a checkpoint cannot hold. This rank alone."""
    pieces = survey(model, context)
    for piece in pieces:
        type_name(piece.local, piece.names[0])
    items = {RANDOM: encode(random_state(context), "the random state")}
    for name, value in model_items(model).items():
        items[f"model/{name}"] = encode(value, f"the model's {name}")
    for name, value in (extra or {}).items():
        state = value.state_dict() if has_state(value) else value
        items[f"extra/{name}"] = encode(state, f"extra[{name!r}]")
    slots = read_slots(optimizer, pieces) if optimizer is not None else []
    groups = read_groups(optimizer, pieces) if optimizer is not None else None
    return Contents(pieces, slots, groups, items)


def has_state(value: Any) -> bool:
    """Whether it is an object that gives and takes its state, rather than a plain value."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def random_state(context: ParallelContext) -> dict[str, Any]:
    """Every random stream of this rank, and Python's own."""
    version, numbers, gauss = random.getstate()
    return {"streams": context.streams.state_dict(), "python": (version, torch.tensor(numbers), gauss)}


def set_random_state(state: Mapping[str, Any], context: ParallelContext) -> None:
    """Put back what `random_state` gave."""
    context.streams.load_state_dict(state["streams"])
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss))


def part_of(contents: Contents, notes: list[dict[str, Any]], context: ParallelContext) -> RankPart:
    """What this rank writes, now that every rank's note is known. Pure; the same choice on every rank."""
    rank = context.get_global_rank()
    mine = RankPart(Part(rank, saves_optimizer=contents.groups is not None))
    located = locate(contents.pieces, [note["sizes"] for note in notes], context)
    for place in located:
        _add_weight(mine, place)
    places = {id(place.piece): place for place in located}
    for slot in contents.slots:
        _add_slot(mine, slot, places[id(slot.piece)], notes)
    for group in contents.groups or ():
        _add_group(mine, group, notes)
    for name, item in contents.items.items():
        ranks = [at for at, note in enumerate(notes) if note["items"].get(name) == notes[rank]["items"][name]]
        if ranks[0] == rank:
            mine.part.items.append(_add_item(mine, name, tuple(ranks), item))
    return mine


def _add_weight(mine: RankPart, place: Located) -> None:
    piece, rank = place.piece, mine.part.rank
    writes = piece.holders[0] == rank and place.box.numel > 0
    if writes or piece.sharers[0] == rank or piece.placement.tied is not None:
        key = f"model/{piece.label}"
        _add_block(mine, place, "", key, piece.local, writes, piece.names)


def _add_slot(mine: RankPart, slot: Slot, place: Located, notes: list[dict[str, Any]]) -> None:
    piece, rank = slot.piece, mine.part.rank
    stepped = [other for other in piece.sharers if notes[other]["optimizer"].get(piece.label)]
    key = f"optimizer/{slot.name}/{piece.label}"
    if not isinstance(slot.value, Tensor):
        if stepped[0] == rank:
            mine.part.items.append(_add_item(mine, key, (rank,), encode(slot.value, slot.what)))
        return
    value = local_part(slot.value).detach()
    type_name(value, slot.what)
    if slot.like and slot.shard is not None:
        _add_shard(mine, slot, place, key, value)
    elif slot.like:
        writes = next(other for other in stepped if other in piece.holders) == rank and place.box.numel > 0
        if writes or stepped[0] == rank:
            _add_block(mine, place, slot.name, key, value, writes)
    elif stepped[0] == rank:
        shape = tuple(value.shape)
        _add_block(mine, Located(piece, shape, whole_box(shape)), slot.name, key, value, writes=bool(value.numel()))


def _add_shard(mine: RankPart, slot: Slot, place: Located, key: str, value: Tensor) -> None:
    """The boxes of a shard, if this rank shares the parameter with the first of all that hold it."""
    shard = slot.shard
    if shard is None or place.piece.holders[0] not in shard.ranks:
        return
    for at, (box, part) in enumerate(located_boxes(place, shard.start, shard.stop, value)):
        _add_block(mine, Located(place.piece, place.shape, box), slot.name, f"{key}/{at}", part, writes=True)


def _add_block(
    mine: RankPart, place: Located, slot: str, key: str, local: Tensor, writes: bool, names: tuple[str, ...] = ()
) -> None:
    dtype = type_name(local, key)
    block = Block(rank_file(mine.part.rank), key, place.box.offset, place.box.shape) if writes else None
    mine.part.blocks.append(BlockNote(place.piece.label, slot, names, place.shape, dtype, block))
    if writes:
        mine.entries.append(Entry(key, dtype, place.box.shape, given(local)))


def _add_group(mine: RankPart, group: Group, notes: list[dict[str, Any]]) -> None:
    rank = mine.part.rank
    named = [
        piece.label
        for piece in group.members
        if rank == next(other for other in piece.sharers if piece.label in notes[other]["optimizer"])
    ]
    if named:
        name = f"optimizer/options/{group.index}"
        options = _add_item(mine, name, (rank,), group.options)
        mine.part.groups.append(GroupNote(group.index, tuple(named), group.options.digest(), options))


def _add_item(mine: RankPart, name: str, ranks: tuple[int, ...], item: Encoded) -> ItemRecord:
    file = rank_file(mine.part.rank) if item.tensors else None
    record = ItemRecord(name, ranks, item.value, len(item.tensors), file, key=name)
    for at, tensor in enumerate(item.tensors):
        mine.entries.append(Entry(record.entry(at), type_name(tensor, name), tuple(tensor.shape), given(tensor)))
    return record


def _host_copy(tensor: Tensor) -> Tensor:
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return copy.copy_(tensor.detach(), non_blocking=tensor.is_cuda)
