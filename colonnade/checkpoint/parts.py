"""What each rank says of what it wrote, and how these notes become one manifest. No torch.

A rank's note is a file in the staged folder, put there by one rename after the rank's tensors are on disk. So it is
also the sign that the rank is done, which the first rank can wait for without any communication.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from colonnade.checkpoint.checked import Damaged
from colonnade.checkpoint.manifest import Block, FileRecord, GroupRecord, ItemRecord, TensorRecord, check_tiled
from colonnade.errors import CheckpointError


@dataclass(frozen=True)
class BlockNote:
    """A tensor that the rank holds some of, and the block of it that the rank wrote, if any."""

    label: str
    slot: str
    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    block: Block | None


@dataclass(frozen=True)
class GroupNote:
    """Some members of a parameter group; groups of equal index and digest are one."""

    index: int
    names: tuple[str, ...]
    digest: str
    options: ItemRecord


@dataclass
class Part:
    """All that one rank adds to the manifest."""

    rank: int
    saves_optimizer: bool
    blocks: list[BlockNote] = field(default_factory=list)
    groups: list[GroupNote] = field(default_factory=list)
    items: list[ItemRecord] = field(default_factory=list)
    file: FileRecord | None = None


def rank_file(rank: int) -> str:
    """The name of a rank's file of tensors."""
    return f"rank-{rank:05d}.safetensors"


def part_file(staged: Path, rank: int) -> Path:
    """Where a rank leaves its note."""
    return staged / f"rank-{rank:05d}.part"


def leave_part(staged: Path, part: Part) -> None:
    """Put the rank's note into the staged folder, whole or not at all."""
    target = part_file(staged, part.rank)
    unfinished = target.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(asdict(part)))
    os.rename(unfinished, target)


def take_part(staged: Path, rank: int) -> Part:
    """Read a rank's note and delete it."""
    path = part_file(staged, rank)
    content = json.loads(path.read_text())
    path.unlink()
    return Part(
        rank=content["rank"],
        saves_optimizer=content["saves_optimizer"],
        blocks=[_block_note(note) for note in content["blocks"]],
        groups=[
            GroupNote(note["index"], tuple(note["names"]), note["digest"], _item(note["options"]))
            for note in content["groups"]
        ],
        items=[_item(item) for item in content["items"]],
        file=FileRecord(**content["file"]) if content["file"] else None,
    )


def merge_tensors(parts: Sequence[Part]) -> tuple[TensorRecord, ...]:
    """The whole tensors; refuses one that ranks see differently, or whose blocks overlap or leave a gap."""
    found: dict[tuple[str, str], list[tuple[int, BlockNote]]] = {}
    for part in parts:
        for note in part.blocks:
            found.setdefault((note.label, note.slot), []).append((part.rank, note))
    return tuple(_merged(label, slot, notes) for (label, slot), notes in found.items())


def merge_groups(parts: Sequence[Part]) -> tuple[GroupRecord, ...] | None:
    """The parameter groups, or None where no optimizer was saved."""
    if not any(part.saves_optimizer for part in parts):
        return None
    found: dict[tuple[int, str], list[GroupNote]] = {}
    for part in parts:
        for note in part.groups:
            found.setdefault((note.index, note.digest), []).append(note)
    return tuple(
        GroupRecord(index, tuple(dict.fromkeys(name for note in notes for name in note.names)), notes[0].options)
        for (index, _), notes in sorted(found.items())
    )


def _merged(label: str, slot: str, notes: Sequence[tuple[int, BlockNote]]) -> TensorRecord:
    first_rank, first = notes[0]
    for rank, note in notes:
        if (note.shape, note.dtype) != (first.shape, first.dtype):
            raise CheckpointError(
                f"ranks do not agree on {label}: rank {first_rank} has {first.dtype} of shape {list(first.shape)} as a "
                f"whole, rank {rank} has {note.dtype} of {list(note.shape)}. Stages must have the names of the whole "
                f"model; uneven shards need place(..., shape=<whole shape>)."
            )
    names = tuple(dict.fromkeys(name for _, note in notes for name in note.names))
    blocks = tuple(note.block for _, note in notes if note.block is not None)
    record = TensorRecord(label, slot, names, first.shape, first.dtype, blocks)
    try:
        check_tiled(record)
    except Damaged as error:
        writers = ", ".join(str(rank) for rank, note in notes if note.block is not None)
        raise CheckpointError(
            f"{error} (from ranks {writers or 'none'}). Two stages may use one name for different tensors (stages must "
            f"have the names of the whole model), or the placements do not add up."
        ) from None
    return record


def _block_note(note: dict[str, Any]) -> BlockNote:
    block = note["block"]
    return BlockNote(
        note["label"],
        note["slot"],
        tuple(note["names"]),
        tuple(note["shape"]),
        note["dtype"],
        Block(block["file"], block["key"], tuple(block["offset"]), tuple(block["shape"])) if block else None,
    )


def _item(item: dict[str, Any]) -> ItemRecord:
    return ItemRecord(**{**item, "ranks": tuple(item["ranks"])})
