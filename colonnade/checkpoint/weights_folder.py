"""Folders of weights in the format of transformers: reading, writing and replacing them.

A folder has `model.safetensors`, or several files and an index from tensor names to files. `tensors_in` lists the tensors without
reading their elements; `write_folder` and `publish_folder` write a staging folder and put it in place.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from colonnade.checkpoint.storage import fault_point, place_folder, sync
from colonnade.checkpoint.tensor_files import FileEntry, StoredTensor, stored_tensors, write_tensors
from colonnade.errors import CheckpointError
from colonnade.parallel.boxes import Box, full_box

INDEX = "model.safetensors.index.json"
LARGEST = 5 * 10**9
"""The default size of a file in bytes."""
_ONE_FILE = "model.safetensors"
_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")


@dataclass(frozen=True)
class UnpickledTensor:
    """A tensor of a trusted pickle file, memory-mapped: its bytes are read on access."""

    file: Path
    key: str
    value: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.value.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.value.shape)

    def __str__(self) -> str:
        return f"{self.key} in {self.file.name}"

    def read(self, box: Box | None = None) -> Tensor:
        """As `StoredTensor.read`."""
        return self.value[(full_box(self.shape) if box is None else box).slices_in(full_box(self.shape))].clone()

    def read_into(self, target: Tensor, box: Box) -> None:
        """As `StoredTensor.read_into`."""
        with torch.no_grad():
            target.copy_(self.value[box.slices_in(full_box(self.shape))])


AnyTensor = StoredTensor | UnpickledTensor


def tensors_in(path: Path, trust: bool = False) -> dict[str, AnyTensor]:
    """All tensors of a safetensors file or a folder in the format of transformers, by name, without reading their elements.

    Pickle files (pytorch_model.bin) are read only with `trust`, by torch's restricted unpickler.
    """
    if path.is_file():
        files = [path]
    elif path.is_dir():
        # A folder may have several kinds of files. A single safetensors file is preferred; pickles are the last resort.
        kinds = ("model.safetensors", INDEX, "pytorch_model.bin", "pytorch_model.bin.index.json")
        found = next((path / kind for kind in kinds if (path / kind).is_file()), None)
        if found is None:
            others = sorted(path.glob("*.safetensors"))
            if len(others) != 1:
                # `place_folder` removes the index first, so a killed save leaves none.
                text = f"{path} has no weights: it has neither model.safetensors nor {INDEX}"
                for aside in sorted(path.glob(".old-*"))[:1]:
                    text += f". A save was killed while it replaced them: save again, or move the files in {aside} back"
                raise CheckpointError(text, code="C081")
            (found,) = others
        files = [found]
        if found.suffix == ".json":
            try:
                names = sorted(set(json.loads(found.read_text())["weight_map"].values()))
            except (ValueError, KeyError, AttributeError, TypeError) as error:
                raise CheckpointError(f"{found} is not an index of weights: {error}", code="C081") from error
            # An index must not lead out of its folder.
            for name in names:
                if Path(name).name != name or not (path / name).is_file():
                    raise CheckpointError(
                        f"{found} refers to {name!r}, which is not a file in its folder; copy the complete folder again",
                        code="C081",
                    )
            files = [path / name for name in names]
    else:
        raise CheckpointError(
            f"{path} is neither a folder nor a file. Weights are read from disk; download a model from the hub first: "
            f"`hf download <name> --local-dir <folder>`",
            code="C081",
        )
    tensors: dict[str, AnyTensor] = {}
    for file in files:
        if file.suffix == ".safetensors":
            tensors |= stored_tensors(file)
            continue
        if not trust:
            raise CheckpointError(
                f"{file} is a pickle, which can run code when it is read. Convert it to safetensors (load and save it with "
                f"transformers, once, where you trust it), or pass trust=True to read it with torch's weights_only loader",
                code="C086",
            )
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        tensors |= {
            key: UnpickledTensor(file, key, value) for key, value in content.items() if isinstance(value, Tensor)
        }
    return tensors


def files_of(sizes: Iterable[tuple[str, int]], limit: int) -> dict[str, list[str]]:
    """The keys of each file by its name: in the given order, with a new file whenever a tensor would exceed the limit."""
    keys: list[str] = []
    files, taken = [keys], 0
    for key, size in sizes:
        if keys and taken + size > limit:
            keys, taken = [], 0
            files.append(keys)
        keys.append(key)
        taken += size
    if keys is files[0]:
        return {_ONE_FILE: keys}
    return {f"model-{at:05d}-of-{len(files):05d}.safetensors": keys for at, keys in enumerate(files, 1)}


def publish_folder(staged: Path, target: Path, files: Mapping[str, Sequence[str]], total: int) -> None:
    """Write the index, sync all files, and rename the folder or replace the weight files of an existing one."""
    if len(files) > 1:
        weight_map = {key: name for name, keys in files.items() for key in keys}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (staged / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    for file in staged.iterdir():
        sync(file)
    fault_point("files written")
    place_folder(staged, target, lambda name: _WEIGHTS.fullmatch(name) is not None, (INDEX, _ONE_FILE))


def write_folder(entries: Sequence[FileEntry], staged: Path, target: Path, config: Path | None) -> None:
    """Write a folder of these tensors by way of `staged`, with the config and tokenizer files of the folder `config`."""
    files = files_of(((entry.key, entry.size) for entry in entries), LARGEST)
    by_key = {entry.key: entry for entry in entries}
    staged.mkdir()
    for name, keys in files.items():
        write_tensors(staged / name, [by_key[key] for key in keys])
    for file in sorted(config.iterdir()) if config is not None else ():
        if (
            file.is_file()
            and file.suffix in (".json", ".txt", ".model", ".jinja")
            and not _WEIGHTS.fullmatch(file.name)
        ):
            shutil.copy2(file, staged / file.name)
    publish_folder(staged, target, files, sum(entry.size for entry in entries))
