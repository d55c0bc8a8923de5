"""Import and export of checkpoints in other formats, in one process without a process group.

`import_checkpoint` and `export_checkpoint` convert safetensors files, folders of transformers (`weights_folder`) and folders of
torch.distributed.checkpoint (`dcp`), by way of a `ForeignState`, whose tensors are read on demand.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from colonnade.checkpoint.manifest import MANIFEST, GroupRecord, ItemRecord, LayoutRecord, TensorRecord
from colonnade.checkpoint.save import StorageWriter
from colonnade.checkpoint.save_plan import SavePlan, entry_key
from colonnade.checkpoint.storage import (
    RunLock,
    newest_good,
    place_file,
    published,
    staging,
    staging_name,
    step_of,
    verify,
)
from colonnade.checkpoint.tensor_files import FileEntry, TensorReader, name_of, write_tensors
from colonnade.checkpoint.values import decode, encode
from colonnade.checkpoint.weights_folder import tensors_in, write_folder
from colonnade.errors import CheckpointError, as_checkpoint_errors, listed
from colonnade.parallel.boxes import full_box
from colonnade.parallel.flat import MASTER
from colonnade.paths import local_path

FORMATS = ("safetensors", "hf", "dcp")


@dataclass
class ForeignState:
    """Full weights by name, and the optimizer state of each by weight name and state name.

    `groups` has the weight names and options of each parameter group; None without an optimizer.
    """

    weights: dict[str, FileEntry]
    optimizer: Mapping[str, Mapping[str, FileEntry | Any]] = field(default_factory=dict)
    groups: list[tuple[list[str], dict[str, Any]]] | None = None


def write_checkpoint(state: ForeignState, folder: Path, step: int) -> Path:
    """Write the state as the checkpoint of `step` in a run's folder, one tensor in memory at a time; returns its path.

    The run's other checkpoints are kept.
    """
    plan = SavePlan(0, None if state.groups is None else [])
    for name, entry in state.weights.items():
        _add(plan, name, (name,), "", entry)
    for label, kept in state.optimizer.items():
        for name, value in kept.items():
            if isinstance(value, FileEntry):
                _add(plan, label, (), name, value)
            else:
                key = entry_key(label, name)
                plan.items.append(plan.add_item(key, (0,), encode(value, key)))
    for index, (names, options) in enumerate(state.groups or ()):
        item = plan.add_item(f"optimizer/options/{index}", (0,), encode(options, f"param_groups[{index}]"))
        assert plan.groups is not None
        plan.groups.append((str(index), GroupRecord(index, tuple(names), item, None)))
    # The same writer as in training, for a world of one rank; `keep` is so large that nothing is deleted.
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


def _add(plan: SavePlan, label: str, names: tuple[str, ...], state_name: str, entry: FileEntry) -> None:
    named = replace(entry, key=entry_key(label, state_name))
    plan.add_rows(label, names, state_name, entry.shape, full_box(entry.shape), named)


def find_checkpoint(folder: str | Path, step: int | None = None) -> Path:
    """`folder` itself if it is a checkpoint; in a run's folder, the newest intact checkpoint (or that of `step`)."""
    path = local_path(folder, "the folder of checkpoints", CheckpointError)
    if step_of(path) is not None or (path / MANIFEST).exists():
        return path
    found, problems = newest_good(path, step)
    if found is None:
        wanted = f" of step {step}" if step is not None else ""
        raise CheckpointError("\n  ".join([f"{path} has no intact checkpoint{wanted}", *problems]), code="C080")
    return found.path


def import_checkpoint(source: str | Path, folder: str | Path, kind: str, step: int = 0, *, trust: bool = False) -> Path:
    """Convert a file or folder of another format to a checkpoint. One full tensor is in memory at a time.

    Args:
        source: The file or folder to read. Names of weights are not changed.
        folder: The run's folder, which gets the new checkpoint.
        kind: "safetensors" (a file), "hf" (a folder of transformers: only weights) or "dcp" (a folder of
            torch.distributed.checkpoint: weights and, if present, the optimizer).
        step: The step of the new checkpoint.
        trust: Read files that can run code while they are read: DCP folders and pytorch_model.bin.

    Returns:
        The path of the new checkpoint.
    """
    path = local_path(source, "what is imported", CheckpointError)
    with as_checkpoint_errors(f"importing {path}"):
        _check_format(kind)
        if step < 0:
            raise CheckpointError(f"step={step!r}: pass a whole number from 0 on")
        if kind == "dcp":
            from colonnade.checkpoint.dcp import read_dcp  # here, because its part of torch takes two seconds to import

            state = read_dcp(path, trust)
        else:
            if kind == "safetensors" and not path.is_file():
                raise CheckpointError(
                    f"{path} is not a file; give a safetensors file, or pass --format hf for a folder"
                )
            found = tensors_in(path, trust)
            state = ForeignState(
                {key: FileEntry(key, name_of(stored.dtype), stored.shape, stored.read) for key, stored in found.items()}
            )
        return write_checkpoint(state, local_path(folder, "the folder of checkpoints", CheckpointError), step)


def export_checkpoint(
    checkpoint: str | Path, target: str | Path, kind: str, step: int | None = None, config: str | Path | None = None
) -> Path:
    """Convert a checkpoint to a file or folder of another format. The checkpoint is verified first.

    Args:
        checkpoint: A checkpoint, or a run's folder (its newest intact checkpoint, or that of `step`).
        target: The file or folder to write; an existing one is replaced.
        kind: The format, as in `import_checkpoint`.
        step: The step to export from a run's folder.
        config: For "hf", a folder with config.json and tokenizer files to copy.

    Returns:
        The path of the file or folder.
    """
    with as_checkpoint_errors(f"exporting {checkpoint}"):
        _check_format(kind)
        out = local_path(target, "what is exported to", CheckpointError)
        home = None if config is None else local_path(config, "the folder of config.json", CheckpointError)
        if home is not None and (kind != "hf" or not (home / "config.json").is_file()):
            raise CheckpointError(f"config={str(config)!r}: give a folder with config.json, and use it with format hf")
        source = find_checkpoint(checkpoint, step)
        if kind == "safetensors":
            return export_full(source, out)
        state = _state_of(source, under_all_names=kind == "dcp")
        needed = sum(entry.size for entry in state.weights.values())
        if out.exists() and not out.is_dir():
            raise CheckpointError(f"{out} is a file; give the name of a folder")
        with staging(out, needed) as staged:
            if kind == "dcp":
                from colonnade.checkpoint.dcp import write_dcp

                write_dcp(state, staged, out)
            else:
                write_folder(list(state.weights.values()), staged, out, home)
        return out


def _check_format(kind: str) -> None:
    if kind not in FORMATS:
        raise CheckpointError(f"format {kind!r} is unknown; allowed are {listed(FORMATS)}")


def _state_of(source: Path, under_all_names: bool) -> ForeignState:
    """The weights and the optimizer state of a checkpoint, with tied weights under their first name or under all names."""
    manifest = verify(source)
    reader = TensorReader(source, manifest)
    weights: dict[str, FileEntry] = {}
    names: dict[str, str] = {}
    for record in (record for record in manifest.tensors if not record.state_name):
        names[record.label] = record.names[0]
        weights |= {name: _entry(name, record, reader) for name in record.names[: None if under_all_names else 1]}
    kept: dict[str, dict[str, Any]] = {}
    for record in manifest.tensors:
        if record.state_name and record.state_name != MASTER:
            own = kept.setdefault(names[record.label], {})
            own[record.state_name] = _entry(record.state_name, record, reader)

    def decoded(item: ItemRecord) -> Any:
        return decode(item.value, lambda at: reader.entry(item.file or "", item.entry(at)))

    for item in manifest.items:
        kind, _, rest = item.name.partition("/")
        state_name, _, label = rest.partition("/")
        if kind == "optimizer":
            kept.setdefault(names[label], {})[state_name] = decoded(item)
    merged: dict[int, tuple[list[str], dict[str, Any]]] = {}
    for group in manifest.groups or ():
        merged.setdefault(group.index, ([], decoded(group.options)))[0].extend(names[label] for label in group.names)
    return ForeignState(weights, kept, None if manifest.groups is None else [merged[at] for at in sorted(merged)])


def export_full(checkpoint: str | Path, file: str | Path) -> Path:
    """Write all full weights and buffers into one safetensors file, for `model.load_state_dict(load_file(file))`.

    The checkpoint is verified first, and one full tensor is in memory at a time. A tied weight is written under all of its names.

    Args:
        checkpoint: A checkpoint, or a run's folder, whose newest intact checkpoint is exported.
        file: The file to write; an existing one is replaced.

    Returns:
        The path of the file.
    """
    target = local_path(file, "the file that is exported to", CheckpointError)
    with as_checkpoint_errors(f"exporting {checkpoint}"):
        source = find_checkpoint(checkpoint)
        manifest = verify(source)
        reader = TensorReader(source, manifest)
        weights = [record for record in manifest.tensors if not record.state_name]
        entries = [_entry(name, record, reader) for record in weights for name in record.names]
        with staging(target, sum(entry.size for entry in entries)) as staged:
            write_tensors(staged, entries)
            place_file(staged, target)
    return target


def _entry(key: str, record: TensorRecord, reader: TensorReader) -> FileEntry:
    """The entry of a full tensor, read on demand."""
    return FileEntry(key, record.dtype, record.shape, lambda: reader.full(record))
