"""Checkpoints made into other files, and out of them, in one process without a process group.

`import_checkpoint` and `export_checkpoint` know safetensors files, folders of transformers (`weights_folder`) and folders of
torch.distributed.checkpoint (`dcp`). Between them is a `ForeignState`, whose tensors are read when their turn comes.
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
from colonnade.parallel.boxes import whole_box
from colonnade.parallel.flat import MASTER
from colonnade.paths import local_path

FORMATS = ("safetensors", "hf", "dcp")


@dataclass
class ForeignState:
    """Whole weights by name, and what an optimizer kept for them: by their names, and by its own.

    `groups` has the names and options of each parameter group; None where there is no optimizer.
    """

    weights: dict[str, FileEntry]
    optimizer: Mapping[str, Mapping[str, FileEntry | Any]] = field(default_factory=dict)
    groups: list[tuple[list[str], dict[str, Any]]] | None = None


def write_checkpoint(state: ForeignState, folder: Path, step: int) -> Path:
    """Write it as the checkpoint of `step` of the run in `folder`, one tensor in memory at a time; returns its path.

    None of the run's other checkpoints is touched.
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
    # The same writer as that of a run, as its only rank; `keep` is so large that nothing is deleted.
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
    plan.add_rows(label, names, state_name, entry.shape, whole_box(entry.shape), named)


def find_checkpoint(folder: str | Path, step: int | None = None) -> Path:
    """`folder` itself if it is a checkpoint; in a run's folder the newest good one, or that of `step`."""
    path = local_path(folder, "the folder of checkpoints", CheckpointError)
    if step_of(path) is not None or (path / MANIFEST).exists():
        return path
    found, problems = newest_good(path, step)
    if found is None:
        wanted = f" of step {step}" if step is not None else ""
        raise CheckpointError("\n  ".join([f"{path} has no good checkpoint{wanted}", *problems]), code="C080")
    return found.path


def import_checkpoint(source: str | Path, folder: str | Path, kind: str, step: int = 0, *, trust: bool = False) -> Path:
    """Make the checkpoint of `step` of the run in `folder` out of a file or folder of another format; returns its path.

    `kind` is "safetensors" (a file), "hf" (a folder as transformers writes it: weights alone) or "dcp" (a folder of
    torch.distributed.checkpoint: weights and, where it has one, the optimizer). Names stay as they are. Pickles are read only
    with `trust`. One whole tensor is in memory at a time.
    """
    path = local_path(source, "what is imported", CheckpointError)
    with as_checkpoint_errors(f"importing {path}"):
        _check_format(kind)
        if step < 0:
            raise CheckpointError(f"a step is a whole number from 0 on, not {step!r}")
        if kind == "dcp":
            from colonnade.checkpoint.dcp import read_dcp  # which needs a part of torch that takes two seconds

            state = read_dcp(path, trust)
        else:
            if kind == "safetensors" and not path.is_file():
                raise CheckpointError(f"{path} is no file; give a safetensors file, or say --format hf for a folder")
            found = tensors_in(path, trust)
            state = ForeignState(
                {key: FileEntry(key, name_of(stored.dtype), stored.shape, stored.read) for key, stored in found.items()}
            )
        return write_checkpoint(state, local_path(folder, "the folder of checkpoints", CheckpointError), step)


def export_checkpoint(
    checkpoint: str | Path, target: str | Path, kind: str, step: int | None = None, config: str | Path | None = None
) -> Path:
    """Make a file or folder of another format out of a checkpoint; returns it. `kind` is as in `import_checkpoint`.

    "hf" takes config.json, and what else is no file of weights, from the folder `config`. A checkpoint is verified first.
    """
    with as_checkpoint_errors(f"exporting {checkpoint}"):
        _check_format(kind)
        out = local_path(target, "what is exported to", CheckpointError)
        home = None if config is None else local_path(config, "the folder of config.json", CheckpointError)
        if home is not None and (kind != "hf" or not (home / "config.json").is_file()):
            raise CheckpointError(f"config={str(config)!r}: give a folder with config.json, and format hf")
        source = find_checkpoint(checkpoint, step)
        if kind == "safetensors":
            return export_full(source, out)
        state = _state_of(source, under_all_names=kind == "dcp")
        needed = sum(entry.size for entry in state.weights.values())
        if out.exists() and not out.is_dir():
            raise CheckpointError(f"{out} is a file; give the name of a folder")
        with staging(out, needed) as staged:
            if kind == "dcp":
                from colonnade.checkpoint.dcp import write_dcp  # as above

                write_dcp(state, staged, out)
            else:
                write_folder(list(state.weights.values()), staged, out, home)
        return out


def _check_format(kind: str) -> None:
    if kind not in FORMATS:
        raise CheckpointError(f"the format is one of {listed(FORMATS)}, not {kind!r}")


def _state_of(source: Path, under_all_names: bool) -> ForeignState:
    """The weights and the optimizer's state of a checkpoint; a tied weight under its first name, or under all."""
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
    """Write all weights and buffers, whole, into one safetensors file that replaces `file`; returns it.

    `model.load_state_dict(safetensors.torch.load_file(file))` loads it. A tied weight is there under each of its
    names. Of a run's folder the newest good checkpoint is taken. It is verified first; one whole tensor is in memory at a time.
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
    """A whole tensor, read when its turn comes."""
    return FileEntry(key, record.dtype, record.shape, lambda: reader.whole(record))
