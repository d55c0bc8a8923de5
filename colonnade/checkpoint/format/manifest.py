"""The manifest of a checkpoint: what was saved, on which layout, in which files, and where each block lies.

Plain data without torch. `Manifest.dump` writes one canonical text with a digest of itself; `parse` takes nothing
else, so that a changed byte anywhere is found, and takes no number or name on trust.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from math import prod
from typing import Any

from colonnade.checkpoint.format.boxes import Box, tiles
from colonnade.checkpoint.format.records import Damaged, from_json, to_json
from colonnade.context.layout import Layout
from colonnade.errors import CheckpointError
from colonnade.version import __version__

FORMAT = 1
MANIFEST = "manifest.json"
WIDTHS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}
"""Bytes of an element, by the names that safetensors gives to types."""
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*\.safetensors")
"""A plain name of a file of tensors: no folder, no "..", nothing hidden."""


def tensors_file(rank: int) -> str:
    """The name of a rank's file of tensors."""
    return f"rank-{rank:05d}.safetensors"


@dataclass(frozen=True)
class FileRecord:
    """One file of tensors."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Block:
    """Some elements of a tensor: the entry `key` of `file` is the box at `offset`."""

    file: str
    key: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def box(self) -> Box:
        return Box(self.offset, self.shape)


@dataclass(frozen=True)
class TensorRecord:
    """A whole tensor: a weight or buffer (`state_name` is ""), or what the optimizer keeps for one under `state_name`.

    `names` are all names under which a layout knows it (a tied weight has several), `label` its first.
    """

    label: str
    state_name: str
    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    blocks: tuple[Block, ...]

    @property
    def size(self) -> int:
        """Its bytes."""
        return prod(self.shape) * WIDTHS[self.dtype]


@dataclass(frozen=True)
class GroupRecord:
    """Options of an optimizer's parameter group, and the labels of its members. `index` is its place."""

    index: int
    names: tuple[str, ...]
    options: ItemRecord


@dataclass(frozen=True)
class ItemRecord:
    """A JSON value, in which `{"$tensor": n}` stands for the entry `<key>#n` of `file`.

    `ranks` are those that held this value; another record of the same name has the others'.
    """

    name: str
    ranks: tuple[int, ...]
    value: Any
    tensors: int
    file: str | None
    key: str

    def entry(self, at: int) -> str:
        """The name of one of its tensors in its file."""
        return f"{self.key}#{at}"


@dataclass(frozen=True)
class LayoutRecord:
    """The axes of the world that saved: (name, size, mode) of each, slowest first."""

    world_size: int
    axes: tuple[tuple[str, int, str], ...]

    @classmethod
    def of(cls, layout: Layout) -> LayoutRecord:
        return cls(layout.world_size, tuple((axis.name, axis.size, axis.mode.value) for axis in layout.axes))

    def __str__(self) -> str:
        return " x ".join(f"{name} {size}" for name, size, _ in self.axes if size > 1) or "one rank"


@dataclass(frozen=True)
class Manifest:
    """Everything that is known of one checkpoint without opening its files."""

    step: int
    time: float
    layout: LayoutRecord
    files: tuple[FileRecord, ...]
    tensors: tuple[TensorRecord, ...]
    groups: tuple[GroupRecord, ...] | None
    items: tuple[ItemRecord, ...]
    colonnade: str = __version__

    @property
    def size(self) -> int:
        """The bytes of all files of tensors."""
        return sum(file.size for file in self.files)

    def dump(self) -> bytes:
        """The canonical text."""
        content = {"format": FORMAT, **to_json(self)}
        return _canonical({**content, "digest": _digest(content)})


@dataclass(frozen=True)
class _Version:
    format: int


def parse(raw: bytes) -> Manifest:
    """Read a manifest; raises Damaged where it is not what `dump` wrote, CheckpointError for a newer format."""
    try:
        content = json.loads(raw, parse_constant=_refuse_constant)
        version = from_json(_Version, content, MANIFEST).format
        if version > FORMAT:
            raise CheckpointError(
                f"it has format {version}, written by Colonnade {content.get('colonnade')}; this is {__version__}, which "
                f"reads formats up to {FORMAT}. Update Colonnade to load it."
            )
        digest = content.pop("digest", None)
        if digest != _digest(content):
            raise Damaged(f"{MANIFEST} was changed: its digest is {_digest(content)}, expected {digest}")
        if _canonical({**content, "digest": digest}) != raw:
            raise Damaged(f"{MANIFEST} was changed: it is not the text that was written")
        manifest = from_json(Manifest, content, MANIFEST)
        _check(manifest)
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise Damaged(f"{MANIFEST} cannot be read: {error}") from None
    return manifest


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _canonical(content: Any) -> bytes:
    return json.dumps(content, allow_nan=False).encode() + b"\n"


def _digest(content: Any) -> str:
    return hashlib.sha256(_canonical(content)).hexdigest()


def _check(manifest: Manifest) -> None:
    """Refuse what contradicts itself; what passes can be read without asking again."""
    files = {file.name for file in manifest.files}
    for name in files:
        if not _FILE.fullmatch(name):
            raise Damaged(
                f"the manifest names the file {name!r}; only plain names such as {tensors_file(0)} are opened, never a "
                f"path that leads elsewhere"
            )
    if len(files) != len(manifest.files):
        raise Damaged(f"{MANIFEST} names a file twice")
    items = [*manifest.items, *(group.options for group in manifest.groups or ())]
    used = [(block.file, block.key) for tensor in manifest.tensors for block in tensor.blocks]
    used += [(item.file, item.entry(at)) for item in items if item.file for at in range(item.tensors)]
    if len(set(used)) != len(used):
        raise Damaged(f"{MANIFEST} uses one entry of a file twice")
    strangers = {file for file, _ in used} - files
    if strangers:
        raise Damaged(f"{MANIFEST} speaks of {sorted(strangers)[0]}, which is not among its files")
    if any(item.tensors and item.file is None for item in items):
        raise Damaged(f"{MANIFEST} has a value whose tensors are nowhere")
    for tensor in manifest.tensors:
        check_tiled(tensor)
    stored = sum(tensor.size for tensor in manifest.tensors)
    if stored > manifest.size:
        raise Damaged(f"{MANIFEST} speaks of {stored} bytes of tensors in files of {manifest.size} bytes")


def check_tiled(tensor: TensorRecord) -> None:
    """Refuse a tensor of an unknown type, or whose blocks do not make the whole exactly once."""
    what = f"{tensor.label}{f' ({tensor.state_name})' if tensor.state_name else ''}"
    if tensor.dtype not in WIDTHS:
        raise Damaged(f"{what} has the type {tensor.dtype}, which is none of {', '.join(WIDTHS)}")
    if not tiles((block.box for block in tensor.blocks), tensor.shape):
        places = ", ".join(f"{list(block.offset)}+{list(block.shape)}" for block in tensor.blocks[:8])
        raise Damaged(f"the blocks of {what} do not make a whole of shape {list(tensor.shape)}: {places or 'none'}")
