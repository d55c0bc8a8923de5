"""State that came from elsewhere, as tensors that are read when their turn comes, and a checkpoint of ours made of it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from colonnade.checkpoint.format.boxes import whole_box
from colonnade.checkpoint.format.entries import Entry
from colonnade.checkpoint.format.manifest import GroupRecord, LayoutRecord
from colonnade.checkpoint.format.values import encode
from colonnade.checkpoint.plan.notes import Outline, RankNote, entry_key
from colonnade.checkpoint.plan.pieces import SavePlan
from colonnade.checkpoint.storage.folder import published, staging_name
from colonnade.checkpoint.storage.lock import RunLock
from colonnade.checkpoint.storage.writer import StorageWriter


@dataclass
class ForeignState:
    """Whole weights by name, and what an optimizer kept for them: by their names, and by its own.

    `groups` has the names and options of each parameter group; None where there is no optimizer.
    """

    weights: dict[str, Entry]
    optimizer: Mapping[str, Mapping[str, Entry | Any]] = field(default_factory=dict)
    groups: list[tuple[list[str], dict[str, Any]]] | None = None


def write_checkpoint(state: ForeignState, folder: Path, step: int) -> Path:
    """Write it as the checkpoint of `step` of the run in `folder`, one tensor in memory at a time; returns its path.

    None of the run's other checkpoints is touched.
    """
    plan = SavePlan(RankNote(0, None if state.groups is None else []))
    for name, entry in state.weights.items():
        _add(plan, name, (name,), "", entry)
    for label, kept in state.optimizer.items():
        for name, value in kept.items():
            if isinstance(value, Entry):
                _add(plan, label, (), name, value)
            else:
                key = entry_key(label, name)
                plan.note.items.append(plan.add_item(key, (0,), encode(value, key)))
    for index, (names, options) in enumerate(state.groups or ()):
        item = plan.add_item(f"optimizer/options/{index}", (0,), encode(options, f"param_groups[{index}]"))
        assert plan.note.groups is not None
        plan.note.groups.append((str(index), GroupRecord(index, tuple(names), item, None)))
    plan.close()
    lock = RunLock(folder)
    try:
        staged = folder / staging_name(step)
        writer = StorageWriter(step, staged, 0, LayoutRecord(1, ()), plan.size, keep=sys.maxsize)
        try:
            writer.stage()
            writer.write(plan)
            writer.commit()
        except BaseException:
            writer.drop()
            raise
        return next(found.path for found in reversed(published(folder)) if found.step == step)
    finally:
        lock.release()


def _add(plan: SavePlan, label: str, names: tuple[str, ...], state_name: str, entry: Entry) -> None:
    box = whole_box(entry.shape)
    outline = Outline.of_rows(label, names, entry.shape, box)
    stop = entry.shape[0] if entry.shape else 1
    plan.add_entry(outline, 0, stop if box.numel else 0, state_name, replace(entry, key=entry_key(label, state_name)))
