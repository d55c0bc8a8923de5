"""What one rank writes of its state. Each distinct block is written once, by the first of the ranks that hold it."""

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
    Box,
    Cut,
    Damaged,
    FileRecord,
    GroupRecord,
    ItemRecord,
    TensorPart,
    TensorRecord,
    boxes_in_order,
    check_tiled,
    from_json,
    tensors_file,
    to_json,
    whole_box,
)
from colonnade.checkpoint.state import BUFFER, RANDOM, ParameterGroup, ParameterState, read_groups, read_state
from colonnade.checkpoint.tensor_files import Encoded, FileEntry, encode, is_stateful, memory_for, type_name
from colonnade.checkpoint.tensors import LocalTensor, boxes_in_memory, extra_states, memory_order
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.random_state import random_state
from colonnade.errors import CheckpointError
from colonnade.parallel.dtensor import local_part
from colonnade.parallel.flat import FlatShard

# --------------------------------------------------------------------------------------------------
# What each rank tells of the tensors that it wrote, and the records of the manifest that all of it makes.
#
# Of a thousand ranks each may tell of a thousand tensors. What they all say alike is a text, an `Outline`, which is read
# once; of every rank only where its piece starts and stops is looked at, all ranks at a time.
# --------------------------------------------------------------------------------------------------


Pieces = list[int]
"""start, stop and rank of a piece, as `Part` counts it, and so on with the next: flat, because there may be millions."""


def entry_key(label: str, state_name: str, section: int = 0) -> str:
    """The name of a tensor, or of its part in a section, in the files of all ranks that wrote a piece of it."""
    name = f"{label} (section {section})" if section else label
    return f"optimizer/{state_name}/{name}" if state_name else f"model/{name}"


@dataclass(frozen=True)
class Outline:
    """Of what a rank wrote a piece: of the box at `offset` of shape `part` in a tensor of shape `shape`.

    `order` is that of `Part`. A rank that wrote several pieces of one tensor counts them by `section`. `states` has the (name, type) of every tensor that is cut so: what the optimizer keeps for
    a parameter, or the weight or buffer itself under the name "".
    """

    label: str
    names: tuple[str, ...]
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    part: tuple[int, ...]
    order: tuple[int, ...] | None
    states: tuple[tuple[str, str], ...] = ()
    section: int = 0

    @classmethod
    def of_rows(cls, label: str, names: tuple[str, ...], shape: tuple[int, ...], box: Box) -> Outline:
        """Of a box: it is some rows of the box that goes from the first row of the tensor to the last."""
        return cls(label, names, shape, (*(0 for _ in shape[:1]), *box.offset[1:]), (*shape[:1], *box.shape[1:]), None)


@dataclass
class RankNote:
    """All that one rank adds to the manifest: the pieces that it wrote, values, and its file.

    Piece n goes from spans[2n] to spans[2n + 1] of what line n of `outlines`, an `Outline` as JSON, says; if these are
    equal, the rank only knows of the tensor. `groups` come with a digest: those of equal index and digest are one. None: no optimizer.
    """

    rank: int
    groups: list[tuple[str, GroupRecord]] | None
    outlines: str = ""
    spans: list[int] = field(default_factory=list)
    items: list[ItemRecord] = field(default_factory=list)
    file: FileRecord | None = None

    def add(self, outline: Outline, start: int, stop: int) -> None:
        """A piece."""
        self.outlines += json.dumps(to_json(outline)) + "\n"
        self.spans += [start, stop]

    def dump(self) -> str:
        """As a text: a line for each outline, after one for all else."""
        return json.dumps(to_json(replace(self, outlines=""))) + "\n" + self.outlines

    @classmethod
    def parse(cls, text: str, where: str) -> RankNote:
        """What `dump` was given."""
        head, _, outlines = text.partition("\n")
        return replace(from_json(cls, json.loads(head), where), outlines=outlines)


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
    alike: dict[str, list[RankNote]] = {}
    for note in notes:
        alike.setdefault(note.outlines, []).append(note)
    told: dict[str, Pieces] = {}
    for outlines, those in alike.items():
        columns, ranks = zip(*(note.spans for note in those), strict=True), [note.rank for note in those]
        for text, starts, stops in zip(outlines.split("\n")[:-1], columns, columns, strict=True):
            told.setdefault(text, []).extend(chain.from_iterable(zip(starts, stops, ranks, strict=True)))
    cuts = _Cuts([note.rank for note in notes if note.file is not None])
    found: dict[tuple[str, str], list[tuple[Outline, Pieces]]] = {}
    for text, pieces in told.items():
        outline = from_json(Outline, json.loads(text), "a rank's note")
        for state_name, dtype in outline.states:
            one = replace(outline, states=((state_name, dtype),))
            found.setdefault((outline.label, state_name), []).append((one, pieces))
    records = tuple(_merged(*key, outlines, cuts) for key, outlines in found.items())
    return records, tuple(cuts.table)


class _Cuts:
    """The cuts of all parts, equal ones once."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._files = {rank: at for at, rank in enumerate(ranks)}
        self._known: dict[tuple[int, ...], list[tuple[int, int, int]]] = {}
        self._numbers: dict[Cut, int] = {}
        self.table: list[Cut] = []

    def of(self, told: Sequence[Pieces]) -> list[tuple[int, int, int]]:
        """(start, stop, cut) of every run of pieces that follow each other without a gap."""
        same = tuple(map(id, told))  # what one parameter's moments share is looked at once
        if same not in self._known:
            self._known[same] = [self._cut(*run) for run in _runs([number for one in told for number in one])]
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


def _merged(label: str, state_name: str, told: Sequence[tuple[Outline, Pieces]], cuts: _Cuts) -> TensorRecord:
    """One tensor from what the ranks said of it."""
    (first, first_pieces), *_ = told
    (_, dtype), *_ = first.states
    for outline, pieces in told:
        (_, other), *_ = outline.states
        if (outline.shape, other) != (first.shape, dtype):
            raise CheckpointError(
                f"ranks do not agree on {label}: rank {first_pieces[2]} has {dtype} of shape {list(first.shape)} as a "
                f"whole, rank {pieces[2]} has {other} of {list(outline.shape)}. Stages must have the names of the whole "
                f"model; uneven shards need place(..., shape=<whole shape>).",
                code="C082",
            )
    names = tuple(dict.fromkeys(name for outline, _ in told for name in outline.names))
    by_part: dict[Outline, list[Pieces]] = {}
    for outline, pieces in told:
        by_part.setdefault(replace(outline, names=()), []).append(pieces)
    parts = tuple(_part(outline, state_name, *run) for outline, alike in by_part.items() for run in cuts.of(alike))
    record = TensorRecord(label, state_name, names, first.shape, dtype, parts)
    try:
        check_tiled(record, cuts.table)
    except Damaged as error:
        writers = sorted({rank for _, pieces in told for run in _runs(pieces) for rank in run[2]})
        raise CheckpointError(
            f"{error} (from ranks {', '.join(map(str, writers)) or 'none'}). Two stages may use one name for different "
            f"tensors (stages must have the names of the whole model), or the placements do not add up.",
            code="C082",
        ) from None
    return record


def _part(outline: Outline, state_name: str, start: int, stop: int, cut: int) -> TensorPart:
    """The part of a run of pieces: all of the outline's where elements are cut, else the rows of the run."""
    key = entry_key(outline.label, state_name, outline.section)
    whole = TensorPart(outline.offset, outline.part, outline.order, key, cut)
    if outline.order is not None:
        return whole
    rows = whole.rows(start, stop)
    return replace(whole, offset=rows.offset, shape=rows.shape)


# --------------------------------------------------------------------------------------------------
# SavePlan: the pieces of tensors that one rank gives, and what it tells the others of them.
# --------------------------------------------------------------------------------------------------


@dataclass
class SavePlan:
    """What one rank writes: its note, and the tensors for its file."""

    note: RankNote
    entries: list[FileEntry] = field(default_factory=list)
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
        self.entries = [FileEntry.of(key, copy) for key, copy in copies]

    def add_box(self, outline: Outline, box: Box, state_name: str, value: Tensor, writes: bool) -> None:
        """A tensor that the rank knows of, and the box of it that it writes, if any: some rows of the outline's."""
        start, stop = (box.offset[0], box.stop[0]) if box.shape else (0, 1)
        self.add(outline, start, stop if writes and box.numel else start, state_name, value)

    def add(self, outline: Outline, start: int, stop: int, state_name: str, value: Tensor) -> None:
        """What the rank writes of a tensor, from `start` to `stop` of its outline. A `state_name` is the optimizer's."""
        key = entry_key(outline.label, state_name, outline.section)
        self.add_entry(outline, start, stop, state_name, FileEntry.of(key, value))

    def add_entry(self, outline: Outline, start: int, stop: int, state_name: str, entry: FileEntry) -> None:
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
        self.entries += [FileEntry.of(record.entry(at), tensor) for at, tensor in enumerate(item.tensors)]
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
        plan.add_entry(outline, start, stop, state_name, FileEntry(key, type_name(value, key), (stop - start,), read))


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
        """What the other ranks must know, to agree with this one on who writes what."""
        stepped = {state.parameter.label for state in self.optimizer}
        members = {one.label: one.label in stepped for group in self.groups or () for one in group.members}
        values = [*self.items.items(), *((f"{BUFFER}{tensor.label}", item) for tensor, item in self.buffers)]
        return {"optimizer": members, "items": {name: item.digest() for name, item in values}}


def plan_save(state: LocalState, notes: Sequence[Mapping[str, Any]], rank: int) -> SavePlan:
    """What this rank writes, now that every rank's note is known. Pure; the same choice on every rank."""
    plan = SavePlan(RankNote(rank, None if state.groups is None else []))
    for tensor in state.tensors:
        plan_weight(plan, tensor, tensor.local)
    with_state = [{label for label, stepped in note["optimizer"].items() if stepped} for note in notes]
    for kept in state.optimizer:
        _plan_optimizer(plan, kept, [at for at in kept.parameter.sharers if kept.parameter.label in with_state[at]])
    for group in state.groups or ():
        _plan_group(plan, group, [note["optimizer"] for note in notes])
    for tensor, item in state.buffers:
        _plan_buffer(plan, tensor, item, [note["items"].get(f"{BUFFER}{tensor.label}") for note in notes])
    for name, item in state.items.items():
        ranks = [at for at, note in enumerate(notes) if note["items"].get(name) == notes[rank]["items"][name]]
        if next(iter(ranks)) == rank:
            plan.note.items.append(plan.add_item(name, tuple(ranks), item))
    plan.close()
    return plan


def _plan_buffer(plan: SavePlan, tensor: LocalTensor, item: Encoded, digests: Sequence[str | None]) -> None:
    """Of a buffer that has drifted apart, what `plan_weight` leaves out: each value that the first holder has not."""
    rank, name = plan.note.rank, f"{BUFFER}{tensor.label}"
    ranks = [at for at in tensor.holders if digests[at] == digests[rank]]
    if next(iter(ranks)) == rank != tensor.holders[0]:
        plan.note.items.append(plan.add_item(name, tuple(ranks), item))


def _plan_optimizer(plan: SavePlan, kept: ParameterState, stepped: Sequence[int]) -> None:
    """`stepped` are the ranks that keep state for the parameter."""
    parameter, first = kept.parameter, next(iter(stepped)) == plan.note.rank
    if not isinstance(kept.value, Tensor):
        if first:
            key = entry_key(parameter.label, kept.name)
            plan.note.items.append(plan.add_item(key, (plan.note.rank,), encode(kept.value, str(kept))))
        return
    value = local_part(kept.value).detach()
    if not kept.like_parameter:
        if first:
            box = whole_box(value.shape)
            plan.add_box(Outline.of_rows(parameter.label, (), box.shape, box), box, kept.name, value, writes=True)
    elif kept.shard is None:
        holder = next(at for at in stepped if at in parameter.holders)
        writes = holder == plan.note.rank
        if writes or first:
            plan_pieces(plan, parameter, (), kept.name, value, writes)
    elif next(iter(parameter.holders)) in kept.shard.ranks:  # the team of the first of all that hold the parameter
        plan_shard(plan, parameter, kept.shard, kept.name, value)


def _plan_group(plan: SavePlan, group: ParameterGroup, members: Sequence[Mapping[str, bool]]) -> None:
    """Each member is named by the first rank whose optimizer has it; `members` are those of every rank."""
    names = tuple(
        one.label
        for one in group.members
        if plan.note.rank == next(at for at in one.sharers if one.label in members[at])
    )
    if names and plan.note.groups is not None:
        options = plan.add_item(f"optimizer/options/{group.index}", (plan.note.rank,), group.options)
        digest = f"{group.optimizer} {group.options.digest()}"
        plan.note.groups.append((digest, GroupRecord(group.index, names, options, group.optimizer)))
