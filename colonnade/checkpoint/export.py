"""Checkpoints made into other files, in one process without a process group: a full file for plain torch, or N files."""

from __future__ import annotations

import os
import secrets
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from colonnade.checkpoint.boxes import whole_box
from colonnade.checkpoint.folder import (
    check_space,
    clean,
    discard,
    make_folder,
    publish,
    published,
    staging_name,
    step_of,
    sync_folder,
    told_of_space,
    write_new,
)
from colonnade.checkpoint.lock import RunLock
from colonnade.checkpoint.manifest import MANIFEST, Block, FileRecord, ItemRecord, Manifest, TensorRecord, all_items
from colonnade.checkpoint.parts import rank_file
from colonnade.checkpoint.tensors_file import Entry, TensorReader, type_name, write_tensors
from colonnade.checkpoint.together import as_checkpoint_errors
from colonnade.checkpoint.verify import verify
from colonnade.errors import CheckpointError


def find_checkpoint(path: str | Path, step: int | None = None) -> Path:
    """`path` itself if it is a checkpoint; in a run's folder the newest good one, or that of `step`."""
    folder = Path(path)
    if step_of(folder) is not None or (folder / MANIFEST).exists():
        return folder
    found = [entry for entry in reversed(published(folder)) if step in (None, entry.step)]
    problems = []
    for entry in found:
        try:
            verify(entry.path)
        except CheckpointError as error:
            problems.append(f"{entry.path.name}: {error}")
        else:
            return entry.path
    wanted = f" of step {step}" if step is not None else ""
    raise CheckpointError("\n  ".join([f"{folder} has no good checkpoint{wanted}", *problems]))


def export_full(checkpoint_folder: str | Path, file: str | Path) -> Path:
    """Write all weights and buffers, whole, into one safetensors file that replaces `file`; returns it.

    `model.load_state_dict(safetensors.torch.load_file(file))` loads it. A tied weight is there under each of its
    names. The checkpoint is verified first; one whole tensor is in memory at a time.
    """
    source, target = Path(checkpoint_folder), Path(file)
    with as_checkpoint_errors(f"exporting {source}"):
        manifest = verify(source)
        reader = TensorReader(source)
        weights = [record for record in manifest.tensors if not record.slot]
        entries = [
            Entry(name, record.dtype, record.shape, _whole(reader, record))
            for record in weights
            for name in record.names
        ]
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


def reshard(checkpoint_folder: str | Path, folder: str | Path, files: int) -> Path:
    """Write the checkpoint anew into another run's folder, as whole tensors spread over `files` files by size.

    No layout needs this: a checkpoint says where each block lies in its whole, so any layout loads it as it is. It
    serves storage, where many small blocks or a few large files are unwelcome. Nothing in it is changed, random
    streams and the layout that saved it included. The source is verified first.
    """
    source, target = Path(checkpoint_folder), Path(folder)
    if files < 1:
        raise CheckpointError(f"a checkpoint cannot be spread over {files} files; give at least 1")
    with as_checkpoint_errors(f"resharding {source}"):
        manifest = verify(source)
        make_folder(target)
        lock = RunLock(target)
        try:
            clean(target)
            check_space(target, manifest.size)
            return _rewrite(manifest, TensorReader(source), target, files)
        finally:
            lock.release()


def _rewrite(manifest: Manifest, reader: TensorReader, folder: Path, files: int) -> Path:
    names = [rank_file(at) for at in range(files)]
    contents: dict[str, list[Entry]] = {name: [] for name in names}
    tensors = [
        _placed(record, reader, contents) for record in sorted(manifest.tensors, key=lambda record: -record.size)
    ]
    order = {(record.label, record.slot): at for at, record in enumerate(manifest.tensors)}
    tensors.sort(key=lambda record: order[record.label, record.slot])
    moved = {id(item): _moved(item, at, reader, contents[names[0]]) for at, item in enumerate(all_items(manifest))}
    staged = folder / staging_name(manifest.step)
    staged.mkdir()
    try:
        with told_of_space(folder, manifest.size):
            written = tuple(write_tensors(staged / name, contents[name]) for name in names if contents[name])
            remade = replace(
                manifest,
                files=written,
                tensors=tuple(tensors),
                items=tuple(moved[id(item)] for item in manifest.items),
                groups=None
                if manifest.groups is None
                else tuple(replace(group, options=moved[id(group.options)]) for group in manifest.groups),
            )
            write_new(staged / MANIFEST, remade.dump())
            return publish(staged, manifest.step)
    except BaseException:
        discard(staged)
        raise


def _placed(record: TensorRecord, reader: TensorReader, contents: dict[str, list[Entry]]) -> TensorRecord:
    """The record as one block in the file that has the least so far."""
    if not record.size:
        return record
    file = min(contents, key=lambda name: sum(entry.size for entry in contents[name]))
    key = f"optimizer/{record.slot}/{record.label}" if record.slot else f"model/{record.label}"
    contents[file].append(Entry(key, record.dtype, record.shape, _whole(reader, record)))
    return replace(record, blocks=(Block(file, key, whole_box(record.shape).offset, record.shape),))


def _whole(reader: TensorReader, record: TensorRecord):  # type: ignore[no-untyped-def]
    return lambda: reader.new(whole_box(record.shape), record.blocks, record.dtype)
