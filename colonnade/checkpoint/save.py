"""Saving a checkpoint: the plan of each rank's writes, `save_checkpoint`, `StorageWriter` for the disk, `BackgroundSave` for the
thread.

The plan: each distinct block is written once, by the first rank that stores the block. `LocalState` is the state of this rank.
From the summaries of all ranks, `plan_save` makes this rank's `SavePlan`: the tensors of its file and, as a `RankNote`, their
description for rank 0. `merge_tensors` and `merge_groups` turn the notes of all ranks into the records of the manifest.

A thousand ranks may each write a piece of a thousand tensors. A note therefore describes a tensor, and the part of the tensor
that the ranks divide among them, by a line of text that is identical on every rank and is parsed only once. A rank adds two
numbers for each line: the start and the stop of its own piece in this part.

The write order of a save of step 100:

1. Rank 0 deletes the staging folders of interrupted saves, checks the free space and creates `.tmp-100-<nonce>`.
2. Each rank writes its tensors to `rank-<n>.safetensors` in that folder, syncs the file and checks that it opens.
3. Each rank writes its note, `rank-<n>.part`, which lists the tensor pieces in its file.
4. Once all notes exist, rank 0 reads and deletes them and writes `manifest.json` (size and hash of every file, and a digest of
   the manifest itself), syncs it, and reads the checkpoint back as a load would.
5. Rank 0 syncs the folder, renames it to `step-00000100`, and syncs the run's folder.
6. Rank 0 deletes all checkpoints except the newest. Each is first renamed to `.tmp-...`, so no checkpoint is ever incomplete.

If the job is killed before the rename in step 5, a `.tmp-` folder remains, which loads ignore and the next save deletes. If it is
killed after the rename, every byte of the checkpoint is on disk. Earlier checkpoints do not change before step 6. The run's lock
(`run.lock`) is taken when the manager is opened, not in this file.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, pairwise
from operator import lt
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from colonnade.checkpoint.manifest import (
    Cut,
    Damaged,
    FileRecord,
    GroupRecord,
    ItemRecord,
    LayoutRecord,
    Manifest,
    TensorPart,
    TensorRecord,
    check_tiled,
    from_json,
    tensors_file,
    to_json,
)
from colonnade.checkpoint.optimizer_state import read_groups, read_state
from colonnade.checkpoint.storage import (
    check_space,
    clean,
    discard,
    fault_point,
    megabytes,
    no_space_errors,
    publish,
    retire,
    staging_name,
    verify,
    write_at_once,
    write_manifest,
)
from colonnade.checkpoint.tensor_files import FileEntry, memory_for, write_tensors
from colonnade.checkpoint.values import BUFFER, RANDOM, Encoded, encode, is_stateful
from colonnade.comm.messages import agree, gather_from_all
from colonnade.constants import SAVED
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.random import random_state
from colonnade.errors import CheckpointError, as_checkpoint_errors, listed
from colonnade.logging import get_dist_logger
from colonnade.parallel.boxes import Box, boxes_in_order, full_box
from colonnade.parallel.flat import FlatShard
from colonnade.parallel.placement import local_part
from colonnade.parallel.whole import LocalTensor, boxes_in_memory, extra_states, locate_tensors, memory_order

save_checks: weakref.WeakKeyDictionary[nn.Module, Callable[[], Callable[[], None] | None]] = weakref.WeakKeyDictionary()
"""Per model, a weak reference to a check that all ranks call before a save; the check raises if the model must not be saved."""


@contextmanager
def agreed(context: ParallelContext, doing: str) -> Iterator[None]:
    """Run the block on every rank; an error on one rank is raised as a CheckpointError on all ranks.

    Collective at the end of the block.

    The block must not communicate: a rank that fails inside it proceeds directly to the agreement.
    """
    with agree(context), as_checkpoint_errors(doing):
        yield


# --- The state of this rank, and its share of the save ---


class LocalState:
    """The state that this rank saves: tensors of the model, optimizer state, and plain values.

    Raises for values that cannot be saved.
    """

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

    `groups` has the parameter groups with a digest each: groups of different ranks with equal index and digest are the same
    group. None without an optimizer.
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
        """Plan to write `entry`, the piece [start, stop) of the single part of `record`.

        An empty piece only adds the record to the note.
        """
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
        """Plan to write `entry`, a box of a tensor, as a range of rows of the part that spans all rows of the tensor."""
        offset, size = (*(0 for _ in shape[:1]), *box.offset[1:]), (*shape[:1], *box.shape[1:])
        part = TensorPart(offset, size, None, entry.key, cut=0)
        start, stop = (box.offset[0], box.stop[0]) if box.shape else (0, 1)
        record = TensorRecord(label, state_name, names, shape, entry.dtype, (part,))
        self.add_piece(record, start, stop if writes and box.numel else start, entry)

    def add_item(self, name: str, ranks: tuple[int, ...], item: Encoded) -> ItemRecord:
        """Plan to write the tensors of a plain value, and return the record of the value."""
        file = tensors_file(self.rank) if item.tensors else None
        record = ItemRecord(name, ranks, item.value, len(item.tensors), file, key=name)
        self.entries += [FileEntry.of(record.entry(at), tensor) for at, tensor in enumerate(item.tensors)]
        return record

    def note(self, file: FileRecord | None) -> RankNote:
        """Make the note of this rank; `file` is the file with its tensors."""
        lines = [json.dumps([to_json(record) for record in records]) + "\n" for records in self._pieces.values()]
        spans = [end for *_, start, stop in self._pieces for end in (start, stop)]
        return RankNote(self.rank, self.groups, "".join(lines), spans, self.items, file)


def plan_save(state: LocalState, notes: Sequence[Mapping[str, Any]], rank: int) -> SavePlan:
    """Plan the writes of this rank from the summaries of all ranks (`LocalState.note`).

    A pure function: every rank evaluates the same rules on the same summaries, so each block has exactly one writer.
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

    A note contains the record of the tensor without a piece in two cases: on the first rank that stores any block of the tensor,
    and on every rank of a tied weight, because each stage may have another name for the weight.
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
    """Plan a ZeRO shard: a range of elements in memory order, and therefore also in each section of the tensor."""
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
    """The key of a tensor (or of a section of a fused tensor) in files. All ranks that write a piece use the same key."""
    name = f"{label} (section {section})" if section else label
    return f"optimizer/{state_name}/{name}" if state_name else f"model/{name}"


# --- The notes of all ranks, merged into the records of the manifest ---


@dataclass(frozen=True)
class RankNote:
    """One rank's additions to the manifest: the pieces it wrote, values, and its file. Made by `SavePlan.note`.

    Each line of `tensors` is a JSON list of `TensorRecord`s that are divided in the same way: a weight, or all state tensors of a
    parameter. Each record has one part, which the ranks divide among them; its `cut` is not set yet. The rank's piece of line n is
    the range of elements from spans[2n] up to, but not including, spans[2n + 1]. If this range is empty, the rank writes nothing.
    """

    rank: int
    groups: list[tuple[str, GroupRecord]] | None
    tensors: str = ""
    spans: list[int] = field(default_factory=list)
    items: list[ItemRecord] = field(default_factory=list)
    file: FileRecord | None = None

    def dump(self) -> str:
        """Convert the note to text: a first line with all other attributes, then the lines of `tensors`."""
        return json.dumps(to_json(replace(self, tensors=""))) + "\n" + self.tensors

    @classmethod
    def parse(cls, text: str, where: str) -> RankNote:
        """Read a note from the text of `dump`."""
        head, _, tensors = text.partition("\n")
        return replace(from_json(cls, json.loads(head), where), tensors=tensors)


Pieces = list[int]
"""Pieces of a part as [start, stop, rank, start, stop, rank, ...]: flat, because there may be millions."""


def merge_groups(notes: Sequence[RankNote]) -> tuple[GroupRecord, ...] | None:
    """Merge the parameter groups of all ranks; None if no optimizer was saved."""
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
    """Merge the notes of all ranks into the records of the full tensors, and the table of their cuts (the divisions of parts into
    pieces).

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
                f"ranks do not agree on {first.label}. The full tensor is {first.dtype} of shape {list(first.shape)} "
                f"on rank {first_pieces[2]} and {record.dtype} of shape {list(record.shape)} on rank {pieces[2]}. "
                "Name the modules of a stage as in the full model. If shards are uneven, pass place(..., shape=<full "
                "shape>).",
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
            f"{error} (from ranks {', '.join(map(str, writers)) or 'none'}). There are two possible causes. 1. Two "
            "stages use one name for different tensors: name the modules of a stage as in the full model. 2. The "
            "placements of the tensor are wrong: compare them with the shards of each rank.",
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
        """Return (start, stop, number of the cut) for every run of adjacent pieces."""
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


_MANIFEST_SPACE = 1 << 20
_VISIBLE_WITHIN = 10.0
"""Seconds until a folder made by rank 0 must be visible to the other ranks; network file systems cache listings."""
_POLL = 0.02
_PATIENCE_AT_EXIT = 60.0
_PATIENCE_AFTER_ERROR = 5.0
_REST = 5.0
"""Seconds of rest for each second of processor time, while training runs."""
_LONGEST_REST = 0.5


def save_checkpoint(
    folder: Path,
    context: ParallelContext,
    step: int,
    model: nn.Module,
    optimizer: Any,
    extra: Mapping[str, Any] | None,
    keep: int,
    background: bool,
) -> BackgroundSave | None:
    """Save the checkpoint of `step` in the run's folder. Either every rank raises or none.

    Collective over the world.

    Returns:
        With `background`, an object for the running save: the tensors are copied to the host and a thread writes them. Else None.
    """
    rank, doing = context.get_global_rank(), f"saving step {step}"

    # A check of the running step may raise, on all ranks: for example in the middle of gradient accumulation.
    check = save_checks.get(model, lambda: None)()
    if check is not None:
        check()

    # Anything that cannot be saved (a type, a value that is not JSON) raises here, before anything is on disk.
    tensors = locate_tensors(model, context, doing)
    with agreed(context, doing):
        state = LocalState(tensors, model, optimizer, extra, context)

    # Replicas store the same blocks, and each distinct block is written once. Every rank publishes a summary of its state and
    # derives the same assignment from all summaries, so no further agreement is needed.
    notes = gather_from_all(state.note(), context)
    with agreed(context, doing):
        plan = plan_save(state, notes, rank)

    # All ranks write to one staging folder, named by rank 0. The sum of the sizes decides whether the save fits on the disk.
    offers = gather_from_all({"step": step, "size": plan.size, "name": staging_name(step)}, context)
    steps = {offer["step"] for offer in offers}
    if len(steps) > 1:
        raise CheckpointError(
            f"ranks called save() with the different steps {listed(sorted(steps))}. Call save() with the same step "
            "on every rank."
        )
    layout, size = LayoutRecord.of(context.layout), sum(offer["size"] for offer in offers)
    writer = StorageWriter(step, folder / offers[0]["name"], rank, layout, size, keep)
    with agreed(context, doing):
        if rank == 0:
            writer.stage()
    with agreed(context, doing):
        writer.check_visible()

    try:
        if background:
            # Copied before this function returns, because the next training step changes the tensors in place.
            with agreed(context, doing):
                plan.copy_to_host()
            return BackgroundSave(writer, plan)
        with agreed(context, doing):
            writer.write(plan)
        # The end of the block above is a barrier: every rank's file is on disk now, or all ranks have raised.
        with agreed(context, doing):
            if rank == 0:
                writer.commit()
    except BaseException:
        writer.drop()
        raise
    return None


@dataclass(frozen=True)
class StorageWriter:
    """The disk operations of a save on one rank: stage (rank 0), write, commit (rank 0). Never communicates.

    All methods can therefore run in a background thread. Rank 0 waits for the note files of the other ranks and uses no process
    group, because process groups belong to the training thread, and collectives issued by two threads have no order. `size` is the
    total size in bytes of all ranks' tensors.
    """

    step: int
    staged: Path
    rank: int
    layout: LayoutRecord
    size: int
    keep: int
    started: float = field(default_factory=time.monotonic)

    def stage(self) -> None:
        """Create the staging folder if the save fits on the disk. Called on rank 0."""
        clean(self.staged.parent)
        check_space(self.staged.parent, self._needed)
        self.staged.mkdir()
        fault_point("staged")

    def check_visible(self) -> None:
        """Raise if this rank does not see the staging folder within ten seconds."""
        end = time.monotonic() + _VISIBLE_WITHIN
        while not self.staged.is_dir():
            if time.monotonic() > end:
                raise CheckpointError(
                    f"rank {self.rank} on {socket.gethostname()} cannot see {self.staged}, which rank 0 created. Use "
                    "a folder on a file system that all ranks share.",
                    code="C084",
                )
            time.sleep(0.05)

    def write(self, plan: SavePlan, after_chunk: Callable[[], None] = lambda: None) -> None:
        """Write this rank's tensors, then its note. `after_chunk` is called after each chunk of bytes."""
        with no_space_errors(self.staged.parent, self._needed):
            file = None
            if plan.entries:
                file = write_tensors(self.staged / tensors_file(self.rank), plan.entries, after_chunk)
            # The note certifies that the file is on disk. Rank 0 polls for it, so it must appear atomically.
            write_at_once(self._note_file(self.rank), plan.note(file).dump())
        fault_point("part written")

    def wait_for_notes(self, stop: threading.Event) -> None:
        """Wait until every rank's note exists; raise if `stop` is set, or a minute after the main thread has ended."""
        missing = set(range(self.layout.world_size))
        asked, main_ended = time.monotonic(), None
        while missing := {rank for rank in missing if not self._note_file(rank).exists()}:
            now = time.monotonic()
            if main_ended is None and not threading.main_thread().is_alive():
                main_ended = now
            late = main_ended is not None and now - main_ended > _PATIENCE_AT_EXIT
            if stop.wait(_POLL) or late:
                raise CheckpointError(
                    f"the background save of step {self.step} was abandoned after {now - asked:.1f} s, because ranks "
                    f"{sorted(missing)} have not written their files. Earlier checkpoints are unchanged.",
                    code="C084",
                )

    def commit(self) -> None:
        """Publish the checkpoint and delete old checkpoints. Called on rank 0 when the notes of all ranks exist."""
        # The manifest is merged from the notes. Pieces that overlap or leave a gap raise here.
        notes = []
        for rank in range(self.layout.world_size):
            path = self._note_file(rank)
            notes.append(RankNote.parse(path.read_text(), path.name))
            path.unlink()
        tensors, cuts = merge_tensors(notes)
        manifest = Manifest(
            step=self.step,
            time=time.time(),
            layout=self.layout,
            files=tuple(note.file for note in notes if note.file is not None),
            cuts=cuts,
            tensors=tensors,
            groups=merge_groups(notes),
            items=tuple(item for note in notes for item in note.items),
        )
        with no_space_errors(self.staged.parent, self._needed):
            write_manifest(self.staged, manifest)
            # Read back as a load would, before the rename and before older checkpoints are deleted: an unreadable checkpoint
            # must never be the only one.
            try:
                verify(self.staged, content=False)
            except CheckpointError as error:
                raise CheckpointError(
                    f"the checkpoint of step {self.step} was written but failed verification: {error}. The "
                    "checkpoint was not published. Earlier checkpoints are unchanged.",
                    code="C084",
                ) from error
            path = publish(self.staged, self.step)
        # The checkpoint is durable from here on, so the oldest ones may be deleted.
        retire(path.parent, path, self.keep)
        get_dist_logger().info(
            f"saved step {self.step} to {path} ({megabytes(self.size)}, {time.monotonic() - self.started:.2f} s)"
        )
        by_trainer = {"extra/trainer", "extra/hooks"} <= {item.name for item in manifest.items}
        tell_launcher(self.step, path, by_trainer)

    def drop(self) -> None:
        """Delete the files of a failed save on rank 0, when all ranks have stopped writing or have exited."""
        if self.rank == 0:
            discard(self.staged)

    @property
    def _needed(self) -> int:
        return self.size + _MANIFEST_SPACE

    def _note_file(self, rank: int) -> Path:
        return self.staged / f"rank-{rank:05d}.part"


class Pace:
    """Slows a background thread down in favour of training: after each piece of work, the thread sleeps several times as long.

    Only processor time counts as work. Without these rests, one or two steps take 1.29 times as long during a save of 100 MB; with
    rests, the save overlaps four steps, which take 1.07 times as long (`benchmarks/trainer.py`).
    """

    def __init__(self) -> None:
        self._hurry = threading.Event()
        self._before: float | None = None

    def hurry(self) -> None:
        """Let the background thread run without pauses, because the training thread waits for the save."""
        self._hurry.set()

    def rest(self) -> None:
        """Sleep in proportion to the processor time since the last call. The background thread calls this function."""
        worked = 0.0 if self._before is None else time.thread_time() - self._before
        if threading.main_thread().is_alive():
            self._hurry.wait(min(_REST * worked, _LONGEST_REST))
        self._before = time.thread_time()


class BackgroundSave:
    """A save in a background thread: writes this rank's file and, on rank 0, waits for all ranks' files and commits.

    `finish` waits for the save on all ranks. The thread is not a daemon thread, so a process that ends normally first completes its
    last checkpoint.
    """

    def __init__(self, writer: StorageWriter, plan: SavePlan) -> None:
        self._writer = writer
        self._plan = plan
        self._error: CheckpointError | None = None
        self._stop = threading.Event()
        self._reason = ""
        self._pace = Pace()
        self._thread = threading.Thread(target=self._run, name=f"colonnade-save-{writer.step}", daemon=False)
        self._thread.start()

    @property
    def is_writing(self) -> bool:
        """Whether the thread is still running."""
        return self._thread.is_alive()

    def finish(self, context: ParallelContext) -> None:
        """Wait for the save at full speed and raise its error on every rank. Collective over the world."""
        self._pace.hurry()
        error = None
        try:
            # The thread of rank 0 waits for every rank's note. Failures elsewhere must reach rank 0 before it joins its own
            # thread, which would otherwise wait for a note that never comes.
            if self._writer.rank != 0:
                self._thread.join()
                error = None if self._error is None else str(self._error)
            for rank, text in enumerate(gather_from_all(error, context)):
                if text:
                    self._give_up(f"on rank {rank}: {text}")
        except BaseException:
            self._give_up("the other ranks have exited")
            raise
        self._thread.join()
        with agreed(context, "saving in the background"):
            if self._error is not None:
                self._writer.drop()
                raise self._error

    def give_up_soon(self) -> None:
        """Limit the wait of rank 0 for the notes of other ranks to a few seconds.

        Called after an error on this rank, because other ranks may have failed, too, and will then write no note.
        """
        timer = threading.Timer(_PATIENCE_AFTER_ERROR, self._give_up, [""])
        timer.daemon = True
        timer.start()

    def _give_up(self, reason: str) -> None:
        self._reason = reason
        self._stop.set()

    def _run(self) -> None:
        writer = self._writer
        try:
            with as_checkpoint_errors(f"saving step {writer.step} in the background"):
                try:
                    writer.write(self._plan, self._pace.rest)
                finally:
                    self._plan.entries.clear()  # frees the host copies
                if writer.rank == 0:
                    writer.wait_for_notes(self._stop)
                    writer.commit()
        except CheckpointError as error:
            self._error = CheckpointError(self._reason, code="C084") if self._reason else error


def tell_launcher(step: int, path: Path, by_trainer: bool) -> None:
    """Tell the launcher, in a file, from which checkpoint the run would resume.

    The launcher prints this if the run is interrupted.

    Called on rank 0.
    """
    how = (
        "a run with a LoadCheckpointHook" if by_trainer else "a loop that calls CheckpointManager.load() on that folder"
    )
    if SAVED in os.environ:
        with contextlib.suppress(OSError):  # the launcher has exited
            Path(os.environ[SAVED]).write_text(f"step {step} in {path}; {how} resumes from it", encoding="utf-8")
