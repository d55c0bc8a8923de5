"""Import and export of checkpoints in other formats, in one process without a process group.

`import_checkpoint` and `export_checkpoint` convert safetensors files, transformers folders (`full_weights.write_folder`) and
folders of torch.distributed.checkpoint (DCP). The intermediate form is a `ForeignState`, whose tensors are read on demand.

DCP folders are read and written by torch's own code, one tensor at a time (`read_dcp`, `write_dcp`). Their metadata and all
non-tensor values are pickles, so DCP folders are read only if the caller trusts them. Decision 0008 gives the reasons why
Colonnade's checkpoints have another format.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from colonnade.checkpoint.full_weights import tensors_in, write_folder
from colonnade.checkpoint.manifest import MANIFEST, GroupRecord, ItemRecord, LayoutRecord, TensorRecord
from colonnade.checkpoint.save import SavePlan, StorageWriter, entry_key
from colonnade.checkpoint.storage import (
    RunLock,
    newest_good,
    place_file,
    place_folder,
    published,
    staging,
    staging_name,
    step_of,
    verify,
)
from colonnade.checkpoint.tensor_files import FileEntry, TensorReader, dtype_named, memory_for, name_of, write_tensors
from colonnade.checkpoint.values import decode, encode
from colonnade.errors import CheckpointError, as_checkpoint_errors, listed
from colonnade.parallel.boxes import full_box
from colonnade.parallel.flat import MASTER
from colonnade.paths import local_path

FORMATS = ("safetensors", "hf", "dcp")


@dataclass
class ForeignState:
    """A checkpoint in any format: the full weights by name, and the optimizer state by weight name and state name.

    `groups` has the weight names and options of each parameter group; None without an optimizer.
    """

    weights: dict[str, FileEntry]
    optimizer: Mapping[str, Mapping[str, FileEntry | Any]] = field(default_factory=dict)
    groups: list[tuple[list[str], dict[str, Any]]] | None = None


def write_checkpoint(state: ForeignState, folder: Path, step: int) -> Path:
    """Write the state as the checkpoint of `step` in a run's folder, and return its path. One tensor is in memory at a time.

    The other checkpoints of the run are kept.
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
    """Find a checkpoint: `folder` itself if `folder` is a checkpoint; in a run's folder, the newest intact checkpoint or the
    checkpoint of `step`.
    """
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
        kind: "safetensors" (a file), "hf" (a transformers folder, only weights) or "dcp" (a folder of
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
            raise CheckpointError(f"step is {step!r}; pass a whole number, 0 or larger")
        if kind == "dcp":
            state = read_dcp(path, trust)
        else:
            if kind == "safetensors" and not path.is_file():
                raise CheckpointError(
                    f"{path} is not a file. Pass a safetensors file, or pass --format hf to import a folder."
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
        checkpoint: A checkpoint; or a run's folder, from which the newest intact checkpoint, or the checkpoint of
        `step`, is exported. target: The file or folder to write; an existing one is replaced.
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
            raise CheckpointError(
                f"config is {str(config)!r}; pass a folder that contains config.json. The option config is allowed "
                "only with format hf."
            )
        source = find_checkpoint(checkpoint, step)
        if kind == "safetensors":
            return export_full(source, out)
        state = _state_of(source, under_all_names=kind == "dcp")
        needed = sum(entry.size for entry in state.weights.values())
        if out.exists() and not out.is_dir():
            raise CheckpointError(f"{out} is a file; give the name of a folder")
        with staging(out, needed) as staged:
            if kind == "dcp":
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


_METADATA = ".metadata"
_MODEL, _OPTIMIZERS = "model", ("optim", "optimizer", "optimizers")
_BESIDE = ("lr_scheduler", "dataloader", "train_state", "extra_state", "scheduler", "step", "epoch")
"""Top-level names of other state that trainers save next to the weights; these entries are ignored."""


def read_dcp(path: Path, trust: bool) -> ForeignState:
    """The weights of a DCP folder and, if its names follow torch's conventions, the state of its optimizer.

    Weights are expected under "model", as in torch's examples, or at the top level next to the optimizer, as in torchtitan.
    """
    if not (path / _METADATA).is_file():
        raise CheckpointError(f"{path} has no {_METADATA}, so it is not a folder of torch.distributed.checkpoint")
    if not trust:
        raise CheckpointError(
            f"{path / _METADATA} is a pickle, which can run code when it is read. If you trust its author, pass --trust "
            f"(trust=True)",
            code="C086",
        )
    folder = _Folder(path)
    weights = {name: folder.entry(key) for name, key in folder.weights.items()}
    if not weights:
        raise CheckpointError(
            f"{path} has no model weights. The folder contains the tensors {listed(list(folder.tensors)[:8])}."
        )
    state, groups = _optimizer(folder, weights)
    return ForeignState(weights, state, groups)


def write_dcp(state: ForeignState, staged: Path, target: Path) -> None:
    """Write a DCP folder: weights under "model" and the optimizer under "optim", in the form of torch's `get_state_dict`.

    Everything is first written to `staged`. Then the folder `target` appears, or the files of an earlier DCP folder are replaced.
    """
    if target.exists() and any(target.iterdir()) and not (target / _METADATA).is_file():
        raise CheckpointError(f"{target} exists and is not a folder of torch.distributed.checkpoint; give another name")
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    content: dict[str, Any] = {_MODEL: {name: _empty(entry) for name, entry in state.weights.items()}}
    entries = {f"{_MODEL}.{name}": entry for name, entry in state.weights.items()}
    if state.groups is not None:
        kept = {
            label: {name: _empty(value) if isinstance(value, FileEntry) else value for name, value in values.items()}
            for label, values in state.optimizer.items()
        }
        groups = [{"params": names, **options} for names, options in state.groups]
        content[_OPTIMIZERS[0]] = {"state": kept, "param_groups": groups}
        for label, values in state.optimizer.items():
            for name, value in values.items():
                if isinstance(value, FileEntry):
                    entries[f"{_OPTIMIZERS[0]}.state.{label}.{name}"] = value

    class Planner(DefaultSavePlanner):
        def lookup_object(self, index: Any) -> Any:
            """Read a tensor just before torch writes it, so that one tensor is in memory at a time."""
            return entries[index.fqn].read() if index.fqn in entries else super().lookup_object(index)

    try:
        writer = FileSystemWriter(staged, thread_count=1)
        with _without_warnings():
            save(content, storage_writer=writer, planner=Planner(), no_dist=True)
        place_folder(staged, target, lambda name: name.endswith(".distcp"), (_METADATA,))
    except CheckpointException as error:  # derives from BaseException
        raise CheckpointError(f"torch could not write {target}: {error}") from error


class _Folder:
    """A trusted folder: its tensors and other values by key, and the path of each in the nested state."""

    def __init__(self, path: Path) -> None:
        from torch.distributed.checkpoint.filesystem import FileSystemReader

        metadata = FileSystemReader(path).read_metadata()

        class Reader(FileSystemReader):
            def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
                return metadata

        self._path, self._reader = path, Reader(path)
        self._metadata: dict[str, Any] = metadata.state_dict_metadata
        places: dict[str, tuple[Any, ...]] = metadata.planner_data or {}
        self.places = {key: tuple(map(str, places.get(key, (key,)))) for key in self._metadata}
        self.tensors: dict[str, Any] = {key: kept for key, kept in self._metadata.items() if hasattr(kept, "chunks")}
        # Without nested paths, "model." may be part of a weight's own name; an optimizer next to it shows that it is not.
        has_optimizer = any(_root(place) in _OPTIMIZERS for place in self.places.values())
        under = any(place[0] == _MODEL and len(place) > 1 for place in self.places.values()) or any(
            key.startswith(f"{_MODEL}.") and has_optimizer for key in self.tensors
        )
        self.weights = dict(self._weights(under))

    def _weights(self, under: bool) -> Iterator[tuple[str, str]]:
        """(name, key) of each weight; `under`: the weights are under "model"."""
        for key in self.tensors:
            place = self.places[key]
            text = ".".join(place)
            if under and text.startswith(f"{_MODEL}."):
                yield text.removeprefix(f"{_MODEL}."), key
            elif not under and _root(place) not in (*_OPTIMIZERS, *_BESIDE):
                yield text, key

    def entry(self, key: str) -> FileEntry:
        """A tensor, read on demand."""
        kept = self.tensors[key]
        shape, dtype = tuple(kept.size), kept.properties.dtype
        return FileEntry(key, name_of(dtype, key), shape, lambda: self._load(key, memory_for(shape, dtype)))

    def value(self, key: str) -> Any:
        """A non-tensor value."""
        return self._load(key, None)

    def _load(self, key: str, target: Any) -> Any:
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.state_dict_loader import load

        state = {key: target}
        try:
            with _without_warnings():
                load(state, storage_reader=self._reader, no_dist=True)
        except CheckpointException as error:  # derives from BaseException
            raise CheckpointError(f"{key} cannot be read from {self._path}: {error}") from error
        return state[key]


def _optimizer(folder: _Folder, weights: Iterable[str]) -> tuple[dict[str, dict[str, Any]], Any]:
    """The state of each weight, and the groups; empty unless the names follow `get_optimizer_state_dict`."""
    state: dict[str, dict[str, Any]] = {}
    named: dict[str, dict[str, Any]] = {}
    numbered: dict[int, dict[str, Any]] = {}
    known = set(weights)
    for key, place in folder.places.items():
        root, _, text = ".".join(place).partition(".")
        kind, _, text = text.partition(".")
        label, _, name = text.rpartition(".")
        if root not in _OPTIMIZERS:
            continue
        if kind == "state" and label in known:
            state.setdefault(label, {})[name] = folder.entry(key) if key in folder.tensors else folder.value(key)
        elif kind == "param_groups" and label in known:
            named.setdefault(label, {})[name] = _plain(folder, key)
        elif kind == "param_groups" and text.partition(".")[0].isdigit():
            index, _, option = text.partition(".")
            _set(numbered.setdefault(int(index), {}), option.split("."), _plain(folder, key))
    # Options are flattened under the index of their group or, by `get_optimizer_state_dict`, under the name of each weight.
    if numbered:
        groups = [
            (
                [str(name) for name in _listed(options.pop("params", []))],
                {key: _listed(value, key) for key, value in options.items()},
            )
            for _, options in sorted(numbered.items())
        ]
        return state, groups
    alike: dict[str, tuple[list[str], dict[str, Any]]] = {}
    for label, options in named.items():
        alike.setdefault(repr(sorted(options.items())), ([], options))[0].append(label)
    return state, list(alike.values()) or None


def _plain(folder: _Folder, key: str) -> Any:
    value: Any = folder.entry(key).read() if key in folder.tensors else folder.value(key)
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _set(options: dict[str, Any], path: list[str], value: Any) -> None:
    """Undo the flattening of a list, which is stored as one entry for each of its values."""
    name, *places = path
    if places:
        (at,) = places
        options.setdefault(name, {})[int(at)] = value
    else:
        options[name] = value


def _listed(value: Any, key: str = "") -> Any:
    """Convert a flattened list to a list, and betas to a tuple, which is their type in every optimizer."""
    found = [value[at] for at in sorted(value)] if isinstance(value, dict) else value
    return tuple(found) if key == "betas" and isinstance(found, list) else found


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Suppress torch's warning about a single process, which is intended here (`no_dist=True`)."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _root(place: tuple[str, ...]) -> str:
    return place[0].partition(".")[0]


def _empty(entry: Any) -> Any:
    return torch.empty(entry.shape, dtype=dtype_named(entry.dtype), device="meta")
