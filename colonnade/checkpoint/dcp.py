"""Folders of torch.distributed.checkpoint (DCP), read and written in one process, one tensor at a time.

Their metadata and all non-tensor values are pickles, so they are read only if the caller trusts them. torch's own code reads and
writes them. Decision 0008 gives the reasons why Colonnade's checkpoints have another format.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from colonnade.checkpoint.export import ForeignState
from colonnade.checkpoint.storage import place_folder
from colonnade.checkpoint.tensor_files import FileEntry, dtype_named, memory_for, name_of
from colonnade.errors import CheckpointError, listed

_METADATA = ".metadata"
_MODEL, _OPTIMIZERS = "model", ("optim", "optimizer", "optimizers")
_BESIDE = ("lr_scheduler", "dataloader", "train_state", "extra_state", "scheduler", "step", "epoch")
"""Top-level names of other state that trainers save next to the weights; these entries are ignored."""


def read_dcp(path: Path, trust: bool) -> ForeignState:
    """The weights of a DCP folder and, if its names follow torch's conventions, the state of its optimizer.

    Weights are under "model", as in torch's examples, or at the top level next to the optimizer, as in torchtitan.
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
        raise CheckpointError(f"{path} has no weights: its tensors are {listed(list(folder.tensors)[:8])}")
    state, groups = _optimizer(folder, weights)
    return ForeignState(weights, state, groups)


def write_dcp(state: ForeignState, staged: Path, target: Path) -> None:
    """Write weights under "model" and the optimizer under "optim", in the form of torch's `get_state_dict`.

    The folder appears, or the files of an earlier DCP folder are replaced, when everything is written to `staged`.
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
    """A flattened list as a list, and betas as a tuple, their type in every optimizer."""
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
