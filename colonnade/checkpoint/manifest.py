"""The manifest of a checkpoint, format 2: the saved tensors, the layout that saved them, the files, and the place of each block.

A `TensorRecord` describes a full tensor. Its `TensorPart`s are boxes that tile the tensor, and each part is divided into pieces,
one per file. A thousand ranks may write a piece of every tensor, so there is no record per piece: a `Cut` lists the ends and files
of all pieces of a part, and parts that are divided in the same way share a cut. `Manifest.stored_boxes` finds the pieces of a box.

Plain data without torch. `Manifest.dump` returns a text that ends with a digest of itself, so `parse` detects any changed byte.
`parse` also validates every number and name, because a manifest that was changed on purpose can have a correct digest.
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
"""Bytes per element, by the dtype names of safetensors."""
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*\.safetensors")
"""A plain file name: no folder, no "..", not hidden."""
_HEAD = re.compile(rb'\{\s*"format":\s*([1-9]\d{0,8}),')
_TAIL = re.compile(rb', ?"digest": ?"([0-9a-f]{64})"\}\n')
_MOST_DIMS = 64
"""The largest number of dimensions of a torch tensor."""


class Damaged(CheckpointError):
    """Raised for a checkpoint whose bytes differ from the bytes that were written. An older checkpoint may still be intact."""


def tensors_file(rank: int) -> str:
    """The name of the file with a rank's tensors."""
    return f"rank-{rank:05d}.safetensors"


@dataclass(frozen=True)
class FileRecord:
    """A file of tensors with its size and hash. Made by `write_tensors`."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class StoredBox:
    """A box of a tensor whose elements are stored contiguously in a file, in the entry `key` of shape `shape`.

    Made by `stored_boxes`.

    If `order` is None, the box is the full entry. Otherwise the entry is flat: the box starts at its element `first`, and the
    dimensions of the box are stored in the sequence `order`, slowest first.
    """

    file: str
    key: str
    shape: tuple[int, ...]
    box: Box
    first: int = 0
    order: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Cut:
    """The division of a part into adjacent pieces: the end of each piece, and its file as an index into `Manifest.files`.

    Made by `merge_tensors` from the notes of all ranks.
    """

    stops: tuple[int, ...]
    files: tuple[int, ...]

    def pieces(self, first: int, last: int) -> Iterator[tuple[int, int, int]]:
        """Yield (file, start, stop) of each piece that overlaps [first, last)."""
        for at in range(bisect_right(self.stops, first), len(self.stops)):
            start = self.stops[at - 1] if at else 0
            if start >= last:
                return
            yield self.files[at], start, self.stops[at]


@dataclass(frozen=True)
class TensorPart:
    """A box of a tensor, divided into pieces. `cut` is an index into `Manifest.cuts`; each piece is stored as entry `key`.

    If `order` is None, a piece is a range of rows. Otherwise a piece is a range of elements, numbered with the dimensions in the
    sequence `order`, slowest first. A `SavePlan` makes a part with the rank's own piece; `merge_tensors` sets the cut.
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
        """The number of rows; of elements if `order` is set."""
        return prod(self.shape if self.order is not None else self.shape[:1])

    def rows(self, start: int, stop: int) -> Box:
        """The box of the rows [start, stop); a zero-dimensional part counts as one row."""
        first = (self.offset[0] + start,) if self.offset else ()
        return Box((*first, *self.offset[1:]), (*((stop - start,) if self.shape else ()), *self.shape[1:]))


@dataclass(frozen=True)
class TensorRecord:
    """A full tensor: a weight or buffer (`state_name` is ""), or the optimizer state `state_name` of a weight.

    `names` are all names of the weight (a tied weight has several), `label` is the first name. A `SavePlan` makes a
    record with a single part, a piece of which this rank writes; `merge_tensors` makes a record with all parts.
    """

    label: str
    state_name: str
    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    parts: tuple[TensorPart, ...]

    @property
    def size(self) -> int:
        """The size of the full tensor in bytes."""
        return prod(self.shape) * WIDTHS[self.dtype]

    def __str__(self) -> str:
        return f"{self.label}{f' ({self.state_name})' if self.state_name else ''}"


@dataclass(frozen=True)
class GroupRecord:
    """A parameter group of the optimizer: its index, the labels of its parameters and its options.

    `optimizer` is the name of the optimizer's class; None in an imported checkpoint.
    """

    index: int
    names: tuple[str, ...]
    options: ItemRecord
    optimizer: str | None


@dataclass(frozen=True)
class ItemRecord:
    """A saved plain value as JSON, in which `{"$tensor": n}` stands for the entry `<key>#n` of `file`.

    `ranks` are the ranks that had this value. Other records with the same name have the values of other ranks.
    """

    name: str
    ranks: tuple[int, ...]
    value: Any
    tensors: int
    file: str | None
    key: str

    def entry(self, at: int) -> str:
        """The key of tensor number `at` of this value in `file`."""
        return f"{self.key}#{at}"


_PLACES = "places of ranks"


@dataclass(frozen=True)
class LayoutRecord:
    """The axes of the layout at the time of the save: (name, size, mode) of each axis, slowest first.

    If a custom initializer ordered ranks differently from the grid, a last axis of size 1, named `_PLACES`, has a digest of the
    places of all ranks as its mode.
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
    """The description of a checkpoint: everything except the bytes of tensors. Made by `StorageWriter.commit` and `parse`."""

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
        """The total size of all files in bytes."""
        return sum(file.size for file in self.files)

    def stored_boxes(self, part: TensorPart, box: Box) -> Iterator[StoredBox]:
        """Yield the contiguously stored boxes of `part` that overlap `box`, a box inside the part."""
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
        """The manifest as a text that ends with a digest of itself."""
        body = json.dumps({"format": FORMAT, **to_json(self)}, allow_nan=False, separators=(",", ":")).encode()[:-1]
        return body + f',"digest":"{_digest(body)}"}}\n'.encode()


def parse(raw: bytes) -> Manifest:
    """Read a manifest.

    Raises:
        Damaged: The text was not written by `dump`, or was changed.
        CheckpointError: The manifest has another format (code C081).
    """

    def refuse_constant(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    try:
        _check_format(raw)
        # The digest covers the raw bytes, so it is verified before the JSON is parsed.
        tail = _TAIL.fullmatch(raw, raw.rfind(b","))
        if tail is None:
            raise Damaged(f"{MANIFEST} was changed: it does not end with a digest")
        body, digest = raw[: tail.start()], tail[1].decode()
        if digest != _digest(body):
            raise Damaged(f"{MANIFEST} was changed: its digest is {_digest(body)}, expected {digest}")
        content = json.loads(body + b"}", parse_constant=refuse_constant)
        manifest = from_json(Manifest, content, MANIFEST)
        _check(manifest)
    except (ValueError, TypeError, LookupError, OverflowError, RecursionError) as error:
        raise Damaged(f"{MANIFEST} cannot be read: {error}") from None
    return manifest


def _check_format(raw: bytes) -> None:
    """Raise for any other format: not as `Damaged`, so that `load` does not fall back to an older checkpoint."""
    head = _HEAD.match(raw)
    if head is None:
        raise Damaged(f"{MANIFEST} cannot be read: it does not start with a format number")
    version = int(head[1])
    found = re.search(rb'"colonnade": ?"([\w.+]{1,40})"', raw)
    by = found[1].decode() if found else "?"
    if version > FORMAT:
        raise CheckpointError(
            f"the checkpoint has format {version}, written by Colonnade {by}; this is {__version__}, which reads format {FORMAT}. "
            f"Update Colonnade to load it.",
            code="C081",
        )
    if version < FORMAT:
        raise CheckpointError(
            f"the checkpoint has format {version}, written by Colonnade {by}; this is {__version__}, which reads "
            f"only format {FORMAT}. Load the checkpoint with the previous version of Colonnade, which reads format "
            f"1. Then save it again there with CheckpointManager.save(), which writes format {FORMAT}.",
            code="C081",
        )


def _digest(body: bytes) -> str:
    """The digest of the JSON object without its last key, the digest."""
    digest = hashlib.sha256(body)
    digest.update(b"}\n")
    return digest.hexdigest()


def _check(manifest: Manifest) -> None:
    """Raise Damaged if the manifest contradicts itself, so that readers need no checks of their own. Takes linear time."""
    # File names must not lead out of the checkpoint's folder.
    files = {file.name for file in manifest.files}
    for name in files:
        if not _FILE.fullmatch(name):
            raise Damaged(
                f"{MANIFEST} has the file name {name!r}. A file name must be plain, such as {tensors_file(0)}; paths "
                "to other folders are never opened."
            )
    if len(files) != len(manifest.files):
        raise Damaged(f"{MANIFEST} lists a file twice")

    # Every element of a full tensor is in exactly one piece, so a load leaves no memory uninitialized.
    places = set(range(len(files)))
    for cut in manifest.cuts:
        ends = (0, *cut.stops)
        if len(cut.stops) != len(cut.files) or not all(map(lt, ends, cut.stops)):
            raise Damaged(f"{MANIFEST} has a sharded tensor whose {len(cut.files)} pieces are not adjacent")
        if not places.issuperset(cut.files):
            raise Damaged(f"{MANIFEST} refers to file number {max(cut.files)}, but lists only {len(files)} files")
    for tensor in manifest.tensors:
        check_tiled(tensor, manifest.cuts)

    # No entry of a file is used twice: not by two values, two parts, or a value and a part.
    items = [*manifest.items, *(group.options for group in manifest.groups or ())]
    used: dict[str, set[int]] = {}
    twice = len({(item.file, item.key) for item in items if item.tensors}) != sum(item.tensors > 0 for item in items)
    keys = {item.key for item in items if item.tensors}
    for part in (part for tensor in manifest.tensors for part in tensor.parts):
        part_files, files_of_key = manifest.cuts[part.cut].files, used.setdefault(part.key, set())
        before = len(files_of_key)
        files_of_key.update(part_files)
        twice |= len(files_of_key) != before + len(part_files) or part.key.rpartition("#")[0] in keys
    if twice:
        raise Damaged(f"{MANIFEST} uses an entry of a file twice")

    # Every tensor of a value is stored in a listed file.
    for item in items:
        if item.file is not None and item.file not in files:
            raise Damaged(f"{MANIFEST} refers to the file {item.file}, which is not in the list of files")
        numbers = sorted(_tensor_numbers(item.value, item.name))
        if len(numbers) != item.tensors or numbers != list(range(len(numbers))):
            raise Damaged(
                f"{MANIFEST} is inconsistent: {item.name} declares {item.tensors} tensors, but contains {len(numbers)}"
            )
        if numbers and item.file is None:
            raise Damaged(f"{MANIFEST} has a value with tensors but no file")

    # Tensors together are no larger than the files, so a small manifest cannot make a load allocate terabytes.
    stored = sum(tensor.size for tensor in manifest.tensors)
    if stored > manifest.size:
        raise Damaged(f"{MANIFEST} declares {stored} bytes of tensors in files of {manifest.size} bytes")


def _tensor_numbers(value: Any, name: str) -> Iterator[int]:
    """The numbers of the tensors in a value; raises Damaged for a value that `values.decode` could not decode."""
    inner = value if isinstance(value, list) else ()
    if isinstance(value, dict):
        inner = list(value.values())
        tag = next((key for key in value if key.startswith("$")), None)
        if tag is not None:
            content = value[tag]
            if len(value) > 1 or not (tag in _CONTENT and _CONTENT[tag](content)):
                raise Damaged(
                    f"{MANIFEST} has the value {json.dumps(value)[:80]} for {name}. Allowed are objects with one of "
                    f"the tags {', '.join(_CONTENT)}, and content of the type of the tag."
                )
            if tag == "$tensor":
                yield content
    for entry in inner:
        yield from _tensor_numbers(entry, name)


def _is_key(value: Any) -> bool:
    """Whether a value decodes to a possible key of a dict."""
    if not isinstance(value, dict):
        return not isinstance(value, list)
    ((tag, content),) = value.items() if len(value) == 1 else (("", ()),)
    return tag in ("$float", "$tensor") or (
        tag == "$tuple" and isinstance(content, list) and all(map(_is_key, content))
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
"""The tags of `values.encode`, each with a check of its content."""


def check_tiled(tensor: TensorRecord, cuts: Sequence[Cut]) -> None:
    """Raise Damaged if the tensor's type is unknown, or if the pieces do not cover the full tensor exactly once."""
    if tensor.dtype not in WIDTHS:
        raise Damaged(f"{tensor} has the unknown type {tensor.dtype}; allowed are {', '.join(WIDTHS)}")
    if len(tensor.shape) > _MOST_DIMS:
        raise Damaged(f"{tensor} has {len(tensor.shape)} dimensions; at most {_MOST_DIMS} are possible")
    dims = list(range(len(tensor.shape)))
    complete = all(
        len(part.offset) == len(part.shape) == len(dims)
        and (part.order is None or sorted(part.order) == dims)
        and cuts[part.cut].stops[-1:] == (part.length,)  # adjacent pieces, by `_check`: the last end is the part's end
        for part in tensor.parts
    )
    if not complete or not tiles((part.box for part in tensor.parts), tensor.shape):
        places = ", ".join(f"{list(part.offset)}+{list(part.shape)}" for part in tensor.parts[:8])
        raise Damaged(
            f"the blocks of {tensor} do not tile the full tensor of shape {list(tensor.shape)}: {places or 'none'}"
        )


# --- Dataclasses as JSON and back; each value must have its field's type ---

Record = TypeVar("Record")
_LARGEST = 1 << 62
_KEYS = {"state_name": "slot"}
"""Fields with another key in JSON."""


def to_json(record: Any) -> dict[str, Any]:
    """Convert a dataclass, and the dataclasses inside it, to JSON objects. Lists of plain values are not copied."""
    return {_KEYS.get(field.name, field.name): _plain(getattr(record, field.name)) for field in fields(record)}


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return to_json(value)
    if isinstance(value, (tuple, list)) and not _PLAIN.keys() >= set(map(type, value)):
        return [_plain(entry) for entry in value]
    return value


def from_json(kind: type[Record], content: Any, where: str) -> Record:
    """Convert JSON to a dataclass (the inverse of `to_json`). Raises Damaged, with `where`, for a value of a wrong type."""
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
    if origin is UnionType:  # `X | None`
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
    # Lists may have millions of integers: checking the smallest and the largest is enough.
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
"""For each plain type: the check of a value, and the words for a value and a list of values in messages."""
