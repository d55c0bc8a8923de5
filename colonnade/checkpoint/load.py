"""A load from top to bottom: `load_checkpoint`. All that may fail comes before anything changes. Collective.

1. Each rank says where its tensors lie in their wholes; names and boxes are all that matters, not the layout that saved.
2. Rank 0 lists the folder. All ranks examine one checkpoint after the other, newest first: each reads the manifest, and the
   hashes of every n-th file. One that is damaged is passed over.
3. Each rank matches its tensors with the records of the manifest by any of their names (`TensorMatch`). All ranks refuse
   together if a tensor is missing, left over, or of another shape or type.
4. Each rank reads, of the files that have some of it, just the bytes of its own boxes, into new memory; and every value.
5. The user's own objects load their states. If an object fails on any rank, all objects get their old states back.
6. The tensors, the optimizer and the random streams are set.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from colonnade.checkpoint.agreement import agreed
from colonnade.checkpoint.manifest import Damaged, Manifest, TensorRecord
from colonnade.checkpoint.optimizer_state import OptimizerLoader, load_optimizer
from colonnade.checkpoint.storage import Found, check_files, published, read_manifest
from colonnade.checkpoint.tensor_files import TensorReader, type_name
from colonnade.checkpoint.values import RandomSource, SavedValues
from colonnade.comm.messages import gather_from_all
from colonnade.context.parallel_context import ParallelContext
from colonnade.errors import CheckpointError, as_checkpoint_errors, listed
from colonnade.logging import get_dist_logger
from colonnade.parallel.flat import MASTER
from colonnade.parallel.whole import EXTRA_STATE, LocalTensor, locate_tensors, prefix_of

_SHOWN = 12


@dataclass(frozen=True)
class LoadedInfo:
    """The facts of a load: the step, the folder, the layout that saved it, and the plain values of `extra`.

    `random` says whether the random streams were restored to the bit or, on another layout, re-derived. `skipped` has
    a line for every newer checkpoint that was damaged.
    """

    step: int
    folder: Path
    layout: str
    same_layout: bool
    random: RandomSource
    extra: dict[str, Any] = field(default_factory=dict)
    skipped: tuple[str, ...] = ()


def load_checkpoint(
    folder: Path,
    context: ParallelContext,
    model: nn.Module,
    optimizer: Any,
    extra: Mapping[str, Any],
    step: int | None,
    content: bool,
    rest: Any = None,
) -> LoadedInfo:
    """Load the newest good checkpoint, or that of `step`; `content` asks for the hashes of the files too.

    `rest` is an object that takes the plain values all together, before weights change.
    """
    tensors = locate_tensors(model, context, "loading")
    path, manifest, skipped = _newest_good(folder, step, content, context)

    # Names are matched on each rank alone. Whether the checkpoint has too much is known only from all ranks: each has some of
    # the model.
    with _all_or_nothing(context, path):
        match = TensorMatch(tensors, manifest)
    notes = gather_from_all(match.note(), context)

    # Everything is read before the first object of any rank changes: reading is what may fail, for reasons of one rank alone.
    with _all_or_nothing(context, path):
        match.check(notes, str(path))
        reader = TensorReader(path, manifest)
        values = SavedValues(reader, context)
        states, plain = values.extras(extra)
        takers = [_Taker(f"extra[{name!r}]", extra[name].state_dict, extra[name].load_state_dict) for name in states]
        for name, module in model.named_modules():
            key = f"model/{prefix_of(model)}{name}{'.' if name else ''}{EXTRA_STATE}"
            if values.has(key):
                states[key] = values.get(key)
                takers.append(_Taker(f"the module {name}", module.get_extra_state, module.set_extra_state))
        if rest is not None:
            states["rest"] = plain
            takers.append(_Taker("the run", rest.state_dict, rest.load_state_dict))
        state = None
        if optimizer is not None:
            state = OptimizerLoader(tensors, match.record_of, reader, values).state_dict_for(optimizer)
        found = match.read_tensors(reader, values)
        streams = values.random_state()

    # Objects of the user are code of the user, which may fail too. What they had is kept, so that this can be undone.
    before: list[Any] = []
    try:
        with _all_or_nothing(context, path):
            for taker, given in zip(takers, states.values(), strict=True):
                with as_checkpoint_errors(f"{taker.name} does not take its state"):
                    before.append(copy.deepcopy(taker.give()))
                    taker.take(given)
    except CheckpointError:
        for taker, kept in zip(takers, before, strict=False):
            with suppress(Exception):  # an object that has just failed may fail again
                taker.take(kept)
        raise

    # Only copies into memory that is there remain, and the optimizer's own `load_state_dict`, which has hooks of the user.
    with agreed(context, f"{path} was read, but loaded only in part; load again before you go on"):
        with torch.no_grad():
            for tensor, value in zip(tensors, found, strict=True):
                tensor.local.copy_(value)
        if state is not None:
            load_optimizer(optimizer, state)
        random = values.restore_random(*streams)
    get_dist_logger().info(f"loaded step {manifest.step} from {path}, saved on {manifest.layout}")
    return LoadedInfo(manifest.step, path, str(manifest.layout), values.same_layout, random, plain, skipped)


@dataclass(frozen=True)
class _Taker:
    """An object of the user's that takes a state, and can give the one that it has."""

    name: str
    give: Callable[[], Any]
    take: Callable[[Any], Any]


@contextmanager
def _all_or_nothing(context: ParallelContext, path: Path) -> Iterator[None]:
    """`agreed`, for a block that leaves everything as it was if it fails: the error says so."""
    try:
        with agreed(context, f"loading {path}"):
            yield
    except CheckpointError as error:
        raise CheckpointError(f"{error}\n(nothing was loaded: all is as it was before)") from error


def _newest_good(
    folder: Path, step: int | None, content: bool, context: ParallelContext
) -> tuple[Path, Manifest, tuple[str, ...]]:
    """The newest checkpoint that all ranks find in order, and why newer ones were skipped. Collective."""
    # Rank 0 lists for all: another rank of a network file system may not see the newest folder yet.
    listing: list[list[Any]] = []
    with agreed(context, f"listing {folder}"):
        if context.get_global_rank() == 0:
            listing += [[found.step, found.revision, found.path.name] for found in reversed(published(folder))]
    there = [Found(number, revision, folder / name) for number, revision, name in gather_from_all(listing, context)[0]]
    wanted = [found for found in there if step in (None, found.step)]
    if not wanted:
        steps = listed(sorted({found.step for found in there}))
        missing = f"no checkpoint of step {step}; there are steps {steps}" if there else "no checkpoint"
        raise CheckpointError(f"{folder} has {missing}. Start without loading, or give another folder or step.")

    skipped: list[str] = []
    for found in wanted:
        # Each file is hashed by one rank.
        note = {"damaged": "", "unreadable": ""}
        manifest = None
        try:
            manifest = read_manifest(found.path)
            check_files(found.path, manifest.files[context.get_global_rank() :: context.world_size], content)
        except (Damaged, OSError) as error:
            note["damaged"] = str(error)
        except Exception as error:  # another format is no damage, and an older checkpoint no answer to it
            note["unreadable"] = str(error)
        notes = gather_from_all(note, context)
        for other in notes:
            if other["unreadable"]:
                raise CheckpointError(f"{found.path} cannot be loaded: {other['unreadable']}")
        problem = next((other["damaged"] for other in notes if other["damaged"]), "")
        if manifest is not None and not problem:
            if skipped:
                get_dist_logger().warning(f"loading {found.path.name} instead, the last good one", ranks=[0])
            return found.path, manifest, tuple(skipped)
        skipped.append(f"{found.path.name}: {problem}")
        get_dist_logger().warning(f"the checkpoint {found.path} is damaged: {problem}", ranks=[0])
    of_step = f" of step {step}" if step is not None else ""
    raise CheckpointError(f"no good checkpoint{of_step} in {folder}:\n  " + "\n  ".join(skipped), code="C080")


class TensorMatch:
    """For every tensor of this rank's model, its records in the checkpoint, found by any of its names.

    A tensor has several records if weights are tied here that were not when they were saved.
    """

    def __init__(self, tensors: Sequence[LocalTensor], manifest: Manifest) -> None:
        self._tensors, self._manifest = tensors, manifest
        self._records: dict[int, TensorRecord] = {}
        self._sources: dict[int, TensorRecord] = {}
        self._others: dict[int, list[TensorRecord]] = {}
        self._missing: list[str] = []
        self._mismatched: list[str] = []
        known: dict[str, TensorRecord] = {}
        for record in manifest.tensors:
            if not record.state_name:
                for name in (record.label, *record.names):
                    known.setdefault(name, record)
        masters = {record.label: record for record in manifest.tensors if record.state_name == MASTER}
        for tensor in tensors:
            found = [known[name] for name in (*tensor.names, tensor.label) if name in known]
            if not found:
                self._missing.append(tensor.names[0])
                continue
            record, *self._others[id(tensor)] = {id(record): record for record in found}.values()
            self._records[id(tensor)] = record
            here = (type_name(tensor.local, listed(tensor.names)), tensor.shape)
            master = masters.get(record.label)
            if master is not None and here == (master.dtype, master.shape):
                self._sources[id(tensor)] = master  # the weight itself, before it was rounded
            elif here != (record.dtype, record.shape):
                self._mismatched.append(
                    f"{tensor.names[0]}: {record.dtype} {list(record.shape)} in the checkpoint, {here[0]} "
                    f"{list(tensor.shape)} here"
                )

    def record_of(self, tensor: LocalTensor) -> TensorRecord:
        """The record of a tensor."""
        return self._records[id(tensor)]

    def note(self) -> dict[str, list[str]]:
        """The findings of this rank that `check` needs of all ranks."""
        others = (record for records in self._others.values() for record in records)
        used = sorted({record.label for record in (*self._records.values(), *others)})
        return {"used": used, "missing": self._missing, "mismatched": self._mismatched}

    def check(self, notes: Sequence[dict[str, list[str]]], where: str) -> None:
        """Raise the same error on every rank unless all tensors of the checkpoint and of all ranks found each other."""
        used = {label for note in notes for label in note["used"]}
        problems = {
            "missing in the checkpoint": _union(note["missing"] for note in notes),
            "in the checkpoint, but not in the model": [
                (record.names or (record.label,))[0]
                for record in self._manifest.tensors
                if not record.state_name and record.label not in used
            ],
            "of another shape or type": _union(note["mismatched"] for note in notes),
        }
        lines = [f"  {what} ({len(names)}): {_some(names)}" for what, names in problems.items() if names]
        if lines:
            raise CheckpointError(
                f"{where} does not fit this model:\n" + "\n".join(lines) + "\nBuild the model that "
                "was saved (names, sizes and types are in the manifest), or load another checkpoint.",
                code="C082",
            )

    def read_tensors(self, reader: TensorReader, values: SavedValues) -> list[Tensor]:
        """The elements for every parameter and buffer of this rank, in new memory; nothing else is read."""
        found = []
        for tensor in self._tensors:
            record = self.record_of(tensor)
            own = values.own_buffer(record.label)
            found.append(reader.local(tensor, self._sources.get(id(tensor), record)) if own is None else own)
            for other in self._others[id(tensor)]:
                if not torch.equal(reader.local(tensor, other), reader.local(tensor, record)):
                    raise CheckpointError(
                        f"{listed(tensor.names)} are one tensor in the model, and {record} and {other} have different values in "
                        f"the checkpoint: the model that was saved had not tied them",
                        code="C082",
                    )
        return found


def _union(lists: Iterable[Iterable[str]]) -> list[str]:
    return list(dict.fromkeys(name for names in lists for name in names))


def _some(names: Sequence[str]) -> str:
    return listed(names[:_SHOWN]) + (" ..." if len(names) > _SHOWN else "")
