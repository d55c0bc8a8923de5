"""Whole weights at run time, out of what the ranks hold: one tensor at a time, to one rank, to all, or into files.

It is a save without a folder: the ranks say what each would write, which makes the records of the whole tensors, and
the pieces then travel between ranks instead of lying in files. `save_full` writes one file of them, `save_pretrained` a folder
as transformers keeps it, both while training.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import ceil, prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from colonnade.checkpoint.agreement import agreed
from colonnade.checkpoint.manifest import WIDTHS, FileRecord, LayoutRecord, Manifest, TensorRecord, tensors_file
from colonnade.checkpoint.save_plan import RankNote, SavePlan, merge_tensors, plan_weight
from colonnade.checkpoint.storage import discard, make_room, no_space_errors, place_file, staging_path
from colonnade.checkpoint.tensor_files import FileEntry, dtype_of, in_file_order, memory_for, name_of, write_tensors
from colonnade.checkpoint.weights_folder import LARGEST, files_of, publish_folder
from colonnade.comm.messages import gather_from_all, message_device
from colonnade.comm.rank_group import own_gloo
from colonnade.context.parallel_context import ParallelContext
from colonnade.errors import CheckpointError, listed
from colonnade.logging import get_dist_logger
from colonnade.parallel.boxes import Box, whole_box
from colonnade.parallel.whole import LocalTensor, locate_tensors
from colonnade.paths import local_path

_CPU = torch.device("cpu")


class WholeTensors:
    """The parameters and persistent buffers of a model as wholes, on any layout. Collective over the world to make.

    `records` are the same on every rank, in the same order. `read` gives something else than the tensors themselves that
    is cut as they are, such as gradients; `keep` chooses among them.
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
            # No file is written: the name of a rank's file only says whose a piece is.
            note = plan.note(FileRecord(tensors_file(self._rank), 0, ""))
        notes = [RankNote.parse(text, "a rank's note") for text in gather_from_all(note.dump(), context)]
        with agreed(context, doing):
            self.records, cuts = merge_tensors(notes)
        files = tuple(note.file for note in notes if note.file is not None)
        self._pieces = Manifest(0, 0.0, LayoutRecord.of(context.layout), files, cuts, self.records, None, ())
        self._owners = {file.name: rank for rank, file in enumerate(files)}
        self._mine = {entry.key: entry for entry in plan.entries}
        self._wires: Any = None

    def gather(self, record: TensorRecord) -> Tensor:
        """A whole tensor, on the CPU of every rank. Collective over the world."""
        whole = memory_for(record.shape, dtype_of(record))
        for owner, key, box in self._blocks(record):
            here = whole[box.slices_in(whole_box(record.shape))]
            if owner == self._rank:
                here.copy_(self._mine[key].read())
            if self._context.world_size > 1:
                sent = _raw(here, message_device(self._context.device))
                dist.broadcast(sent, src=owner)
                _take(here, sent)
        return whole

    def gather_all(self) -> Iterator[tuple[TensorRecord, Tensor]]:
        """Every whole tensor, on the CPU of every rank, by one message of each rank. Collective over the world.

        Faster than one message for each tensor where tensors are small. A rank holds all of them, and the message of one rank.
        """
        wholes = [memory_for(record.shape, dtype_of(record)) for record in self.records]
        pieces: dict[int, list[tuple[str, Tensor]]] = {}
        for record, whole in zip(self.records, wholes, strict=True):
            for owner, key, box in self._blocks(record):
                pieces.setdefault(owner, []).append((key, whole[box.slices_in(whole_box(record.shape))]))
        for owner, parts in pieces.items():
            if owner == self._rank:
                for key, here in parts:
                    here.copy_(self._mine[key].read())
            # One message of each rank: many small broadcasts cost more than the bytes in them.
            if self._context.world_size > 1:
                sent = torch.cat([_raw(here) for _, here in parts]).to(message_device(self._context.device))
                dist.broadcast(sent, src=owner)
                for (_, here), raw in zip(parts, sent.cpu().split([here.nbytes for _, here in parts]), strict=True):
                    _take(here, raw.clone())  # a copy begins where its numbers may
        yield from zip(self.records, wholes, strict=True)

    def gather_apart(self, wanted: Sequence[tuple[TensorRecord, int]]) -> Tensor | None:
        """The whole tensor of the pair that names this rank, of pairs of which no two name one rank. Collective.

        A rank holds no more than that tensor, one piece that it receives and one that it sends.
        """
        if self._context.world_size > 1:
            self._open_wires()
        whole: Tensor | None = None
        copy: Tensor | None = None
        works: list[Any] = []
        # All ranks go through the pieces in one order, so none waits for one that waits for it.
        for record, to in wanted:
            if to == self._rank:
                whole = memory_for(record.shape, dtype_of(record))
            for owner, key, box in self._blocks(record):
                if to == self._rank and whole is not None:
                    self._receive(whole[box.slices_in(whole_box(record.shape))], owner, key)
                elif owner == self._rank:
                    piece = self._mine[key].read()
                    if copy is not None:
                        works.pop().wait()
                    raw = _raw(piece)
                    copy = raw if raw.data_ptr() != piece.data_ptr() else None
                    works.append(self._wires.send([raw], to, 0))
        for work in works:
            work.wait()
        return whole

    def _receive(self, here: Tensor, owner: int, key: str) -> None:
        if owner == self._rank:
            here.copy_(self._mine[key].read())
            return
        raw = here.view(-1).view(torch.uint8) if here.is_contiguous() else _raw(torch.empty_like(here))
        self._wires.recv([raw], owner, 0).wait()
        _take(here, raw)

    def _blocks(self, record: TensorRecord) -> Iterator[tuple[int, str, Box]]:
        """The pieces of a whole tensor: (rank, key there, box) of each."""
        for part in record.parts:
            for block in self._pieces.stored_boxes(part, part.box):
                yield self._owners[block.file], block.key, block.box

    def _open_wires(self) -> None:
        """Open a process group for messages of two ranks: in the group of the world they would be missed among those of all.

        Collective, so a rank that has nothing to send opens them too.
        """
        if self._wires is None:
            self._wires = own_gloo()


def _raw(tensor: Tensor, device: torch.device = _CPU) -> Tensor:
    """The bytes of a tensor on a device, a copy only where they are elsewhere or out of order."""
    return tensor.detach().to(device).contiguous().view(-1).view(torch.uint8)


def _take(target: Tensor, raw: Tensor) -> None:
    """Give the tensor the bytes, unless they are its own."""
    if raw.data_ptr() != target.data_ptr():
        target.copy_(raw.view(target.dtype).view(target.shape))


# --- Files ---


_UNITS = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}
_SMALLEST = 1 << 26
"""Bytes of a file below which it is not divided among ranks, where the size is left to us."""

Content = Sequence[tuple[str, TensorRecord]]
"""The keys and tensors of a file."""


def save_full(
    whole: WholeTensors, file: str | Path, context: ParallelContext, dtype: torch.dtype | None = None
) -> Path:
    """Write all tensors, each under each of its names, into one safetensors file that replaces `file`. Collective."""
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
    """Write the folder that transformers' `from_pretrained` loads: safetensors files, their index and the configs.

    Collective. All ranks write, each some of the files, of which each tensor is assembled by its writer. The folder
    appears, or its files take the place of earlier ones, when all of it is on disk; what else lies there is left alone.
    """
    with agreed(context, f"saving to {folder}"):
        target = local_path(folder, "the folder of engine.save_pretrained()", CheckpointError)
        limit = _bytes_of(max_shard_size) if max_shard_size is not None else None
        main: Any = model[0] if isinstance(model, nn.ModuleList) else model  # the first of a rank's stages
        config = _config_of(main)
        if target.exists() and not target.is_dir():
            raise CheckpointError(f"{target} is a file; give the name of a folder")
    whole = WholeTensors(model, context)
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
                _write_configs(staged, main, config, dtype)
                publish_folder(staged, target, files, total)
    get_dist_logger().info(f"saved {len(content)} tensors to {target} in {len(files)} files", ranks=[0])
    return target


def _write_configs(staged: Path, model: Any, config: Any, dtype: torch.dtype | None) -> None:
    before = {name: getattr(config, name, None) for name in ("architectures", "dtype")}
    # FSDP2 makes a class of its own of the model's.
    kind = next(kind for kind in type(model).__mro__ if not _is_fsdp(kind))
    floating = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
    try:
        config.architectures = [kind.__name__]
        config.dtype = dtype or floating
        config.save_pretrained(staged)
    finally:
        for name, value in before.items():
            setattr(config, name, value)
    if getattr(model, "generation_config", None) is not None and model.can_generate():
        model.generation_config.save_pretrained(staged)


def _is_fsdp(kind: type) -> bool:
    return any(base.__name__ == "FSDPModule" for base in kind.__mro__)


def _config_of(model: Any) -> Any:
    config = getattr(model, "config", None)
    if not callable(getattr(config, "save_pretrained", None)):
        raise CheckpointError(
            f"{type(model).__name__} has no config of transformers, so there is no config.json to write: "
            f"engine.full_state_dict('weights.safetensors') writes the weights of any model"
        )
    return config


def _file_name(record: TensorRecord, model: Any) -> str:
    """The one name under which transformers writes a weight that has several: not one that is tied to another."""
    tied = getattr(model, "all_tied_weights_keys", None) or getattr(model, "_tied_weights_keys", None) or ()
    return next((name for name in record.names if name not in tied), record.names[0])


def _limit(total: int, ranks: int) -> int:
    """The default size of a file in bytes: every rank writes one file, unless the files would be too small or too large."""
    return min(LARGEST, max(_SMALLEST, ceil(total / ranks)))


def _bytes_of(size: int | str) -> int:
    """A number of bytes, or a text such as "5GB" or "512MiB"."""
    match = re.fullmatch(rf"\s*(\d+(?:\.\d+)?)\s*({'|'.join(_UNITS)})\s*", str(size).lower())
    if match is None or (found := float(match[1]) * _UNITS[match[2]]) < 1:
        raise CheckpointError(f"max_shard_size is a number of bytes or a text such as '5GB' or '512MiB', not {size!r}")
    return int(found)


@contextmanager
def _staging(target: Path, content: Content, dtype: torch.dtype | None, context: ParallelContext) -> Iterator[Path]:
    """A staged path for `target`, the same on all ranks; rank 0 makes it up and sees that there is room. Collective."""
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
    whole: WholeTensors, files: Sequence[tuple[Path, Content]], dtype: torch.dtype | None, context: ParallelContext
) -> None:
    """Write the files, the n-th by rank n modulo their number. Collective; an error on one rank is one on all.

    `dtype` is that of all floating point tensors in the files. Every rank assembles one tensor at a time.
    """
    ranks, mine = context.world_size, context.get_global_rank()
    turns: list[list[TensorRecord]] = [[] for _ in range(ranks)]
    own: list[tuple[Path, list[FileEntry]]] = []
    arriving: Iterator[Tensor] = iter(())
    # File n is written by rank n modulo the number of ranks. In turn t every rank receives the t-th tensor of its files.
    for number, (path, content) in enumerate(files):
        known = dict(content)
        entries = in_file_order(
            FileEntry(key, _type(record, dtype), record.shape, lambda: next(arriving)) for key, record in content
        )
        turns[number % ranks] += [known[entry.key] for entry in entries]
        if number % ranks == mine:
            own.append((path, entries))
    arriving = _arriving(whole, turns, dtype)
    with agreed(context, f"writing {listed(path.name for path, _ in own)}"):
        try:
            for path, entries in own:
                write_tensors(path, entries)
        finally:
            for _ in arriving:  # the others need this rank's pieces, whatever has happened here
                pass


def _arriving(
    whole: WholeTensors, turns: Sequence[Sequence[TensorRecord]], dtype: torch.dtype | None
) -> Iterator[Tensor]:
    """This rank's tensors in turn; all ranks exchange those of one turn together, and then each writes its own."""
    for turn in range(max(map(len, turns))):
        found = whole.gather_apart([(records[turn], to) for to, records in enumerate(turns) if turn < len(records)])
        if found is not None:
            yield found.to(dtype) if dtype is not None and found.is_floating_point() else found


def _type(record: TensorRecord, dtype: torch.dtype | None) -> str:
    return record.dtype if dtype is None or not dtype_of(record).is_floating_point else name_of(dtype)


def _size(record: TensorRecord, dtype: torch.dtype | None) -> int:
    return prod(record.shape) * WIDTHS[_type(record, dtype)]
