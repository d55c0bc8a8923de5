"""Full (unsharded) weights: folders in the transformers format, and full tensors gathered at run time.

A folder has `model.safetensors`, or several files and an index from tensor names to files. `tensors_in` lists the tensors without
reading their elements; `write_folder` and `publish_folder` write a staging folder and put it in place.

At run time the full tensors are gathered one at a time to one rank, to all ranks, or into files. This uses the code of
a save: the ranks make the same notes as for a save, and merge them into the records of the full tensors. But then they
send the pieces to each other instead of writing them to a checkpoint. `save_full` writes one file, `save_pretrained` a
folder in the format of transformers, both during training.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil, prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from colonnade.checkpoint.manifest import WIDTHS, FileRecord, LayoutRecord, Manifest, TensorRecord, tensors_file
from colonnade.checkpoint.save import RankNote, SavePlan, agreed, merge_tensors, plan_weight
from colonnade.checkpoint.storage import (
    discard,
    fault_point,
    make_room,
    no_space_errors,
    place_file,
    place_folder,
    staging_path,
    sync,
)
from colonnade.checkpoint.tensor_files import (
    FileEntry,
    StoredTensor,
    dtype_of,
    in_file_order,
    memory_for,
    name_of,
    stored_tensors,
    write_tensors,
)
from colonnade.comm.groups import own_gloo
from colonnade.comm.messages import gather_from_all, message_device
from colonnade.context.parallel_context import ParallelContext
from colonnade.errors import CheckpointError, listed
from colonnade.logging import get_dist_logger
from colonnade.parallel.boxes import Box, full_box
from colonnade.parallel.whole import LocalTensor, locate_tensors
from colonnade.paths import local_path

INDEX = "model.safetensors.index.json"
LARGEST = 5 * 10**9
"""The default size of a file in bytes."""
_ONE_FILE = "model.safetensors"
_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")


@dataclass(frozen=True)
class UnpickledTensor:
    """A tensor of a trusted pickle file. The file is memory-mapped, so bytes are read on access."""

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
        """Return the elements of a box (by default all) as a new tensor."""
        return self.value[(full_box(self.shape) if box is None else box).slices_in(full_box(self.shape))].clone()

    def read_into(self, target: Tensor, box: Box) -> None:
        """Read the elements of the box into `target`."""
        with torch.no_grad():
            target.copy_(self.value[box.slices_in(full_box(self.shape))])


AnyTensor = StoredTensor | UnpickledTensor


def tensors_in(path: Path, trust: bool = False) -> dict[str, AnyTensor]:
    """List all tensors of a safetensors file or a transformers folder, by name, without reading their elements.

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
                    text += (
                        ". A save was killed while it replaced the weights. Save again, or move the files in "
                        f"{aside} back"
                    )
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
                        f"{found} refers to {name!r}, but the folder has no file {name!r}. Copy the complete folder "
                        "again.",
                        code="C081",
                    )
            files = [path / name for name in names]
    else:
        raise CheckpointError(
            f"{path} is neither a folder nor a file. Weights are read from disk: download a model first with `hf download <name> "
            "--local-dir <folder>`",
            code="C081",
        )
    tensors: dict[str, AnyTensor] = {}
    for file in files:
        if file.suffix == ".safetensors":
            tensors |= stored_tensors(file)
            continue
        if not trust:
            raise CheckpointError(
                f"{file} is a pickle, which can run code when it is read. Convert the file to safetensors with "
                "transformers on a machine that may run this code. If you trust its author, pass trust=True to read "
                "it with torch's weights_only loader.",
                code="C086",
            )
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        tensors |= {
            key: UnpickledTensor(file, key, value) for key, value in content.items() if isinstance(value, Tensor)
        }
    return tensors


def files_of(sizes: Iterable[tuple[str, int]], limit: int) -> dict[str, list[str]]:
    """Distribute tensors, given as (key, size), over files of at most `limit` bytes, in the given order.

    Returns the keys by file name.
    """
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
    """Complete a staged folder: write the index and sync all files.

    Then rename the folder to `target`, or replace the weight files of an existing `target`.
    """
    if len(files) > 1:
        weight_map = {key: name for name, keys in files.items() for key in keys}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (staged / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    for file in staged.iterdir():
        sync(file)
    fault_point("files written")
    place_folder(staged, target, lambda name: _WEIGHTS.fullmatch(name) is not None, (INDEX, _ONE_FILE))


def write_folder(entries: Sequence[FileEntry], staged: Path, target: Path, config: Path | None) -> None:
    """Write a transformers folder with these tensors, and the config and tokenizer files of the folder `config`.

    It is first written to `staged`.
    """
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


_CPU = torch.device("cpu")


class FullTensors:
    """The full parameters and persistent buffers of a model, on any layout. Collective over the world to construct.

    `records` describes the full tensors. It is equal on every rank.

    Args:
        model: The model, whose tensors this rank stores shards of.
        context: The world.
        read: Returns the local tensor to gather; by default the parameter or buffer itself. It may return another tensor that is
            sharded in the same way, such as the gradient.
        keep: Returns True for tensors that are gathered; by default all.
        doing: The caller's activity, for error messages.
    """

    def __init__(
        self,
        model: nn.Module,
        context: ParallelContext,
        read: Callable[[LocalTensor], Tensor] = lambda tensor: tensor.local,
        keep: Callable[[LocalTensor], bool] = lambda tensor: True,
        doing: str = "gathering the weights",
    ) -> None:
        self.tensors = [tensor for tensor in locate_tensors(model, context, doing) if keep(tensor)]
        self._context, self._rank = context, context.get_global_rank()
        plan = SavePlan(self._rank)
        with agreed(context, doing):
            for tensor in self.tensors:
                plan_weight(plan, tensor, read(tensor))
            # No file is written: the file name of a piece only identifies the rank that stores it.
            note = plan.note(FileRecord(tensors_file(self._rank), 0, ""))
        notes = [RankNote.parse(text, "a rank's note") for text in gather_from_all(note.dump(), context)]
        with agreed(context, doing):
            self.records, cuts = merge_tensors(notes)
        files = tuple(note.file for note in notes if note.file is not None)
        self._pieces = Manifest(0, 0.0, LayoutRecord.of(context.layout), files, cuts, self.records, None, ())
        self._owners = {file.name: rank for rank, file in enumerate(files)}
        self._entries = {entry.key: entry for entry in plan.entries}
        self._gloo: Any = None

    def gather(self, record: TensorRecord) -> Tensor:
        """Gather a full tensor, in CPU memory on every rank. Collective over the world."""
        full = memory_for(record.shape, dtype_of(record))
        for owner, key, box in self._blocks(record):
            block = full[box.slices_in(full_box(record.shape))]
            if owner == self._rank:
                block.copy_(self._entries[key].read())
            if self._context.world_size > 1:
                sent = _raw(block, message_device(self._context.device))
                dist.broadcast(sent, src=owner)
                _set_bytes(block, sent)
        return full

    def gather_all(self) -> Iterator[tuple[TensorRecord, Tensor]]:
        """Gather all full tensors, in CPU memory on every rank, by one broadcast from each rank. Collective over the world.

        Faster than `gather` for small tensors. Each rank needs memory for all full tensors and the message of one rank.
        """
        tensors = [memory_for(record.shape, dtype_of(record)) for record in self.records]
        pieces: dict[int, list[tuple[str, Tensor]]] = {}
        for record, full in zip(self.records, tensors, strict=True):
            for owner, key, box in self._blocks(record):
                pieces.setdefault(owner, []).append((key, full[box.slices_in(full_box(record.shape))]))
        for owner, blocks in pieces.items():
            if owner == self._rank:
                for key, block in blocks:
                    block.copy_(self._entries[key].read())
            # All blocks of a rank in one message: the latency of many small broadcasts exceeds the time for their bytes.
            if self._context.world_size > 1:
                sent = torch.cat([_raw(block) for _, block in blocks]).to(message_device(self._context.device))
                dist.broadcast(sent, src=owner)
                for (_, block), raw in zip(
                    blocks, sent.cpu().split([block.nbytes for _, block in blocks]), strict=True
                ):
                    _set_bytes(block, raw.clone())  # cloned, because a slice of bytes may be misaligned for the dtype
        yield from zip(self.records, tensors, strict=True)

    def gather_to_ranks(self, wanted: Sequence[tuple[TensorRecord, int]]) -> Tensor | None:
        """Gather several full tensors at the same time, each to a different rank. Collective over the world.

        A rank needs memory for its own full tensor, one piece to receive and one piece to send.

        Args:
            wanted: (record, rank that gets the full tensor), equal on all ranks; no rank may occur twice.

        Returns:
            The full tensor for this rank, in CPU memory; None if no pair in `wanted` contains this rank.
        """
        # Point-to-point messages need connections of their own: mixed with collectives of the world's group they can be matched
        # wrongly. Creating the connections is collective, so ranks without anything to send take part, too.
        if self._context.world_size > 1 and self._gloo is None:
            self._gloo = own_gloo()
        full: Tensor | None = None
        copy: Tensor | None = None
        works: list[Any] = []
        # All ranks go through the pieces in the same order, so no two ranks wait for each other.
        for record, to in wanted:
            if to == self._rank:
                full = memory_for(record.shape, dtype_of(record))
            for owner, key, box in self._blocks(record):
                if to == self._rank and full is not None:
                    block = full[box.slices_in(full_box(record.shape))]
                    if owner == self._rank:
                        block.copy_(self._entries[key].read())
                        continue
                    raw = block.view(-1).view(torch.uint8) if block.is_contiguous() else _raw(torch.empty_like(block))
                    self._gloo.recv([raw], owner, 0).wait()
                    _set_bytes(block, raw)
                elif owner == self._rank:
                    # A piece that had to be copied is sent before the next copy is made, so at most one copy exists.
                    piece = self._entries[key].read()
                    if copy is not None:
                        works.pop().wait()
                    raw = _raw(piece)
                    copy = raw if raw.data_ptr() != piece.data_ptr() else None
                    works.append(self._gloo.send([raw], to, 0))
        for work in works:
            work.wait()
        return full

    def _blocks(self, record: TensorRecord) -> Iterator[tuple[int, str, Box]]:
        """(rank, key on that rank, box) of each piece of a full tensor."""
        for part in record.parts:
            for block in self._pieces.stored_boxes(part, part.box):
                yield self._owners[block.file], block.key, block.box


def _raw(tensor: Tensor, device: torch.device = _CPU) -> Tensor:
    """The bytes of a tensor on a device. They are a copy only if the tensor is on another device or not contiguous."""
    return tensor.detach().to(device).contiguous().view(-1).view(torch.uint8)


def _set_bytes(target: Tensor, raw: Tensor) -> None:
    """Copy the bytes into the tensor, unless they already are its memory."""
    if raw.data_ptr() != target.data_ptr():
        target.copy_(raw.view(target.dtype).view(target.shape))


# --- Files ---


_UNITS = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}
_SMALLEST = 1 << 26
"""The smallest default size of a file in bytes."""

Content = Sequence[tuple[str, TensorRecord]]
"""The (key, tensor) pairs of a file."""


def save_full(whole: FullTensors, file: str | Path, context: ParallelContext, dtype: torch.dtype | None = None) -> Path:
    """Write all tensors of `whole`, under all their names, to a safetensors file, which replaces `file`.

    Collective over the world.
    """
    target = local_path(file, "the file of engine.full_state_dict()", CheckpointError)
    content = [(name, record) for record in whole.records for name in record.names]
    with _staging(target, content, dtype, context) as staged:
        _write(whole, [(staged, content)], dtype, context)
        with agreed(context, f"writing {target}"):
            if context.get_global_rank() == 0:
                place_file(staged, target)
    return target


def save_pretrained(
    model: nn.Module,
    folder: str | Path,
    context: ParallelContext,
    max_shard_size: int | str | None = None,
    dtype: torch.dtype | None = None,
) -> Path:
    """Write a folder for transformers' `from_pretrained`: safetensors files, their index and the configs.

    Collective over the world. The files are distributed over the ranks, and the writer of a file gathers its tensors one at a
    time. The folder appears, or its weight files are replaced, only when all new files are on disk. Other files in an
    existing folder stay.

    Args:
        model: A model with a transformers `config`.
        folder: The folder to create or update.
        context: The world.
        max_shard_size: The largest file, in bytes or as text such as "5GB"; by default each rank writes one file of 64 MiB to 5 GB.
        dtype: Cast floating point tensors to this dtype.

    Returns:
        The path of the folder.
    """
    with agreed(context, f"saving to {folder}"):
        target = local_path(folder, "the folder of engine.save_pretrained()", CheckpointError)
        limit = _bytes_of(max_shard_size) if max_shard_size is not None else None
        main: Any = model[0] if isinstance(model, nn.ModuleList) else model  # the first of a rank's stages
        config: Any = getattr(main, "config", None)
        if not callable(getattr(config, "save_pretrained", None)):
            raise CheckpointError(
                f"{type(main).__name__} has no transformers config, so save_pretrained cannot write config.json. "
                "Call engine.full_state_dict('weights.safetensors') to write the weights of any model."
            )
        if target.exists() and not target.is_dir():
            raise CheckpointError(f"{target} is a file; give the name of a folder")
    whole = FullTensors(model, context)
    content = [(_file_name(record, main), record) for record in whole.records]
    total = sum(_size(record, dtype) for _, record in content)
    if limit is None:
        limit = _limit(total, context.world_size)
    files = files_of(((key, _size(record, dtype)) for key, record in content), limit)
    records = dict(content)
    first = context.get_global_rank() == 0
    with _staging(target, content, dtype, context) as staged:
        with agreed(context, f"saving to {target}"):
            if first:
                staged.mkdir()
        named = [(staged / name, [(key, records[key]) for key in keys]) for name, keys in files.items()]
        _write(whole, named, dtype, context)
        with agreed(context, f"saving to {target}"):
            if first:
                # The saved config gets the class and the dtype of the weights; the model's own config stays as it is. FSDP2 puts a
                # class of its own in front of the model's class.
                before = {name: getattr(config, name, None) for name in ("architectures", "dtype")}
                architecture = next(
                    kind.__name__
                    for kind in type(main).__mro__
                    if all(base.__name__ != "FSDPModule" for base in kind.__mro__)
                )
                floating = next((p.dtype for p in main.parameters() if p.is_floating_point()), None)
                try:
                    config.architectures = [architecture]
                    config.dtype = dtype or floating
                    config.save_pretrained(staged)
                finally:
                    for name, value in before.items():
                        setattr(config, name, value)
                if getattr(main, "generation_config", None) is not None and main.can_generate():
                    main.generation_config.save_pretrained(staged)
                publish_folder(staged, target, files, total)
    get_dist_logger().info(f"saved {len(content)} tensors to {target} in {len(files)} files", ranks=[0])
    return target


def _file_name(record: TensorRecord, model: Any) -> str:
    """The file name of a tensor. A tied weight gets the name that transformers does not list as tied to another one."""
    tied = getattr(model, "all_tied_weights_keys", None) or getattr(model, "_tied_weights_keys", None) or ()
    return next((name for name in record.names if name not in tied), record.names[0])


def _limit(total: int, ranks: int) -> int:
    """The default size of a file in bytes: one file for each rank, within the limits `_SMALLEST` and `LARGEST`."""
    return min(LARGEST, max(_SMALLEST, ceil(total / ranks)))


def _bytes_of(size: int | str) -> int:
    """The bytes of a size such as 1000, "5GB" or "512MiB"."""
    match = re.fullmatch(rf"\s*(\d+(?:\.\d+)?)\s*({'|'.join(_UNITS)})\s*", str(size).lower())
    if match is None or (found := float(match[1]) * _UNITS[match[2]]) < 1:
        raise CheckpointError(f"max_shard_size is {size!r}; pass a number of bytes, or text such as '5GB' or '512MiB'")
    return int(found)


@contextmanager
def _staging(target: Path, content: Content, dtype: torch.dtype | None, context: ParallelContext) -> Iterator[Path]:
    """A staging path for `target`, equal on all ranks; rank 0 chooses it and checks the free space. Collective over the world."""
    needed, first = sum(_size(record, dtype) for _, record in content), context.get_global_rank() == 0
    staged = target
    with agreed(context, f"writing {target}"):
        if first:
            staged = staging_path(target)
            make_room(staged, needed)
    staged = Path(gather_from_all(str(staged), context)[0])
    try:
        with no_space_errors(staged.parent, needed):
            yield staged
    finally:
        if first:
            discard(staged)


def _write(
    whole: FullTensors, files: Sequence[tuple[Path, Content]], dtype: torch.dtype | None, context: ParallelContext
) -> None:
    """Write the files, with floating point tensors cast to `dtype`. Collective over the world; an error is raised on all ranks."""
    rank, world_size = context.get_global_rank(), context.world_size
    queues: list[list[TensorRecord]] = [[] for _ in range(world_size)]
    own: list[tuple[Path, list[FileEntry]]] = []

    # In round n, every rank receives the n-th tensor of its files, while it sends its pieces of the other ranks' tensors. The
    # entries of the files pull from this iterator as they are written, so a rank holds one full tensor at a time.
    def gather_in_rounds() -> Iterator[Tensor]:
        for turn in range(max(map(len, queues))):
            wanted = [(records[turn], to) for to, records in enumerate(queues) if turn < len(records)]
            found = whole.gather_to_ranks(wanted)
            if found is not None:
                yield found.to(dtype) if dtype is not None and found.is_floating_point() else found

    # Files are dealt out to the ranks in turn.
    arriving = gather_in_rounds()
    for number, (path, content) in enumerate(files):
        known = dict(content)
        entries = in_file_order(
            FileEntry(key, _type(record, dtype), record.shape, lambda: next(arriving)) for key, record in content
        )
        queues[number % world_size] += [known[entry.key] for entry in entries]
        if number % world_size == rank:
            own.append((path, entries))
    with agreed(context, f"writing {listed(path.name for path, _ in own)}"):
        try:
            for path, entries in own:
                write_tensors(path, entries)
        finally:
            # After an error here the other ranks still need this rank's pieces.
            for _ in arriving:
                pass


def _type(record: TensorRecord, dtype: torch.dtype | None) -> str:
    return record.dtype if dtype is None or not dtype_of(record).is_floating_point else name_of(dtype)


def _size(record: TensorRecord, dtype: torch.dtype | None) -> int:
    return prod(record.shape) * WIDTHS[_type(record, dtype)]
