"""The plan of a save: each distinct block is written once, by the first of the ranks that hold it. And the merge of all notes.

`LocalState` is the state of this rank. `plan_save` chooses from the notes of all ranks what this rank writes, a `SavePlan`: the
tensors for its file and, as a `RankNote`, what rank 0 must know of them. `merge_tensors` and `merge_groups` make the records of
the manifest from the notes of all ranks.

Of a thousand ranks each may write a piece of a thousand tensors. So a note describes a tensor and the part of it that the ranks
cut between them in the same words on every rank, a line of text that is read once for all ranks, and has two numbers for the
piece that is this rank's: where it starts and stops in that part.
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
from colonnade.checkpoint.optimizer_state import ParameterState, read_groups, read_state
from colonnade.checkpoint.tensor_files import FileEntry, memory_for
from colonnade.checkpoint.values import BUFFER, RANDOM, Encoded, encode, is_stateful
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.random_state import random_state
from colonnade.errors import CheckpointError
from colonnade.parallel.boxes import Box, boxes_in_order, whole_box
from colonnade.parallel.dtensor import local_part
from colonnade.parallel.flat import FlatShard
from colonnade.parallel.whole import LocalTensor, boxes_in_memory, extra_states, memory_order

# --- The state of this rank, and what it writes of it ---


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
        """The facts that the other ranks need, to make the same choice of who writes what."""
        stepped = {state.parameter.label for state in self.optimizer}
        members = {each.label: each.label in stepped for group in self.groups or () for each in group.members}
        values = [*self.items.items(), *((f"{BUFFER}{tensor.label}", item) for tensor, item in self.buffers)]
        return {"optimizer": members, "items": {name: item.digest() for name, item in values}}


@dataclass
class SavePlan:
    """The part of one rank in a save: tensors for its file, values and parameter groups. Made by `plan_save`.

    `groups` come with a digest: those of equal index and digest are one group. None: there is no optimizer.
    """

    rank: int
    groups: list[tuple[str, GroupRecord]] | None = None
    items: list[ItemRecord] = field(default_factory=list)
    entries: list[FileEntry] = field(default_factory=list)
    _pieces: dict[tuple[Any, ...], list[TensorRecord]] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """The bytes of its tensors."""
        return sum(entry.size for entry in self.entries)

    def copy_to_host(self) -> None:
        """Copy every tensor to the host now, so that training may go on while they are written."""
        copies = [(entry.key, _host_copy(entry.read())) for entry in self.entries]
        if torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()
        self.entries = [FileEntry.of(key, copy) for key, copy in copies]

    def add_piece(self, record: TensorRecord, start: int, stop: int, entry: FileEntry) -> None:
        """Write, as `entry`, the piece from `start` to `stop` of the one part of `record`; if equal, only know of the tensor."""
        (part,) = record.parts
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
        """Write `entry`, a box of a tensor: some rows of the part that goes from the first row of the tensor to the last."""
        offset, size = (*(0 for _ in shape[:1]), *box.offset[1:]), (*shape[:1], *box.shape[1:])
        part = TensorPart(offset, size, None, entry.key, cut=0)
        start, stop = (box.offset[0], box.stop[0]) if box.shape else (0, 1)
        record = TensorRecord(label, state_name, names, shape, entry.dtype, (part,))
        self.add_piece(record, start, stop if writes and box.numel else start, entry)

    def add_item(self, name: str, ranks: tuple[int, ...], item: Encoded) -> ItemRecord:
        """The record of a value, whose tensors the rank writes."""
        file = tensors_file(self.rank) if item.tensors else None
        record = ItemRecord(name, ranks, item.value, len(item.tensors), file, key=name)
        self.entries += [FileEntry.of(record.entry(at), tensor) for at, tensor in enumerate(item.tensors)]
        return record

    def note(self, file: FileRecord | None) -> RankNote:
        """The note of this rank, whose tensors are in `file`. Tensors that are cut alike share a line of it."""
        lines = [json.dumps([to_json(record) for record in records]) + "\n" for records in self._pieces.values()]
        spans = [end for *_, start, stop in self._pieces for end in (start, stop)]
        return RankNote(self.rank, self.groups, "".join(lines), spans, self.items, file)


def plan_save(state: LocalState, notes: Sequence[Mapping[str, Any]], rank: int) -> SavePlan:
    """Choose what this rank writes, by the notes of all ranks (`LocalState.note`). Pure; the same choice on every rank."""
    plan = SavePlan(rank, None if state.groups is None else [])
    for tensor in state.tensors:
        plan_weight(plan, tensor, tensor.local)

    # The optimizer may have stepped on a parameter on some ranks only: those keep state for it.
    with_state = [{label for label, stepped in note["optimizer"].items() if stepped} for note in notes]
    for kept in state.optimizer:
        _plan_optimizer(plan, kept, [at for at in kept.parameter.sharers if kept.parameter.label in with_state[at]])

    # A member of a group is named by the first rank whose optimizer has it.
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

    # A buffer may have drifted apart (statistics of BatchNorm). `plan_weight` writes that of the first holder as the tensor; each
    # other value is written as an item by the first rank that has it.
    for tensor, item in state.buffers:
        name = f"{BUFFER}{tensor.label}"
        ranks = [at for at in tensor.holders if notes[at]["items"].get(name) == notes[rank]["items"].get(name)]
        if ranks[0] == rank != tensor.holders[0]:
            plan.items.append(plan.add_item(name, tuple(ranks), item))

    # The same for all other values, of which no rank's comes first.
    for name, item in state.items.items():
        ranks = [at for at, note in enumerate(notes) if note["items"].get(name) == notes[rank]["items"][name]]
        if ranks[0] == rank:
            plan.items.append(plan.add_item(name, tuple(ranks), item))
    return plan


def plan_weight(plan: SavePlan, tensor: LocalTensor, value: Tensor) -> None:
    """Plan a weight or buffer; `value` is what the rank holds of it. The first of those who hold it writes it.

    The first of all ranks that hold any of it knows of it even so, and so does each that may have another name for it.
    """
    writes = tensor.holders[0] == plan.rank
    if writes or tensor.sharers[0] == plan.rank or tensor.placement.tied is not None:
        _plan_boxes(plan, tensor, tensor.names, "", value, writes)


def _plan_boxes(
    plan: SavePlan, tensor: LocalTensor, names: tuple[str, ...], state_name: str, value: Tensor, writes: bool
) -> None:
    """Plan a `value` that lies as `tensor` does: a box for each of its places."""
    for section, (box, view) in enumerate(tensor.pieces(value)):
        entry = FileEntry.of(entry_key(tensor.label, state_name, section), view)
        plan.add_rows(tensor.label, names, state_name, tensor.shape, box, entry, writes)


def _plan_optimizer(plan: SavePlan, kept: ParameterState, stepped: Sequence[int]) -> None:
    """Plan what the optimizer keeps for a parameter. `stepped` are the ranks that keep state for it."""
    parameter, first = kept.parameter, stepped[0] == plan.rank
    key = entry_key(parameter.label, kept.name)
    if not isinstance(kept.value, Tensor):
        if first:
            plan.items.append(plan.add_item(key, (plan.rank,), encode(kept.value, str(kept))))
        return
    value = local_part(kept.value).detach()
    if not kept.like_parameter:  # one value for the whole parameter
        if first:
            box = whole_box(value.shape)
            plan.add_rows(parameter.label, (), kept.name, box.shape, box, FileEntry.of(key, value))
    elif kept.shard is None:
        writes = plan.rank == next(at for at in stepped if at in parameter.holders)
        if writes or first:
            _plan_boxes(plan, parameter, (), kept.name, value, writes)
    elif parameter.holders[0] in kept.shard.ranks:  # of several teams of ranks that shard it, that of the first holder
        _plan_shard(plan, parameter, kept.shard, kept.name, value)


def _plan_shard(plan: SavePlan, tensor: LocalTensor, shard: FlatShard, state_name: str, value: Tensor) -> None:
    """Plan the elements of a shard, for each place of the tensor those that lie there: they follow each other there too."""
    order, local = memory_order(tensor.local), whole_box(tensor.local.shape)
    for section, (box, here) in enumerate(tensor.places):
        key = entry_key(tensor.label, state_name, section)
        entry, start, stop = FileEntry.of(key, value), shard.start, shard.stop
        if len(tensor.places) > 1:
            start, stop = (_shared_with_first(here, end, local, order) for end in (shard.start, shard.stop))
            read = partial(_elements_at, tensor, shard, value, box)
            entry = FileEntry(key, entry.dtype, (stop - start,), read)
        part = TensorPart(box.offset, box.shape, order, key, cut=0)
        record = TensorRecord(tensor.label, state_name, (), tensor.shape, entry.dtype, (part,))
        plan.add_piece(record, start, stop, entry)


def _shared_with_first(here: Box, count: int, local: Box, order: Sequence[int]) -> int:
    """How many of the first `count` elements of a local part are in the box `here` of it."""
    shared = (here.shared_with(filled) for filled in boxes_in_order(0, count, local, order))
    return sum(box.numel for box in shared if box is not None)


def _elements_at(tensor: LocalTensor, shard: FlatShard, value: Tensor, box: Box) -> Tensor:
    """The elements of a shard that lie in this box of the whole, in order."""
    order = memory_order(tensor.local)
    found = boxes_in_memory(tensor, shard.start, shard.stop, value)
    return torch.cat([view.permute(order).flatten() for part, view in found if part.shared_with(box) is not None])


def _host_copy(tensor: Tensor) -> Tensor:
    copy = memory_for(tensor.shape, tensor.dtype, pinned=tensor.is_cuda)
    return copy.copy_(tensor.detach(), non_blocking=tensor.is_cuda)


def entry_key(label: str, state_name: str, section: int = 0) -> str:
    """The name of a tensor, or of its part in a section, in the files of all ranks that wrote a piece of it."""
    name = f"{label} (section {section})" if section else label
    return f"optimizer/{state_name}/{name}" if state_name else f"model/{name}"


# --- The notes of all ranks, and the records of the manifest that they make ---


@dataclass(frozen=True)
class RankNote:
    """The additions of one rank to the manifest: the pieces that it wrote, values, and its file. Made by `SavePlan.note`.

    Each line of `tensors` is a JSON list of `TensorRecord`s that are cut alike: what the optimizer keeps for a parameter, or a
    weight alone. Each has one part, which the ranks cut between them; its `cut` says nothing yet. The rank's piece of line n goes
    from spans[2n] to spans[2n + 1] in that part; if these are equal, the rank only knows of the tensor.
    """

    rank: int
    groups: list[tuple[str, GroupRecord]] | None
    tensors: str = ""
    spans: list[int] = field(default_factory=list)
    items: list[ItemRecord] = field(default_factory=list)
    file: FileRecord | None = None

    def dump(self) -> str:
        """The note as a text: one line for all else, and then those of `tensors`."""
        return json.dumps(to_json(replace(self, tensors=""))) + "\n" + self.tensors

    @classmethod
    def parse(cls, text: str, where: str) -> RankNote:
        """The note that `dump` made a text of."""
        head, _, tensors = text.partition("\n")
        return replace(from_json(cls, json.loads(head), where), tensors=tensors)


Pieces = list[int]
"""start, stop and rank of a piece of a part, and so on with the next: flat, because there may be millions."""


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
        for records in (found[key] for key in sorted(found))
    )


def merge_tensors(notes: Sequence[RankNote]) -> tuple[tuple[TensorRecord, ...], tuple[Cut, ...]]:
    """The whole tensors, and how they are cut.

    Refuses a tensor that ranks see differently, or whose pieces overlap or leave a gap.
    """
    # Most ranks have the same lines, which are looked at once for all of them; their spans are columns of a table.
    alike: dict[str, list[RankNote]] = {}
    for note in notes:
        alike.setdefault(note.tensors, []).append(note)
    by_line: dict[str, Pieces] = {}
    for lines, those in alike.items():
        columns, ranks = zip(*(note.spans for note in those), strict=True), [note.rank for note in those]
        for line, starts, stops in zip(lines.split("\n")[:-1], columns, columns, strict=True):
            by_line.setdefault(line, []).extend(chain.from_iterable(zip(starts, stops, ranks, strict=True)))

    cuts = _Cuts([note.rank for note in notes if note.file is not None])
    found: dict[tuple[str, str], list[tuple[TensorRecord, Pieces]]] = {}
    for line, pieces in by_line.items():
        for content in json.loads(line):
            record = from_json(TensorRecord, content, "a rank's note")
            found.setdefault((record.label, record.state_name), []).append((record, pieces))
    records = tuple(_merged(written, cuts) for written in found.values())
    return records, tuple(cuts.table)


def _merged(written: Sequence[tuple[TensorRecord, Pieces]], cuts: _Cuts) -> TensorRecord:
    """The record of a whole tensor, from the records that ranks have of it."""
    (first, first_pieces), *_ = written
    for record, pieces in written:
        if (record.shape, record.dtype) != (first.shape, first.dtype):
            raise CheckpointError(
                f"ranks do not agree on {first.label}: rank {first_pieces[2]} has {first.dtype} of shape {list(first.shape)} as "
                f"a whole, rank {pieces[2]} has {record.dtype} of {list(record.shape)}. Stages must have the names of the whole "
                f"model; uneven shards need place(..., shape=<whole shape>).",
                code="C082",
            )
    by_part: dict[TensorPart, list[Pieces]] = {}
    for record, pieces in written:
        by_part.setdefault(record.parts[0], []).append(pieces)
    parts = []
    for part, of_part in by_part.items():
        for start, stop, cut in cuts.of(of_part):
            # Where elements are cut, the part is whole or refused below. Rows are a part of their own for each run without a gap:
            # below them the tensor may be cut along other dimensions.
            run = part.rows(start, stop) if part.order is None else part.box
            parts.append(replace(part, offset=run.offset, shape=run.shape, cut=cut))
    names = tuple(dict.fromkeys(name for record, _ in written for name in record.names))
    merged = replace(first, names=names, parts=tuple(parts))
    try:
        check_tiled(merged, cuts.table)
    except Damaged as error:
        writers = sorted({rank for _, pieces in written for run in _runs(pieces) for rank in run[2]})
        raise CheckpointError(
            f"{error} (from ranks {', '.join(map(str, writers)) or 'none'}). Two stages may use one name for different "
            f"tensors (stages must have the names of the whole model), or the placements do not add up.",
            code="C082",
        ) from None
    return merged


class _Cuts:
    """The table of all cuts, equal ones once."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._files = {rank: at for at, rank in enumerate(ranks)}
        self._known: dict[tuple[int, ...], list[tuple[int, int, int]]] = {}
        self._numbers: dict[Cut, int] = {}
        self.table: list[Cut] = []

    def of(self, written: Sequence[Pieces]) -> list[tuple[int, int, int]]:
        """(start, stop, cut) of every run of pieces that follow each other without a gap."""
        same = tuple(map(id, written))  # the pieces that one parameter's moments share are looked at once
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
    """Starts, stops and ranks of every run; pieces without anything in them are left out."""
    starts, stops, ranks = pieces[::3], pieces[1::3], pieces[2::3]
    if starts[1:] == stops[:-1] and all(map(lt, starts, stops)):
        return [(starts, stops, ranks)]
    filled = sorted(piece for piece in zip(starts, stops, ranks, strict=True) if piece[0] < piece[1])
    ends = [at for at in range(1, len(filled)) if filled[at][0] != filled[at - 1][1]]
    runs = [filled[first:last] for first, last in pairwise([0, *ends, len(filled)])] if filled else []
    return [(starts, stops, ranks) for starts, stops, ranks in (zip(*run, strict=True) for run in runs)]
