"""Whole weights at run time, out of what the ranks hold: one tensor at a time, to one rank, to all, or into files (`pretrained`).

It is a save without a folder: the ranks say what each would write, which makes the records of the whole tensors, and
the pieces then travel between ranks instead of lying in files.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import ceil, prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from colonnade.checkpoint.agreement import agreed, as_checkpoint_errors, fault_point
from colonnade.checkpoint.manifest import (
    MANIFEST,
    WIDTHS,
    Box,
    FileRecord,
    GroupRecord,
    ItemRecord,
    LayoutRecord,
    Manifest,
    TensorRecord,
    tensors_file,
    whole_box,
)
from colonnade.checkpoint.save import Outline, RankNote, SavePlan, entry_key, merge_tensors, plan_weight
from colonnade.checkpoint.storage import (
    RunLock,
    StorageWriter,
    discard,
    make_room,
    newest_good,
    place_file,
    place_folder,
    published,
    staging,
    staging_name,
    staging_path,
    step_of,
    told_of_space,
    verify,
)
from colonnade.checkpoint.tensor_files import (
    INDEX,
    FileEntry,
    TensorReader,
    decode,
    dtype_of,
    encode,
    in_file_order,
    memory_for,
    name_of,
    tensors_in,
    write_tensors,
)
from colonnade.checkpoint.tensors import LocalTensor, locate_tensors
from colonnade.comm.messages import gather_from_all, message_device
from colonnade.comm.rank_group import own_gloo
from colonnade.context.parallel_context import ParallelContext
from colonnade.errors import CheckpointError, listed
from colonnade.logging import get_dist_logger
from colonnade.parallel.flat import MASTER
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
        # The name of a rank's file says whose a piece is; there is none.
        plan = SavePlan(RankNote(self._rank, None, file=FileRecord(tensors_file(self._rank), 0, "")))
        with agreed(context, doing):
            for tensor in self.tensors:
                plan_weight(plan, tensor, read(tensor))
            plan.close()
        notes = [RankNote.parse(text, "a rank's note") for text in gather_from_all(plan.note.dump(), context)]
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

        Faster than one after the other where they are small; a rank holds all of them and what one rank sends.
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
        """Of a whole tensor: (rank, key there, box) of each piece."""
        for part in record.parts:
            for block in self._pieces.stored_boxes(part, part.box):
                yield self._owners[block.file], block.key, block.box

    def _open_wires(self) -> None:
        """Between any two ranks. Of their own: messages of two ranks would be missed among those of all others.

        Collective, so a rank that has nothing to send opens them too.
        """
        if self._wires is None:
            self._wires = own_gloo()


def _raw(tensor: Tensor, device: torch.device = _CPU) -> Tensor:
    """Its bytes on a device, a copy only where they are elsewhere or out of order."""
    return tensor.detach().to(device).contiguous().view(-1).view(torch.uint8)


def _take(target: Tensor, raw: Tensor) -> None:
    """Give the tensor the bytes, unless they are its own."""
    if raw.data_ptr() != target.data_ptr():
        target.copy_(raw.view(target.dtype).view(target.shape))


# --------------------------------------------------------------------------------------------------
# The folder of a model as transformers keeps it: which tensor goes into which file, the index, and how it gets its name.
# --------------------------------------------------------------------------------------------------


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


def write_folder(entries: Sequence[FileEntry], staged: Path, target: Path, config: Path | None) -> None:
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


# --------------------------------------------------------------------------------------------------
# Whole weights written to disk while training: into one file, or as transformers keeps a model, by all ranks at once.
# --------------------------------------------------------------------------------------------------


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
    """Bytes of a file where nobody says: so many that every rank has one to write, unless they are small or very large."""
    return min(LARGEST, max(_SMALLEST, ceil(total / ranks)))


def _bytes_of(size: int | str) -> int:
    """A number of bytes, or a text such as "5GB" or "512MiB"."""
    match = re.fullmatch(rf"\s*(\d+(?:\.\d+)?)\s*({'|'.join(_UNITS)})\s*", str(size).lower())
    if match is None or (found := float(match[1]) * _UNITS[match[2]]) < 1:
        raise CheckpointError(f"max_shard_size is a number of bytes or a text such as '5GB' or '512MiB', not {size!r}")
    return int(found)


@contextmanager
def _staging(target: Path, content: Content, dtype: torch.dtype | None, context: ParallelContext) -> Iterator[Path]:
    """Where all ranks write what is to become `target`, as the first rank says; it sees that there is room. Collective."""
    needed, first = sum(_size(record, dtype) for _, record in content), context.get_global_rank() == 0
    staged = target
    with agreed(context, f"writing {target}"):
        if first:
            staged = staging_path(target)
            make_room(staged, needed)
    staged = Path(gather_from_all(str(staged), context)[0])
    try:
        with told_of_space(staged.parent, needed):
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


# --------------------------------------------------------------------------------------------------
# State that came from elsewhere, as tensors that are read when their turn comes, and a checkpoint of ours made of it.
# --------------------------------------------------------------------------------------------------


@dataclass
class ForeignState:
    """Whole weights by name, and what an optimizer kept for them: by their names, and by its own.

    `groups` has the names and options of each parameter group; None where there is no optimizer.
    """

    weights: dict[str, FileEntry]
    optimizer: Mapping[str, Mapping[str, FileEntry | Any]] = field(default_factory=dict)
    groups: list[tuple[list[str], dict[str, Any]]] | None = None


def write_checkpoint(state: ForeignState, folder: Path, step: int) -> Path:
    """Write it as the checkpoint of `step` of the run in `folder`, one tensor in memory at a time; returns its path.

    None of the run's other checkpoints is touched.
    """
    plan = SavePlan(RankNote(0, None if state.groups is None else []))
    for name, entry in state.weights.items():
        _add(plan, name, (name,), "", entry)
    for label, kept in state.optimizer.items():
        for name, value in kept.items():
            if isinstance(value, FileEntry):
                _add(plan, label, (), name, value)
            else:
                key = entry_key(label, name)
                plan.note.items.append(plan.add_item(key, (0,), encode(value, key)))
    for index, (names, options) in enumerate(state.groups or ()):
        item = plan.add_item(f"optimizer/options/{index}", (0,), encode(options, f"param_groups[{index}]"))
        assert plan.note.groups is not None
        plan.note.groups.append((str(index), GroupRecord(index, tuple(names), item, None)))
    plan.close()
    lock = RunLock(folder)
    try:
        staged = folder / staging_name(step)
        writer = StorageWriter(step, staged, 0, LayoutRecord(1, ()), plan.size, keep=sys.maxsize)
        try:
            writer.stage()
            writer.write(plan)
            writer.commit()
        except BaseException:
            writer.drop()
            raise
        return next(found.path for found in reversed(published(folder)) if found.step == step)
    finally:
        lock.release()


def _add(plan: SavePlan, label: str, names: tuple[str, ...], state_name: str, entry: FileEntry) -> None:
    box = whole_box(entry.shape)
    outline = Outline.of_rows(label, names, entry.shape, box)
    stop = entry.shape[0] if entry.shape else 1
    plan.add_entry(outline, 0, stop if box.numel else 0, state_name, replace(entry, key=entry_key(label, state_name)))


# --------------------------------------------------------------------------------------------------
# Checkpoints made into other files and out of them, in one process without a process group.
# --------------------------------------------------------------------------------------------------


def find_checkpoint(folder: str | Path, step: int | None = None) -> Path:
    """`folder` itself if it is a checkpoint; in a run's folder the newest good one, or that of `step`."""
    path = local_path(folder, "the folder of checkpoints", CheckpointError)
    if step_of(path) is not None or (path / MANIFEST).exists():
        return path
    found, problems = newest_good(path, step)
    if found is None:
        wanted = f" of step {step}" if step is not None else ""
        raise CheckpointError("\n  ".join([f"{path} has no good checkpoint{wanted}", *problems]), code="C080")
    return found.path


FORMATS = ("safetensors", "hf", "dcp")


def import_checkpoint(source: str | Path, folder: str | Path, kind: str, step: int = 0, *, trust: bool = False) -> Path:
    """Make the checkpoint of `step` of the run in `folder` out of a file or folder of another format; returns its path.

    `kind` is "safetensors" (a file), "hf" (a folder as transformers writes it: weights alone) or "dcp" (a folder of
    torch.distributed.checkpoint: weights and, where it has one, the optimizer). Names stay as they are. Pickles are read only
    with `trust`. One whole tensor is in memory at a time.
    """
    path = local_path(source, "what is imported", CheckpointError)
    with as_checkpoint_errors(f"importing {path}"):
        _check_format(kind)
        if step < 0:
            raise CheckpointError(f"a step is a whole number from 0 on, not {step!r}")
        if kind == "dcp":
            from colonnade.checkpoint.dcp import read_dcp  # which needs a part of torch that takes two seconds

            state = read_dcp(path, trust)
        else:
            if kind == "safetensors" and not path.is_file():
                raise CheckpointError(f"{path} is no file; give a safetensors file, or say --format hf for a folder")
            found = tensors_in(path, trust)
            state = ForeignState(
                {key: FileEntry(key, name_of(one.dtype), one.shape, one.read) for key, one in found.items()}
            )
        return write_checkpoint(state, local_path(folder, "the folder of checkpoints", CheckpointError), step)


def export_checkpoint(
    checkpoint: str | Path, target: str | Path, kind: str, step: int | None = None, config: str | Path | None = None
) -> Path:
    """Make a file or folder of another format out of a checkpoint; returns it. `kind` is as in `import_checkpoint`.

    "hf" takes config.json, and what else is no file of weights, from the folder `config`. A checkpoint is verified first.
    """
    with as_checkpoint_errors(f"exporting {checkpoint}"):
        _check_format(kind)
        out = local_path(target, "what is exported to", CheckpointError)
        home = None if config is None else local_path(config, "the folder of config.json", CheckpointError)
        if home is not None and (kind != "hf" or not (home / "config.json").is_file()):
            raise CheckpointError(f"config={str(config)!r}: give a folder with config.json, and format hf")
        source = find_checkpoint(checkpoint, step)
        if kind == "safetensors":
            return export_full(source, out)
        state = _state_of(source, under_all_names=kind == "dcp")
        needed = sum(entry.size for entry in state.weights.values())
        if out.exists() and not out.is_dir():
            raise CheckpointError(f"{out} is a file; give the name of a folder")
        with staging(out, needed) as staged:
            if kind == "dcp":
                from colonnade.checkpoint.dcp import write_dcp  # as above

                write_dcp(state, staged, out)
            else:
                write_folder(list(state.weights.values()), staged, out, home)
        return out


def _check_format(kind: str) -> None:
    if kind not in FORMATS:
        raise CheckpointError(f"the format is one of {listed(FORMATS)}, not {kind!r}")


def _state_of(source: Path, under_all_names: bool) -> ForeignState:
    """All of a checkpoint that other formats know; a tied weight under its first name, or under all."""
    manifest = verify(source)
    reader = TensorReader(source, manifest)
    weights: dict[str, FileEntry] = {}
    names: dict[str, str] = {}
    for record in (record for record in manifest.tensors if not record.state_name):
        names[record.label] = record.names[0]
        weights |= {name: _entry(name, record, reader) for name in record.names[: None if under_all_names else 1]}
    kept: dict[str, dict[str, Any]] = {}
    for record in manifest.tensors:
        if record.state_name and record.state_name != MASTER:
            own = kept.setdefault(names[record.label], {})
            own[record.state_name] = _entry(record.state_name, record, reader)

    def decoded(item: ItemRecord) -> Any:
        return decode(item.value, lambda at: reader.entry(item.file or "", item.entry(at)))

    for item in manifest.items:
        kind, _, rest = item.name.partition("/")
        state_name, _, label = rest.partition("/")
        if kind == "optimizer":
            kept.setdefault(names[label], {})[state_name] = decoded(item)
    merged: dict[int, tuple[list[str], dict[str, Any]]] = {}
    for group in manifest.groups or ():
        merged.setdefault(group.index, ([], decoded(group.options)))[0].extend(names[label] for label in group.names)
    return ForeignState(weights, kept, None if manifest.groups is None else [merged[at] for at in sorted(merged)])


def export_full(checkpoint: str | Path, file: str | Path) -> Path:
    """Write all weights and buffers, whole, into one safetensors file that replaces `file`; returns it.

    `model.load_state_dict(safetensors.torch.load_file(file))` loads it. A tied weight is there under each of its
    names. Of a run's folder the newest good checkpoint is taken. It is verified first; one whole tensor is in memory at a time.
    """
    target = local_path(file, "the file that is exported to", CheckpointError)
    with as_checkpoint_errors(f"exporting {checkpoint}"):
        source = find_checkpoint(checkpoint)
        manifest = verify(source)
        reader = TensorReader(source, manifest)
        weights = [record for record in manifest.tensors if not record.state_name]
        entries = [_entry(name, record, reader) for record in weights for name in record.names]
        with staging(target, sum(entry.size for entry in entries)) as staged:
            write_tensors(staged, entries)
            place_file(staged, target)
    return target


def _entry(key: str, record: TensorRecord, reader: TensorReader) -> FileEntry:
    """A whole tensor, read when its turn comes."""
    return FileEntry(key, record.dtype, record.shape, lambda: reader.whole(record))
