"""The folder of a model as transformers keeps it: which tensor goes into which file, the index, and how it gets its name."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from colonnade.checkpoint.fault import fault_point
from colonnade.checkpoint.format.entries import Entry
from colonnade.checkpoint.format.slices import INDEX
from colonnade.checkpoint.format.tensors import write_tensors
from colonnade.checkpoint.storage.exchange import place_folder

LARGEST = 5 * 10**9
"""Bytes of a file where nobody says otherwise."""
_ONE_FILE = "model.safetensors"
_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")


def files_of(sizes: Iterable[tuple[str, int]], limit: int) -> dict[str, list[str]]:
    """The names of the files, and the keys of each: in order, a new file where a tensor no longer fits."""
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
    """Write the index of the files, see all on disk, and put the folder in its place; no older weights stay in it."""
    if len(files) > 1:
        weight_map = {key: name for name, keys in files.items() for key in keys}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (staged / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    for file in staged.iterdir():
        with open(file, "rb") as opened:
            os.fsync(opened.fileno())
    fault_point("files written")
    place_folder(staged, target, lambda name: _WEIGHTS.fullmatch(name) is not None, (INDEX, _ONE_FILE))


def write_folder(entries: Sequence[Entry], staged: Path, target: Path, config: Path | None) -> None:
    """Write a folder of these tensors, by way of `staged`, with the files of the folder `config` that are no weights."""
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
