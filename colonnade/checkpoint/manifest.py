"""The manifest of a checkpoint: what was saved, on which layout, in which files, and where each block lies.

Plain data without torch. `Manifest.dump` writes one canonical text with a digest of itself; `parse` takes nothing
else, so that a changed byte anywhere is found, and takes no number or name on trust.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

from colonnade.checkpoint.boxes import Box, tiles
from colonnade.checkpoint.checked import Checked, Damaged, file_name
from colonnade.context.layout import Layout
from colonnade.errors import CheckpointError
from colonnade.version import __version__

FORMAT = 1
MANIFEST = "manifest.json"
LONGEST = 1 << 28
WIDTHS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}
"""Bytes of an element, by the names that safetensors gives to types."""


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
    """A whole tensor: a weight or buffer (`slot` is ""), or the optimizer's `slot` of one.

    `names` are all names under which a layout knows it (a tied weight has several), `label` its first.
    """

    label: str
    slot: str
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
        content = {"format": FORMAT, **asdict(self)}
        return _canonical({**content, "digest": _digest(content)})


def parse(raw: bytes) -> Manifest:
    """Read a manifest; raises Damaged where it is not what `dump` wrote, CheckpointError for a newer format."""
    if len(raw) > LONGEST:
        raise Damaged(f"{MANIFEST} has {len(raw)} bytes, more than the {LONGEST} that are read")
    try:
        return _parse(json.loads(raw, parse_constant=_refuse_constant), raw)
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise Damaged(f"{MANIFEST} cannot be read: {error}") from None


def _parse(content: Any, raw: bytes) -> Manifest:
    found = Checked(content, MANIFEST)
    version = found.whole_number("format")
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
    manifest = _read(found)
    _check(manifest)
    return manifest


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _canonical(content: Any) -> bytes:
    return json.dumps(content, allow_nan=False).encode() + b"\n"


def _digest(content: Any) -> str:
    return hashlib.sha256(_canonical(content)).hexdigest()


def _read(found: Checked) -> Manifest:
    layout = found.part("layout")
    groups = found.parts("groups") if found.content.get("groups") is not None else None
    return Manifest(
        step=found.whole_number("step"),
        time=found.number("time"),
        layout=LayoutRecord(
            layout.whole_number("world_size"),
            tuple((str(name), int(size), str(mode)) for name, size, mode in layout.content["axes"]),
        ),
        files=tuple(
            FileRecord(file_name(file.text("name")), file.whole_number("size"), file.text("sha256"))
            for file in found.parts("files")
        ),
        tensors=tuple(map(_read_tensor, found.parts("tensors"))),
        groups=None if groups is None else tuple(map(_read_group, groups)),
        items=tuple(map(_read_item, found.parts("items"))),
        colonnade=found.text("colonnade"),
    )


def _read_tensor(found: Checked) -> TensorRecord:
    blocks = tuple(
        Block(block.text("file"), block.text("key"), block.sizes("offset"), block.sizes("shape"))
        for block in found.parts("blocks")
    )
    return TensorRecord(
        found.text("label"), found.text("slot"), found.texts("names"), found.sizes("shape"), found.text("dtype"), blocks
    )


def _read_group(found: Checked) -> GroupRecord:
    return GroupRecord(found.whole_number("index"), found.texts("names"), _read_item(found.part("options")))


def _read_item(found: Checked) -> ItemRecord:
    file = found.text("file") if found.content.get("file") is not None else None
    tensors = found.whole_number("tensors")
    return ItemRecord(
        found.text("name"), found.sizes("ranks"), found.content.get("value"), tensors, file, found.text("key")
    )


def _check(manifest: Manifest) -> None:
    """Refuse what contradicts itself; what passes can be read without asking again."""
    sizes = {file.name: file.size for file in manifest.files}
    if len(sizes) != len(manifest.files):
        raise Damaged(f"{MANIFEST} names a file twice")
    used = [(block.file, block.key) for tensor in manifest.tensors for block in tensor.blocks]
    used += [(item.file, item.entry(at)) for item in all_items(manifest) if item.file for at in range(item.tensors)]
    if len(set(used)) != len(used):
        raise Damaged(f"{MANIFEST} uses one entry of a file twice")
    strangers = {file for file, _ in used} - set(sizes)
    if strangers:
        raise Damaged(f"{MANIFEST} speaks of {sorted(strangers)[0]}, which is not among its files")
    if any(item.tensors and item.file is None for item in all_items(manifest)):
        raise Damaged(f"{MANIFEST} has a value whose tensors are nowhere")
    for tensor in manifest.tensors:
        check_tiled(tensor)
    stored = sum(tensor.size for tensor in manifest.tensors)
    if stored > manifest.size:
        raise Damaged(f"{MANIFEST} speaks of {stored} bytes of tensors in files of {manifest.size} bytes")


def check_tiled(tensor: TensorRecord) -> None:
    """Refuse a tensor of an unknown type, or whose blocks do not make the whole exactly once."""
    what = f"{tensor.label}{f' ({tensor.slot})' if tensor.slot else ''}"
    if tensor.dtype not in WIDTHS:
        raise Damaged(f"{what} has the type {tensor.dtype}, which is none of {', '.join(WIDTHS)}")
    if not tiles((block.box for block in tensor.blocks), tensor.shape):
        places = ", ".join(f"{list(block.offset)}+{list(block.shape)}" for block in tensor.blocks[:8])
        raise Damaged(f"the blocks of {what} do not make a whole of shape {list(tensor.shape)}: {places or 'none'}")


def all_items(manifest: Manifest) -> Iterable[ItemRecord]:
    """Every value of the manifest that may have tensors."""
    return [*manifest.items, *(group.options for group in manifest.groups or ())]
