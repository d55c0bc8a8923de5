"""Whole weights written to disk while training: into one file, or as transformers keeps a model, by all ranks at once."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import ceil, prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from colonnade.checkpoint.collective import agreed, gather_json
from colonnade.checkpoint.folders import LARGEST, files_of, publish_folder
from colonnade.checkpoint.format.entries import Entry, dtype_of, in_file_order, name_of
from colonnade.checkpoint.format.manifest import WIDTHS, TensorRecord
from colonnade.checkpoint.format.tensors import write_tensors
from colonnade.checkpoint.storage.exchange import discard, make_room, place_file, staging_path
from colonnade.checkpoint.storage.folder import told_of_space
from colonnade.checkpoint.whole import WholeTensors
from colonnade.context.parallel_context import ParallelContext
from colonnade.errors import CheckpointError, listed
from colonnade.logging import get_dist_logger
from colonnade.paths import local_path

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
    staged = Path(gather_json(str(staged), context)[0])
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
    own: list[tuple[Path, list[Entry]]] = []
    arriving: Iterator[Tensor] = iter(())
    for number, (path, content) in enumerate(files):
        known = dict(content)
        entries = in_file_order(
            Entry(key, _type(record, dtype), record.shape, lambda: next(arriving)) for key, record in content
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
