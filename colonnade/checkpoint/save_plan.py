"""The plan of a save: each distinct block is written once, by the first rank that stores it. And the merge of all ranks' notes.

`LocalState` is the state of this rank. From the summaries of all ranks, `plan_save` makes this rank's `SavePlan`: the tensors of
its file and, as a `RankNote`, their description for rank 0. `merge_tensors` and `merge_groups` turn the notes of all ranks into
the records of the manifest.

A thousand ranks may each write a piece of a thousand tensors. A note therefore describes a tensor, and the part of the tensor
that the ranks share out, by a line of text that is identical on every rank and is parsed once for all of them. A rank adds
two numbers for each line: where its own piece starts and stops in that part.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, pairwise
from operator import lt
from typing import Any

import torch
from torch import Tensor, nn

from colonnade.checkpoint.manifest import (
    Cut,
    Damaged,
    FileRecord,
    GroupRecord,
    ItemRecord,
    TensorPart,
    TensorRecord,
    check_tiled,
    from_json,
    tensors_file,
    to_json,
)
from colonnade.checkpoint.optimizer_state import read_groups, read_state
from colonnade.checkpoint.tensor_files import FileEntry, memory_for
from colonnade.checkpoint.values import BUFFER, RANDOM, Encoded, encode, is_stateful
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.random import random_state
from colonnade.errors import CheckpointError
from colonnade.parallel.boxes import Box, boxes_in_order, full_box
from colonnade.parallel.dtensor import local_part
from colonnade.parallel.flat import FlatShard
from colonnade.parallel.whole import LocalTensor, boxes_in_memory, extra_states, memory_order

# --- The state of this rank, and its share of the save ---


class LocalState:
    """The state of this rank: tensors of the model, optimizer state, and plain values. Raises for values that cannot be saved."""

    def __init__(
        self,
        tensors: Sequence[LocalTensor],
        model: nn.Module,
        optimizer: Any,
        extra: Mapping[str, Any] | None,
        context: ParallelContext,
    ) -> None:
        self.tensors = tensors
        self.buffers = [
            (tensor, encode(tensor.local, tensor.label))
            for tensor in tensors
            if len(tensor.holders) > 1 and not isinstance(tensor.tensor, nn.Parameter)
        ]
        self.items = {RANDOM: encode(random_state(context), "the random state")}
        for name, value in extra_states(model).items():
            self.items[f"model/{name}"] = encode(value, f"the model's {name}")
        for name, value in (extra or {}).items():
            state = value.state_dict() if is_stateful(value) else value
            self.items[f"extra/{name}"] = encode(state, f"extra[{name!r}]")
        self.optimizer = read_state(optimizer, tensors) if optimizer is not None else []
        self.groups = read_groups(optimizer, tensors) if optimizer is not None else None

    def note(self) -> dict[str, Any]:
        """A summary for all ranks: which parameters have optimizer state here, and a digest of every value."""
        stepped = {state.parameter.label for state in self.optimizer}
        members = {member.label: member.label in stepped for group in self.groups or () for member in group.members}
        values = [*self.items.items(), *((f"{BUFFER}{tensor.label}", item) for tensor, item in self.buffers)]
        return {"optimizer": members, "items": {name: item.digest() for name, item in values}}


@dataclass
class SavePlan:
    """One rank's share of a save: the tensors of its file, values and parameter groups. Made by `plan_save`.

    Each of `groups` has a digest: groups of equal index and digest are one group. None without an optimizer.
    """

    rank: int
    groups: list[tuple[str, GroupRecord]] | None = None
    items: list[ItemRecord] = field(default_factory=list)
    entries: list[FileEntry] = field(default_factory=list)
    _pieces: dict[tuple[Any, ...], list[TensorRecord]] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """The bytes of all tensors of the plan."""
        return sum(entry.size for entry in self.entries)

    def copy_to_host(self) -> None:
        """Copy every tensor to the host, so that training can continue while the copies are written."""
        copies = []
        for entry in self.entries:
            tensor = entry.read().detach()
            copy = memory_for(tensor.shape, tensor.dtype, pinned=tensor.is_cuda)
            copies.append((entry.key, copy.copy_(tensor, non_blocking=tensor.is_cuda)))
        # One wait for all copies: they run on the stream of the training step.
        if torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()
        self.entries = [FileEntry.of(key, copy) for key, copy in copies]

    def add_piece(self, record: TensorRecord, start: int, stop: int, entry: FileEntry) -> None:
        """Write `entry`, the piece [start, stop) of the one part of `record`; an empty piece only mentions the tensor."""
        (part,) = record.parts
        # Records that are split alike (a parameter's moments) share a line of the note.
        alike = (record.label, record.names, record.shape, part.offset, part.shape, part.order, start, stop)
        self._pieces.setdefault(alike, []).append(record)
        if start < stop:
            self.entries.append(entry)

    def add_rows(
        self,
        label: str,
        names: tuple[str, ...],
        state_name: str,
        shape: tuple[int, ...],
        box: Box,
        entry: FileEntry,
        writes: bool = True,
    ) -> None:
        """Write `entry`, a box of a tensor: a range of rows of the part that spans all rows of the tensor."""
        offset, size = (*(0 for _ in shape[:1]), *box.offset[1:]), (*shape[:1], *box.shape[1:])
        part = TensorPart(offset, size, None, entry.key, cut=0)
        start, stop = (box.offset[0], box.stop[0]) if box.shape else (0, 1)
        record = TensorRecord(label, state_name, names, shape, entry.dtype, (part,))
        self.add_piece(record, start, stop if writes and box.numel else start, entry)

    def add_item(self, name: str, ranks: tuple[int, ...], item: Encoded) -> ItemRecord:
        """The record of a value whose tensors this rank writes."""
        file = tensors_file(self.rank) if item.tensors else None
        record = ItemRecord(name, ranks, item.value, len(item.tensors), file, key=name)
        self.entries += [FileEntry.of(record.entry(at), tensor) for at, tensor in enumerate(item.tensors)]
        return record

    def note(self, file: FileRecord | None) -> RankNote:
        """The note of this rank, whose tensors are in `file`."""
        lines = [json.dumps([to_json(record) for record in records]) + "\n" for records in self._pieces.values()]
        spans = [end for *_, start, stop in self._pieces for end in (start, stop)]
        return RankNote(self.rank, self.groups, "".join(lines), spans, self.items, file)


def plan_save(state: LocalState, notes: Sequence[Mapping[str, Any]], rank: int) -> SavePlan:
    """Choose what this rank writes from the summaries of all ranks (`LocalState.note`).

    Pure: every rank evaluates the same rules on the same summaries, so each block has exactly one writer.
    """
    plan = SavePlan(rank, None if state.groups is None else [])
    for tensor in state.tensors:
        plan_weight(plan, tensor, tensor.local)

    # Optimizer state exists only on ranks whose optimizer has stepped on the parameter: `stepped`, in rank order.
    with_state = [{label for label, stepped in note["optimizer"].items() if stepped} for note in notes]
    for kept in state.optimizer:
        parameter, name = kept.parameter, kept.name
        stepped = [at for at in parameter.sharers if parameter.label in with_state[at]]
        first = stepped[0] == rank
        key = entry_key(parameter.label, name)
        if not isinstance(kept.value, Tensor):
            if first:
                plan.items.append(plan.add_item(key, (rank,), encode(kept.value, str(kept))))
            continue
        value = local_part(kept.value).detach()

        # One value for the full parameter, such as its step count.
        if not kept.like_parameter:
            if first:
                box = full_box(value.shape)
                plan.add_rows(parameter.label, (), name, box.shape, box, FileEntry.of(key, value))
            continue

        # Sharded like the parameter: of the replicas that have state, the first writes it.
        shard = kept.shard
        if shard is None:
            writes = rank == next(at for at in stepped if at in parameter.holders)
            if writes or first:
                _plan_boxes(plan, parameter, (), name, value, writes)
            continue

        # Sharded further by ZeRO, over a group of ranks. Of several such groups (replicas of each other), the one with the first
        # replica writes.
        if parameter.holders[0] in shard.ranks:
            _plan_shard(plan, parameter, shard, name, value)

    # Each member of a parameter group is listed by the first rank whose optimizer has the member.
    for group in state.groups or ():
        names = tuple(
            member.label
            for member in group.members
            if rank == next(at for at in member.sharers if member.label in notes[at]["optimizer"])
        )
        if names and plan.groups is not None:
            options = plan.add_item(f"optimizer/options/{group.index}", (rank,), group.options)
            digest = f"{group.optimizer} {group.options.digest()}"
            plan.groups.append((digest, GroupRecord(group.index, names, options, group.optimizer)))

    # Buffers may differ between replicas (BatchNorm statistics). `plan_weight` writes the first replica's value as the tensor;
    # each other value is written as an item, by the first rank that has it.
    for tensor, item in state.buffers:
        name = f"{BUFFER}{tensor.label}"
        ranks = [at for at in tensor.holders if notes[at]["items"].get(name) == notes[rank]["items"].get(name)]
        if ranks[0] == rank != tensor.holders[0]:
            plan.items.append(plan.add_item(name, tuple(ranks), item))

    # All other values: each distinct one is written by the first rank that has it.
    for name, item in state.items.items():
        ranks = [at for at, note in enumerate(notes) if note["items"].get(name) == notes[rank]["items"][name]]
        if ranks[0] == rank:
            plan.items.append(plan.add_item(name, tuple(ranks), item))
    return plan


def plan_weight(plan: SavePlan, tensor: LocalTensor, value: Tensor) -> None:
    """Plan a weight or buffer, of which this rank stores `value`. The first replica of each block writes the block.

    The note mentions the tensor even without writing it on the first rank that stores any block of it, and on every rank of a
    tied weight (each stage may have another name for the weight).
    """
    writes = tensor.holders[0] == plan.rank
    if writes or tensor.sharers[0] == plan.rank or tensor.placement.tied is not None:
        _plan_boxes(plan, tensor, tensor.names, "", value, writes)


def _plan_boxes(
    plan: SavePlan, tensor: LocalTensor, names: tuple[str, ...], state_name: str, value: Tensor, writes: bool
) -> None:
    """Plan a `value` that is sharded like `tensor`: one entry for each box of the full tensor stored here."""
    for section, (box, view) in enumerate(tensor.pieces(value)):
        entry = FileEntry.of(entry_key(tensor.label, state_name, section), view)
        plan.add_rows(tensor.label, names, state_name, tensor.shape, box, entry, writes)


def _plan_shard(plan: SavePlan, tensor: LocalTensor, shard: FlatShard, state_name: str, value: Tensor) -> None:
    """Plan a ZeRO shard: a range of elements in memory order, and so a range of elements in each section of the tensor, too."""
    order, local = memory_order(tensor.local), full_box(tensor.local.shape)
    for section, (box, box_in_local) in enumerate(tensor.places):
        key = entry_key(tensor.label, state_name, section)
        entry, start, stop = FileEntry.of(key, value), shard.start, shard.stop
        if len(tensor.places) > 1:
            start, stop = (_count_in(box_in_local, end, local, order) for end in (shard.start, shard.stop))
            read = partial(_shard_elements_in, tensor, shard, value, box)
            entry = FileEntry(key, entry.dtype, (stop - start,), read)
        part = TensorPart(box.offset, box.shape, order, key, cut=0)
        record = TensorRecord(tensor.label, state_name, (), tensor.shape, entry.dtype, (part,))
        plan.add_piece(record, start, stop, entry)


def _count_in(box: Box, count: int, local: Box, order: Sequence[int]) -> int:
    """How many of the first `count` elements of a local tensor are in this box of the local tensor."""
    shared = (box.shared_with(filled) for filled in boxes_in_order(0, count, local, order))
    return sum(overlap.numel for overlap in shared if overlap is not None)


def _shard_elements_in(tensor: LocalTensor, shard: FlatShard, value: Tensor, box: Box) -> Tensor:
    """The elements of a shard in this box of the full tensor, in memory order."""
    order = memory_order(tensor.local)
    found = boxes_in_memory(tensor, shard.start, shard.stop, value)
    return torch.cat([view.permute(order).flatten() for part, view in found if part.shared_with(box) is not None])


def entry_key(label: str, state_name: str, section: int = 0) -> str:
    """The key of a tensor, or of one section of a fused tensor, in the file of every rank that writes a piece."""
    name = f"{label} (section {section})" if section else label
    return f"optimizer/{state_name}/{name}" if state_name else f"model/{name}"


# --- The notes of all ranks, merged into the records of the manifest ---


@dataclass(frozen=True)
class RankNote:
    """One rank's additions to the manifest: the pieces it wrote, values, and its file. Made by `SavePlan.note`.

    Each line of `tensors` is a JSON list of `TensorRecord`s that are split alike: a weight, or all state tensors of a parameter.
    Each record has one part, which the ranks share out between them; its `cut` is not set yet. The rank's piece of line n is
    [spans[2n], spans[2n + 1]) of that part; an empty piece only mentions the tensor.
    """

    rank: int
    groups: list[tuple[str, GroupRecord]] | None
    tensors: str = ""
    spans: list[int] = field(default_factory=list)
    items: list[ItemRecord] = field(default_factory=list)
    file: FileRecord | None = None

    def dump(self) -> str:
        """The note as text: one line with everything else, then the lines of `tensors`."""
        return json.dumps(to_json(replace(self, tensors=""))) + "\n" + self.tensors

    @classmethod
    def parse(cls, text: str, where: str) -> RankNote:
        """The inverse of `dump`."""
        head, _, tensors = text.partition("\n")
        return replace(from_json(cls, json.loads(head), where), tensors=tensors)


Pieces = list[int]
"""Pieces of a part as [start, stop, rank, start, stop, rank, ...]: flat, because there may be millions."""


def merge_groups(notes: Sequence[RankNote]) -> tuple[GroupRecord, ...] | None:
    """The parameter groups, or None if no optimizer was saved."""
    if all(note.groups is None for note in notes):
        return None
    found: dict[tuple[int, str], list[GroupRecord]] = {}
    for note in notes:
        for digest, record in note.groups or ():
            found.setdefault((record.index, digest), []).append(record)
    return tuple(
        replace(records[0], names=tuple(dict.fromkeys(name for record in records for name in record.names)))
        for records in (found[key] for key in sorted(found))
    )


def merge_tensors(notes: Sequence[RankNote]) -> tuple[tuple[TensorRecord, ...], tuple[Cut, ...]]:
    """The records of the full tensors, and the table of their cuts (how parts are divided into pieces).

    Raises:
        CheckpointError: ranks disagree about a tensor, or its pieces overlap or leave a gap.
    """
    # Most ranks have identical lines, so each distinct text is split once. The spans of these ranks form a table whose columns,
    # consumed in pairs below, are the starts and the stops of one line on all of the ranks.
    alike: dict[str, list[RankNote]] = {}
    for note in notes:
        alike.setdefault(note.tensors, []).append(note)
    by_line: dict[str, Pieces] = {}
    for lines, same in alike.items():
        columns, ranks = zip(*(note.spans for note in same), strict=True), [note.rank for note in same]
        for line, starts, stops in zip(lines.split("\n")[:-1], columns, columns, strict=True):
            by_line.setdefault(line, []).extend(chain.from_iterable(zip(starts, stops, ranks, strict=True)))

    # A tensor may be on several lines: one for each part, and one for each set of names that stages have for a tied weight.
    cuts = _Cuts([note.rank for note in notes if note.file is not None])
    found: dict[tuple[str, str], list[tuple[TensorRecord, Pieces]]] = {}
    for line, pieces in by_line.items():
        for content in json.loads(line):
            record = from_json(TensorRecord, content, "a rank's note")
            found.setdefault((record.label, record.state_name), []).append((record, pieces))
    records = tuple(_merged(written, cuts) for written in found.values())
    return records, tuple(cuts.table)


def _merged(written: Sequence[tuple[TensorRecord, Pieces]], cuts: _Cuts) -> TensorRecord:
    """The record of a full tensor, from the records and pieces of all ranks."""
    (first, first_pieces), *_ = written
    for record, pieces in written:
        if (record.shape, record.dtype) != (first.shape, first.dtype):
            raise CheckpointError(
                f"ranks do not agree on {first.label}: its full tensor is {first.dtype} of shape {list(first.shape)} on rank "
                f"{first_pieces[2]} and {record.dtype} of {list(record.shape)} on rank {pieces[2]}. Name the modules of a stage "
                f"as in the full model; for uneven shards pass place(..., shape=<full shape>).",
                code="C082",
            )
    by_part: dict[TensorPart, list[Pieces]] = {}
    for record, pieces in written:
        by_part.setdefault(record.parts[0], []).append(pieces)
    parts = []
    for part, of_part in by_part.items():
        for start, stop, cut in cuts.of(of_part):
            # A part whose elements are shared out must be complete, or `check_tiled` raises. Of rows, each run without a gap
            # becomes a part of its own, because other rows of the tensor may be sharded along other dimensions.
            run = part.rows(start, stop) if part.order is None else part.box
            parts.append(replace(part, offset=run.offset, shape=run.shape, cut=cut))
    names = tuple(dict.fromkeys(name for record, _ in written for name in record.names))
    merged = replace(first, names=names, parts=tuple(parts))
    try:
        check_tiled(merged, cuts.table)
    except Damaged as error:
        writers = sorted({rank for _, pieces in written for run in _runs(pieces) for rank in run[2]})
        raise CheckpointError(
            f"{error} (from ranks {', '.join(map(str, writers)) or 'none'}). Either two stages use one name for different "
            f"tensors (name the modules of a stage as in the full model), or the placements are inconsistent.",
            code="C082",
        ) from None
    return merged


class _Cuts:
    """The table of distinct cuts."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._files = {rank: at for at, rank in enumerate(ranks)}
        self._known: dict[tuple[int, ...], list[tuple[int, int, int]]] = {}
        self._numbers: dict[Cut, int] = {}
        self.table: list[Cut] = []

    def of(self, written: Sequence[Pieces]) -> list[tuple[int, int, int]]:
        """(start, stop, number of the cut) of every run of adjacent pieces."""
        same = tuple(map(id, written))  # a parameter's moments share their list of pieces, which is examined once
        if same not in self._known:
            self._known[same] = [self._cut(*run) for run in _runs([number for pieces in written for number in pieces])]
        return self._known[same]

    def _cut(self, starts: Sequence[int], stops: Sequence[int], ranks: Sequence[int]) -> tuple[int, int, int]:
        first, last = starts[0], stops[-1]
        cut = Cut(tuple(stop - first for stop in stops), tuple(map(self._files.__getitem__, ranks)))
        if cut not in self._numbers:
            self._numbers[cut] = len(self.table)
            self.table.append(cut)
        return first, last, self._numbers[cut]


def _runs(pieces: Pieces) -> list[tuple[Sequence[int], Sequence[int], Sequence[int]]]:
    """Starts, stops and ranks of every run of adjacent pieces, without the empty pieces."""
    starts, stops, ranks = pieces[::3], pieces[1::3], pieces[2::3]
    # The usual case, of up to millions of pieces, needs no sorting.
    if starts[1:] == stops[:-1] and all(map(lt, starts, stops)):
        return [(starts, stops, ranks)]
    filled = sorted(piece for piece in zip(starts, stops, ranks, strict=True) if piece[0] < piece[1])
    ends = [at for at in range(1, len(filled)) if filled[at][0] != filled[at - 1][1]]
    runs = [filled[first:last] for first, last in pairwise([0, *ends, len(filled)])] if filled else []
    return [(starts, stops, ranks) for starts, stops, ranks in (zip(*run, strict=True) for run in runs)]
