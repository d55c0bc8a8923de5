"""Checkpoints made into other files, in one process without a process group: a full file for plain torch."""

from __future__ import annotations

import os
from pathlib import Path

from colonnade.checkpoint.collective import as_checkpoint_errors
from colonnade.checkpoint.format.entries import Entry
from colonnade.checkpoint.format.manifest import MANIFEST, TensorRecord
from colonnade.checkpoint.format.tensors import TensorReader, write_tensors
from colonnade.checkpoint.storage.folder import check_space, saving_name, step_of, sync_folder, told_of_space
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
        reader = TensorReader(source, manifest)
        weights = [record for record in manifest.tensors if not record.state_name]
        entries = [_entry(name, record, reader) for record in weights for name in record.names]
        needed = sum(entry.size for entry in entries)
        target.parent.mkdir(parents=True, exist_ok=True)
        check_space(target.parent, needed)
        unfinished = target.with_name(saving_name(target))
        try:
            with told_of_space(target.parent, needed):
                write_tensors(unfinished, entries)
            os.replace(unfinished, target)
            sync_folder(target.parent)
        finally:
            unfinished.unlink(missing_ok=True)
    return target


def _entry(key: str, record: TensorRecord, reader: TensorReader) -> Entry:
    """A whole tensor, read when its turn comes."""
    return Entry(key, record.dtype, record.shape, lambda: reader.whole(record))
