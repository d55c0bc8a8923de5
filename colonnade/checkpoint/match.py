"""A model and the tensors of a checkpoint, matched by name; everything that does not fit is listed, on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from colonnade.checkpoint.locate import Located
from colonnade.checkpoint.manifest import Manifest, TensorRecord
from colonnade.checkpoint.tensors_file import type_name
from colonnade.errors import CheckpointError, listed

_SHOWN = 12


@dataclass
class Matches:
    """The record of each place in the model, and what does not fit on this rank."""

    records: dict[int, TensorRecord] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    mismatched: list[str] = field(default_factory=list)

    def note(self) -> dict[str, Any]:
        """What the other ranks must know."""
        used = sorted(record.label for record in self.records.values())
        return {"used": used, "missing": self.missing, "mismatched": self.mismatched}

    def of(self, place: Located) -> TensorRecord:
        return self.records[id(place.piece)]


def match(places: Iterable[Located], manifest: Manifest) -> Matches:
    """Find every tensor of this rank's model in the checkpoint, under any of its names."""
    known: dict[str, TensorRecord] = {}
    for record in manifest.tensors:
        if not record.slot:
            for name in (record.label, *record.names):
                known.setdefault(name, record)
    found = Matches()
    for place in places:
        piece = place.piece
        under = [name for name in (*piece.names, piece.label) if name in known]
        if not under:
            found.missing.append(piece.names[0])
            continue
        record = known[under[0]]
        found.records[id(piece)] = record
        here = (type_name(piece.local, piece.names[0]), place.shape)
        if here != (record.dtype, record.shape):
            found.mismatched.append(
                f"{piece.names[0]}: {record.dtype} {list(record.shape)} in the checkpoint, {here[0]} {list(here[1])} here"
            )
    return found


def check_matches(notes: Sequence[dict[str, Any]], manifest: Manifest, where: str) -> None:
    """Raise the same error on every rank unless every tensor of the checkpoint and of all ranks found the other."""
    used = {label for note in notes for label in note["used"]}
    problems = {
        "missing in the checkpoint": _union(note["missing"] for note in notes),
        "in the checkpoint, but not in the model": [
            (record.names or (record.label,))[0]
            for record in manifest.tensors
            if not record.slot and record.label not in used
        ],
        "of another shape or type": _union(note["mismatched"] for note in notes),
    }
    if any(problems.values()):
        lines = [f"  {what} ({len(names)}): {_some(names)}" for what, names in problems.items() if names]
        raise CheckpointError(
            f"{where} does not fit this model; nothing was loaded:\n" + "\n".join(lines) + "\nBuild the model that was "
            "saved (names, sizes and types are in the manifest), or load another checkpoint."
        )


def _union(lists: Iterable[Iterable[str]]) -> list[str]:
    return list(dict.fromkeys(name for names in lists for name in names))


def _some(names: Sequence[str]) -> str:
    return listed(names[:_SHOWN]) + (" ..." if len(names) > _SHOWN else "")
