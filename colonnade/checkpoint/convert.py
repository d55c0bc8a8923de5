"""Checkpoints made into other files, in one process without a process group: a full file for plain torch, or N files."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from colonnade.checkpoint.collective import as_checkpoint_errors
from colonnade.checkpoint.format.boxes import whole_box
from colonnade.checkpoint.format.manifest import MANIFEST, Block, ItemRecord, Manifest, TensorRecord, tensors_file
from colonnade.checkpoint.format.tensors import Entry, TensorReader, write_tensors
from colonnade.checkpoint.storage.folder import (
    check_space,
    clean,
    publish,
    staging_name,
    step_of,
    sync_folder,
    told_of_space,
)
from colonnade.checkpoint.storage.lock import RunLock
from colonnade.checkpoint.storage.verify import newest_good, verify
from colonnade.errors import CheckpointError


def find_checkpoint(folder: str | Path, step: int | None = None) -> Path:
    """`folder` itself if it is a checkpoint; in a run's folder the newest good one, or that of `step`."""
    path = Path(folder)
    if step_of(path) is not None or (path / MANIFEST).exists():
        return path
    found, problems = newest_good(path, step)
    if found is None:
        wanted = f" of step {step}" if step is not None else ""
        raise CheckpointError("\n  ".join([f"{path} has no good checkpoint{wanted}", *problems]))
    return found.path


def export_full(checkpoint: str | Path, file: str | Path) -> Path:
    """Write all weights and buffers, whole, into one safetensors file that replaces `file`; returns it.

    `model.load_state_dict(safetensors.torch.load_file(file))` loads it. A tied weight is there under each of its
    names. Of a run's folder the newest good checkpoint is taken. It is verified first; one whole tensor is in memory at a time.
    """
    target = Path(file)
    with as_checkpoint_errors(f"exporting {checkpoint}"):
        source = find_checkpoint(checkpoint)
        manifest = verify(source)
        reader = TensorReader(source)
        weights = [record for record in manifest.tensors if not record.state_name]
        entries = [_entry(name, record, reader) for record in weights for name in record.names]
        needed = sum(entry.size for entry in entries)
        target.parent.mkdir(parents=True, exist_ok=True)
        check_space(target.parent, needed)
        unfinished = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
        try:
            with told_of_space(target.parent, needed):
                write_tensors(unfinished, entries)
            os.replace(unfinished, target)
            sync_folder(target.parent)
        finally:
            unfinished.unlink(missing_ok=True)
    return target


def reshard(checkpoint: str | Path, folder: str | Path, files: int) -> Path:
    """Write the checkpoint anew into another run's folder, as whole tensors spread over `files` files by size.

    No layout needs this: a checkpoint says where each block lies in its whole, so any layout loads it as it is. It
    serves storage, where many small blocks or a few large files are unwelcome. Nothing in it is changed, random
    streams and the layout that saved it included. The source is verified first.
    """
    source, target = Path(checkpoint), Path(folder)
    if files < 1:
        raise CheckpointError(f"a checkpoint cannot be spread over {files} files; give at least 1")
    with as_checkpoint_errors(f"resharding {source}"):
        manifest = verify(source)
        lock = RunLock(target)
        try:
            clean(target)
            check_space(target, manifest.size)
            return _rewrite(manifest, TensorReader(source), target, files)
        finally:
            lock.release()


class _Spread:
    """Tensors being dealt out to files, each to the one that has the least so far."""

    def __init__(self, reader: TensorReader, files: int) -> None:
        self.entries: dict[str, list[Entry]] = {tensors_file(at): [] for at in range(files)}
        self._sizes = dict.fromkeys(self.entries, 0)
        self._reader = reader

    def tensors(self, records: Sequence[TensorRecord]) -> tuple[TensorRecord, ...]:
        """The records as whole tensors, in the order given; the largest are dealt first."""
        moved = {id(record): self._whole(record) for record in sorted(records, key=lambda record: -record.size)}
        return tuple(moved[id(record)] for record in records)

    def item(self, record: ItemRecord, key: str) -> ItemRecord:
        """A value whose tensors move together, under a key that no other value has."""
        if record.file is None:
            return record
        moved = replace(record, key=key)
        tensors = [self._reader.entry(record.file, record.entry(at)) for at in range(record.tensors)]
        return replace(moved, file=self._deal([Entry.of(moved.entry(at), one) for at, one in enumerate(tensors)]))

    def _whole(self, record: TensorRecord) -> TensorRecord:
        if not record.size:
            return record
        key = f"optimizer/{record.state_name}/{record.label}" if record.state_name else f"model/{record.label}"
        file = self._deal([_entry(key, record, self._reader)])
        return replace(record, blocks=(Block(file, key, whole_box(record.shape).offset, record.shape),))

    def _deal(self, entries: Sequence[Entry]) -> str:
        """Give them to the file that has the least; its name."""
        file = min(self._sizes, key=lambda name: self._sizes[name])
        self.entries[file] += entries
        self._sizes[file] += sum(entry.size for entry in entries)
        return file


def _rewrite(manifest: Manifest, reader: TensorReader, folder: Path, files: int) -> Path:
    spread = _Spread(reader, files)
    tensors = spread.tensors(manifest.tensors)
    items = tuple(spread.item(item, f"{item.name}@{at}") for at, item in enumerate(manifest.items))
    groups = manifest.groups and tuple(
        replace(group, options=spread.item(group.options, f"{group.options.name}@{at}"))
        for at, group in enumerate(manifest.groups)
    )
    staged = folder / staging_name(manifest.step)
    staged.mkdir()
    try:
        with told_of_space(folder, manifest.size):
            written = tuple(write_tensors(staged / name, found) for name, found in spread.entries.items() if found)
            return publish(staged, replace(manifest, files=written, tensors=tensors, items=items, groups=groups))
    except BaseException:
        shutil.rmtree(staged, ignore_errors=True)
        raise


def _entry(key: str, record: TensorRecord, reader: TensorReader) -> Entry:
    """A whole tensor, read when its turn comes."""
    return Entry(key, record.dtype, record.shape, lambda: reader.whole(record))
