"""Folders of torch.distributed.checkpoint (DCP), read and written in one process, one tensor at a time.

Their metadata are a pickle, and so is each value that is no tensor: they are read only where they are trusted. Torch's own
code reads and writes them. Decision 0008 says why our checkpoints are no such folders.
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
"""Names of the bookkeeping that trainers save beside weights at the top of a folder; it is left out."""


def read_dcp(path: Path, trust: bool) -> ForeignState:
    """The weights of a DCP folder and, where its names tell, the state of its optimizer.

    Weights lie under "model", as in torch's examples, or at the top beside the optimizer, as torchtitan's do.
    """
    if not (path / _METADATA).is_file():
        raise CheckpointError(f"{path} has no {_METADATA}: it is no folder of torch.distributed.checkpoint")
    if not trust:
        raise CheckpointError(
            f"{path / _METADATA} is a pickle, which can run code when it is read. If you trust who wrote it, pass --trust "
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
    """Write weights under "model" and the optimizer under "optim", as torch's `get_state_dict` gives them.

    The folder appears, or its files take the place of an earlier DCP folder's, when all of it is written to `staged`.
    """
    if target.exists() and any(target.iterdir()) and not (target / _METADATA).is_file():
        raise CheckpointError(f"{target} is there, and no folder of torch.distributed.checkpoint; give another name")
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
            """A tensor when its turn to be written comes."""
            return entries[index.fqn].read() if index.fqn in entries else super().lookup_object(index)

    try:
        writer = FileSystemWriter(staged, thread_count=1)
        with _without_warnings():
            save(content, storage_writer=writer, planner=Planner(), no_dist=True)
        place_folder(staged, target, lambda name: name.endswith(".distcp"), (_METADATA,))
    except CheckpointException as error:  # which is no Exception
        raise CheckpointError(f"torch could not write {target}: {error}") from error


class _Folder:
    """A folder that is trusted: its tensors and other values by their keys, and the place of each in the state."""

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
        under = any(place[0] == _MODEL and len(place) > 1 for place in self.places.values()) or any(
            key.startswith(f"{_MODEL}.") and self._has_optimizer for key in self.tensors
        )
        self.weights = dict(self._weights(under))

    @property
    def _has_optimizer(self) -> bool:
        return any(_root(place) in _OPTIMIZERS for place in self.places.values())

    def _weights(self, under: bool) -> Iterator[tuple[str, str]]:
        for key in self.tensors:
            place = self.places[key]
            text = ".".join(place)
            if under and text.startswith(f"{_MODEL}."):
                yield text.removeprefix(f"{_MODEL}."), key
            elif not under and _root(place) not in (*_OPTIMIZERS, *_BESIDE):
                yield text, key

    def entry(self, key: str) -> FileEntry:
        """A tensor, read when its turn comes."""
        kept = self.tensors[key]
        shape, dtype = tuple(kept.size), kept.properties.dtype
        return FileEntry(key, name_of(dtype, key), shape, lambda: self._load(key, memory_for(shape, dtype)))

    def value(self, key: str) -> Any:
        """A value that is no tensor."""
        return self._load(key, None)

    def _load(self, key: str, target: Any) -> Any:
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.state_dict_loader import load

        state = {key: target}
        try:
            with _without_warnings():
                load(state, storage_reader=self._reader, no_dist=True)
        except CheckpointException as error:  # which is no Exception
            raise CheckpointError(f"{key} cannot be read from {self._path}: {error}") from error
        return state[key]


def _optimizer(folder: _Folder, weights: Iterable[str]) -> tuple[dict[str, dict[str, Any]], Any]:
    """The state of each weight, and the groups; nothing where the names are not those of `get_optimizer_state_dict`."""
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
    # Options lie flattened under their group's number, or, as `get_optimizer_state_dict` gives them, under each weight's name.
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
    """Put back what was flattened: a list is one entry for each of its values."""
    name, *places = path
    if places:
        (at,) = places
        options.setdefault(name, {})[int(at)] = value
    else:
        options[name] = value


def _listed(value: Any, key: str = "") -> Any:
    """A flattened list as a list; betas are a tuple in every optimizer."""
    found = [value[at] for at in sorted(value)] if isinstance(value, dict) else value
    return tuple(found) if key == "betas" and isinstance(found, list) else found


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Torch warns that it works in one process even where `no_dist=True` asks for it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _root(place: tuple[str, ...]) -> str:
    return place[0].partition(".")[0]


def _empty(entry: Any) -> Any:
    return torch.empty(entry.shape, dtype=dtype_named(entry.dtype), device="meta")
