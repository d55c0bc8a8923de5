"""The manifest of a checkpoint, format 2: which tensors were saved, on which layout, in which files, and where each block lies.

A `TensorRecord` is a whole tensor. It is made of `TensorPart`s, boxes that tile it, and a part is cut into pieces, each in one
file. A thousand ranks may write a piece of each tensor, so a piece has no record of its own: a `Cut` lists the ends and the
files of all pieces of a part, and parts that are cut alike share one. `Manifest.stored_boxes` finds the pieces of a box again.

Plain data without torch. `Manifest.dump` writes one text that ends with a digest of itself; `parse` takes nothing else, so that a
changed byte anywhere is found. It also checks every number and name: a text that was changed on purpose may have a right digest.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from math import prod
from operator import lt
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from colonnade.context.layout import Layout
from colonnade.errors import CheckpointError
from colonnade.parallel.boxes import Box, boxes_in_order, range_in_order, tiles
from colonnade.version import __version__

FORMAT = 2
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
_HEAD = re.compile(rb'\{\s*"format":\s*([1-9]\d{0,8}),')
_TAIL = re.compile(rb', ?"digest": ?"([0-9a-f]{64})"\}\n')
_MOST_DIMS = 64
"""The most dimensions that a tensor of torch has."""


class Damaged(CheckpointError):
    """A checkpoint whose bytes are not those that were written; an older one may still be good."""


def tensors_file(rank: int) -> str:
    """The name of a rank's file of tensors."""
    return f"rank-{rank:05d}.safetensors"


@dataclass(frozen=True)
class FileRecord:
    """One file of tensors, with its size and hash. Made by `write_tensors`."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class StoredBox:
    """A box of a tensor whose elements lie together in the entry `key`, of shape `shape`, of a file. Made by `stored_boxes`.

    Without `order` the box is the entry. With it the entry is flat, and the box begins at its element `first` and has
    its dimensions in this order, slowest first.
    """

    file: str
    key: str
    shape: tuple[int, ...]
    box: Box
    first: int = 0
    order: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Cut:
    """The pieces of a part, which follow each other: where each ends, and its file, a place in `Manifest.files`.

    Made by `merge_tensors` of the notes of all ranks.
    """

    stops: tuple[int, ...]
    files: tuple[int, ...]

    def pieces(self, first: int, last: int) -> Iterator[tuple[int, int, int]]:
        """The pieces that have some of [first, last): (file, start, stop) of each."""
        for at in range(bisect_right(self.stops, first), len(self.stops)):
            start = self.stops[at - 1] if at else 0
            if start >= last:
                return
            yield self.files[at], start, self.stops[at]


@dataclass(frozen=True)
class TensorPart:
    """A box of a tensor that ranks have cut between them. `cut` is a place in `Manifest.cuts`; each piece is an entry `key`.

    Without `order` a piece is some rows of it. With it a piece is a range of its elements, counted with the dimensions in this
    order, slowest first. Made by a `SavePlan`, for the rank's own piece; `merge_tensors` gives it its cut.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    order: tuple[int, ...] | None
    key: str
    cut: int

    @property
    def box(self) -> Box:
        return Box(self.offset, self.shape)

    @property
    def length(self) -> int:
        """How much there is to cut: rows, or elements."""
        return prod(self.shape if self.order is not None else self.shape[:1])

    def rows(self, start: int, stop: int) -> Box:
        """The box of some of its rows; of a part without dimensions, which is its own row, the part."""
        first = (self.offset[0] + start,) if self.offset else ()
        return Box((*first, *self.offset[1:]), (*((stop - start,) if self.shape else ()), *self.shape[1:]))


@dataclass(frozen=True)
class TensorRecord:
    """A whole tensor: a weight or buffer (`state_name` is ""), or the optimizer's state for one under `state_name`.

    `names` are all names under which a layout knows it (a tied weight has several), `label` its first. Made by a `SavePlan` with
    the part that this rank has a piece of, and by `merge_tensors` with all parts.
    """

    label: str
    state_name: str
    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    parts: tuple[TensorPart, ...]

    @property
    def size(self) -> int:
        """The bytes of all its elements."""
        return prod(self.shape) * WIDTHS[self.dtype]

    def __str__(self) -> str:
        return f"{self.label}{f' ({self.state_name})' if self.state_name else ''}"


@dataclass(frozen=True)
class GroupRecord:
    """Options of an optimizer's parameter group, and the labels of its members. `index` is its place.

    `optimizer` is the name of the optimizer's class; None in a checkpoint that was imported.
    """

    index: int
    names: tuple[str, ...]
    options: ItemRecord
    optimizer: str | None


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


_PLACES = "places of ranks"


@dataclass(frozen=True)
class LayoutRecord:
    """The axes of the world that saved: (name, size, mode) of each, slowest first.

    Where ranks do not stand as in the grid, an axis of size 1 named `_PLACES` follows, whose mode is a digest of where they stand.
    """

    world_size: int
    axes: tuple[tuple[str, int, str], ...]

    @classmethod
    def of(cls, layout: Layout) -> LayoutRecord:
        axes = tuple((axis.name, axis.size, axis.mode.value) for axis in layout.axes)
        if layout.places is not None:
            axes += ((_PLACES, 1, hashlib.sha256(repr(layout.places).encode()).hexdigest()[:16]),)
        return cls(layout.world_size, axes)

    def __str__(self) -> str:
        own = next((f" (groups of its own, {mode})" for name, _, mode in self.axes if name == _PLACES), "")
        return (" x ".join(f"{name} {size}" for name, size, _ in self.axes if size > 1) or "one rank") + own


@dataclass(frozen=True)
class Manifest:
    """Everything that is known of one checkpoint without opening its files. Made by `StorageWriter.commit`, and by `parse`."""

    step: int
    time: float
    layout: LayoutRecord
    files: tuple[FileRecord, ...]
    cuts: tuple[Cut, ...]
    tensors: tuple[TensorRecord, ...]
    groups: tuple[GroupRecord, ...] | None
    items: tuple[ItemRecord, ...]
    colonnade: str = __version__

    @property
    def size(self) -> int:
        """The bytes of all files of tensors."""
        return sum(file.size for file in self.files)

    def stored_boxes(self, part: TensorPart, box: Box) -> Iterator[StoredBox]:
        """The boxes that lie together in files and have some of `box`, which is inside the part."""
        cut = self.cuts[part.cut]
        if part.order is None:
            first = box.offset[0] - part.offset[0] if box.offset else 0
            for file, start, stop in cut.pieces(first, first + prod(box.shape[:1])):
                rows = part.rows(start, stop)
                yield StoredBox(self.files[file].name, part.key, rows.shape, rows)
            return
        first, last = range_in_order(box, part.box, part.order)
        for file, start, stop in cut.pieces(first, last):
            at = max(start, first)
            for inside in boxes_in_order(at, min(stop, last), part.box, part.order):
                yield StoredBox(self.files[file].name, part.key, (stop - start,), inside, at - start, part.order)
                at += inside.numel

    def dump(self) -> bytes:
        """The text of it."""
        body = json.dumps({"format": FORMAT, **to_json(self)}, allow_nan=False, separators=(",", ":")).encode()[:-1]
        return body + f',"digest":"{_digest(body)}"}}\n'.encode()


def parse(raw: bytes) -> Manifest:
    """Read a manifest; raises Damaged where it is not what `dump` wrote, CheckpointError for another format."""
    try:
        _check_format(raw)
        # The digest covers the bytes as they are, so it is taken before the JSON is read.
        tail = _TAIL.fullmatch(raw, raw.rfind(b","))
        if tail is None:
            raise Damaged(f"{MANIFEST} was changed: it is not the text that was written")
        body, digest = raw[: tail.start()], tail[1].decode()
        if digest != _digest(body):
            raise Damaged(f"{MANIFEST} was changed: its digest is {_digest(body)}, expected {digest}")
        content = json.loads(body + b"}", parse_constant=_refuse_constant)
        manifest = from_json(Manifest, content, MANIFEST)
        _check(manifest)
    except (ValueError, TypeError, LookupError, OverflowError, RecursionError) as error:
        raise Damaged(f"{MANIFEST} cannot be read: {error}") from None
    return manifest


def _check_format(raw: bytes) -> None:
    """Refuse every format but this one. Another format is no damage, so `load` does not fall back to an older checkpoint."""
    head = _HEAD.match(raw)
    if head is None:
        raise Damaged(f"{MANIFEST} cannot be read: it does not begin with its format")
    version = int(head[1])
    found = re.search(rb'"colonnade": ?"([\w.+]{1,40})"', raw)
    by = found[1].decode() if found else "?"
    if version > FORMAT:
        raise CheckpointError(
            f"it has format {version}, written by Colonnade {by}; this is {__version__}, which reads formats up to {FORMAT}. "
            f"Update Colonnade to load it.",
            code="C081",
        )
    if version < FORMAT:
        raise CheckpointError(
            f"it has format {version}, written by Colonnade {by}; this is {__version__}, which reads format {FORMAT} alone. "
            f"Format 1 was last read by the version before this one: load it there with CheckpointManager.load() and save it "
            f"again with save(), which writes format {FORMAT}.",
            code="C081",
        )


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _digest(body: bytes) -> str:
    """The digest of the JSON object as it would be without the digest at its end."""
    digest = hashlib.sha256(body)
    digest.update(b"}\n")
    return digest.hexdigest()


def _check(manifest: Manifest) -> None:
    """Refuse what contradicts itself; what passes can be read without asking again. In time linear in the text."""
    # Names of files: a manifest must not lead out of its folder.
    files = {file.name for file in manifest.files}
    for name in files:
        if not _FILE.fullmatch(name):
            raise Damaged(
                f"the manifest names the file {name!r}; only plain names such as {tensors_file(0)} are opened, never a "
                f"path that leads elsewhere"
            )
    if len(files) != len(manifest.files):
        raise Damaged(f"{MANIFEST} names a file twice")
    # Cuts and tensors: every element of a whole is in exactly one piece, so that a load leaves no memory unset.
    places = set(range(len(files)))
    for cut in manifest.cuts:
        ends = (0, *cut.stops)
        if len(cut.stops) != len(cut.files) or not all(map(lt, ends, cut.stops)):
            raise Damaged(f"{MANIFEST} has a cut whose {len(cut.files)} pieces do not follow each other")
        if not places.issuperset(cut.files):
            raise Damaged(f"{MANIFEST} speaks of file {max(cut.files)}, and has {len(files)} files")
    for tensor in manifest.tensors:
        check_tiled(tensor, manifest.cuts)
    _check_entries(manifest, files)
    # A tensor takes no more memory than the files have bytes, so a small manifest cannot ask for terabytes.
    stored = sum(tensor.size for tensor in manifest.tensors)
    if stored > manifest.size:
        raise Damaged(f"{MANIFEST} speaks of {stored} bytes of tensors in files of {manifest.size} bytes")


def _check_entries(manifest: Manifest, files: set[str]) -> None:
    """Every value's tensors are somewhere, and no entry of a file is two things."""
    items = [*manifest.items, *(group.options for group in manifest.groups or ())]
    used: dict[str, set[int]] = {}
    twice = len({(item.file, item.key) for item in items if item.tensors}) != sum(item.tensors > 0 for item in items)
    keys = {item.key for item in items if item.tensors}
    for part in (part for tensor in manifest.tensors for part in tensor.parts):
        mine = manifest.cuts[part.cut].files
        theirs = used.setdefault(part.key, set())
        before = len(theirs)
        theirs.update(mine)
        twice |= len(theirs) != before + len(mine) or part.key.rpartition("#")[0] in keys
    if twice:
        raise Damaged(f"{MANIFEST} uses one entry of a file twice")
    for item in items:
        if item.file is not None and item.file not in files:
            raise Damaged(f"{MANIFEST} speaks of {item.file}, which is not among its files")
        marks = sorted(_marks(item.value, item.name))
        if len(marks) != item.tensors or marks != list(range(len(marks))):
            raise Damaged(f"{MANIFEST}: {item.name} has {item.tensors} tensors, of which its value has {len(marks)}")
        if marks and item.file is None:
            raise Damaged(f"{MANIFEST} has a value whose tensors are nowhere")


def _marks(value: Any, name: str) -> Iterator[int]:
    """The numbers of the tensors in a value; refuses what `values.decode` could make nothing of."""
    inner = value if isinstance(value, list) else ()
    if isinstance(value, dict):
        inner = list(value.values())
        mark = next((key for key in value if key.startswith("$")), None)
        if mark is not None:
            content = value[mark]
            if len(value) > 1 or not (mark in _CONTENT and _CONTENT[mark](content)):
                raise Damaged(
                    f"{MANIFEST}: {name} has {json.dumps(value)[:80]}, which is none of the marks {', '.join(_CONTENT)} with "
                    f"what they hold"
                )
            if mark == "$tensor":
                yield content
    for entry in inner:
        yield from _marks(entry, name)


def _is_key(value: Any) -> bool:
    """Whether a value can be a key of a dict when it is decoded."""
    if not isinstance(value, dict):
        return not isinstance(value, list)
    ((mark, content),) = value.items() if len(value) == 1 else (("", ()),)
    return mark in ("$float", "$tensor") or (
        mark == "$tuple" and isinstance(content, list) and all(map(_is_key, content))
    )


def _are_pairs(content: Any) -> bool:
    return isinstance(content, list) and all(
        isinstance(pair, list) and len(pair) == len(("key", "entry")) and _is_key(pair[0]) for pair in content
    )


_CONTENT: dict[str, Callable[[Any], bool]] = {
    "$tensor": lambda content: type(content) is int,
    "$float": lambda content: content in ("nan", "inf", "-inf"),
    "$tuple": lambda content: isinstance(content, list),
    "$dict": _are_pairs,
    "$counter": _are_pairs,
}
"""The marks of `values.encode`, and whether something is what they hold."""


def check_tiled(tensor: TensorRecord, cuts: Sequence[Cut]) -> None:
    """Refuse a tensor of an unknown type, or whose pieces do not make the whole exactly once."""
    if tensor.dtype not in WIDTHS:
        raise Damaged(f"{tensor} has the type {tensor.dtype}, which is none of {', '.join(WIDTHS)}")
    if len(tensor.shape) > _MOST_DIMS:
        raise Damaged(f"{tensor} has {len(tensor.shape)} dimensions; at most {_MOST_DIMS} are possible")
    whole = all(_is_whole(part, len(tensor.shape), cuts) for part in tensor.parts)
    if not whole or not tiles((part.box for part in tensor.parts), tensor.shape):
        places = ", ".join(f"{list(part.offset)}+{list(part.shape)}" for part in tensor.parts[:8])
        raise Damaged(f"the blocks of {tensor} do not make a whole of shape {list(tensor.shape)}: {places or 'none'}")


def _is_whole(part: TensorPart, dims: int, cuts: Sequence[Cut]) -> bool:
    """Whether its pieces, which follow each other, go from its start to its end, and its order is one."""
    if not len(part.offset) == len(part.shape) == dims:
        return False
    in_order = part.order is None or sorted(part.order) == list(range(dims))
    return in_order and cuts[part.cut].stops[-1:] == (part.length,)


# --- Dataclasses as JSON and back: each value is taken only in its field's type ---

Record = TypeVar("Record")
_LARGEST = 1 << 62
_KEYS = {"state_name": "slot"}
"""Fields whose key in JSON is not their name."""


def to_json(record: Any) -> dict[str, Any]:
    """A dataclass, and those in it, as JSON objects. Lists of plain values are taken as they are, however long."""
    return {_KEYS.get(field.name, field.name): _plain(getattr(record, field.name)) for field in fields(record)}


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return to_json(value)
    if isinstance(value, (tuple, list)) and not _PLAIN.keys() >= set(map(type, value)):
        return [_plain(entry) for entry in value]
    return value


def from_json(kind: type[Record], content: Any, where: str) -> Record:
    """The dataclass that `to_json` was given; raises Damaged, with the place, for a value of another type."""
    if not isinstance(content, dict):
        raise Damaged(f"{where} is a {type(content).__name__}, not an object")
    values = {}
    for name, expected in _fields(kind):  # type: ignore[arg-type]
        key = _KEYS.get(name, name)
        values[name] = _value(expected, content.get(key), f"{where}: {key}")
    return kind(**values)


@cache
def _fields(kind: type[Any]) -> tuple[tuple[str, Any], ...]:
    return tuple(get_type_hints(kind).items())


def _value(expected: Any, value: Any, where: str) -> Any:
    if expected is Any:
        return value
    if expected in _PLAIN:
        fits, what, _ = _PLAIN[expected]
        return expected(value) if fits(value) else _refuse(value, where, what)
    origin, inner = get_origin(expected), get_args(expected)
    if origin is UnionType:  # something or None
        return None if value is None else _value(inner[0], value, where)
    if origin in (tuple, list):
        fixed = origin is tuple and inner[-1] is not ...
        return origin(_fixed(inner, value, where) if fixed else _entries(inner[0], value, where))
    return from_json(expected, value, where)


def _entries(expected: Any, value: Any, where: str) -> list[Any]:
    fits, _, what = _PLAIN.get(expected, (None, "", "a list"))
    if not isinstance(value, list):
        _refuse(value, where, what)
    if fits is None:
        return _fixed([expected] * len(value), value, where)
    # Lists may be long: the types of all, and of numbers the smallest and the largest, say as much as each of them.
    few = [min(value), max(value)] if set(map(type, value)) == {int} else value
    if not all(map(fits, few)):
        _refuse(value, where, what)
    return value


def _fixed(kinds: Sequence[Any], value: Any, where: str) -> list[Any]:
    pairs = enumerate(zip(kinds, value, strict=True))
    return [_value(expected, entry, f"{where}[{at}]") for at, (expected, entry) in pairs]


def _refuse(value: Any, where: str, expected: str) -> Any:
    raise Damaged(f"{where} is {str(value)[:80]!r}, not {expected}")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _LARGEST


_PLAIN: dict[Any, tuple[Callable[[Any], bool], str, str]] = {
    str: (lambda value: isinstance(value, str), "a text", "a list of texts"),
    int: (_is_size, "a whole number from 0 on", "a list of whole numbers from 0 on"),
    float: (_is_number, "a number", "a list of numbers"),
}
"""For each plain type: the check of a value, and how messages call a value and a list of them."""
