"""What each rank tells of the tensors that it wrote, and the records of the manifest that all of it makes.

Of a thousand ranks each may tell of a thousand tensors. What they all say alike is a text, an `Outline`, which is read
once; of every rank only where its piece starts and stops is looked at, all ranks at a time.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from operator import lt

from colonnade.checkpoint.format.boxes import Box
from colonnade.checkpoint.format.manifest import (
    Cut,
    FileRecord,
    GroupRecord,
    ItemRecord,
    Part,
    TensorRecord,
    check_tiled,
)
from colonnade.checkpoint.format.records import Damaged, from_json, to_json
from colonnade.errors import CheckpointError

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


def _part(outline: Outline, state_name: str, start: int, stop: int, cut: int) -> Part:
    """The part of a run of pieces: all of the outline's where elements are cut, else the rows of the run."""
    key = entry_key(outline.label, state_name, outline.section)
    whole = Part(outline.offset, outline.part, outline.order, key, cut)
    if outline.order is not None:
        return whole
    rows = whole.rows(start, stop)
    return replace(whole, offset=rows.offset, shape=rows.shape)
