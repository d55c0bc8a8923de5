"""Loading a checkpoint: `load_checkpoint`. All operations that may fail come before the first change. Collective.

1. Each rank locates its tensors in the full tensors. Only names and boxes matter, not the layout at the time of the save.
2. Rank 0 lists the folder. All ranks examine the checkpoints, newest first: each rank reads the manifest and hashes its share
   of the files. Damaged checkpoints are skipped.
3. Each rank matches its tensors to records of the manifest by any of their names (`TensorMatch`). All ranks raise together
   if a tensor is missing, unexpected, or has a different shape or type.
4. Each rank reads only the bytes of its own boxes into new memory; and all plain values.
5. The user's objects load their states. If an object fails on any rank, all objects get their old states back.
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

from colonnade.checkpoint.manifest import Damaged, Manifest, TensorRecord
from colonnade.checkpoint.optimizer_state import OptimizerLoader, load_optimizer
from colonnade.checkpoint.save import agreed
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
    """The result of a load.

    Attributes:
        step: Step of the loaded checkpoint.
        folder: Folder of the loaded checkpoint.
        layout: Description of the layout at the time of the save.
        same_layout: Whether this layout equals the current layout.
        random: "restored" if the random streams continue bit for bit, "re-derived" otherwise (on another layout).
        extra: The plain values that were saved as `extra`.
        skipped: A text for every newer checkpoint, which was damaged and skipped.
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
    """Load the newest intact checkpoint, or the checkpoint of `step`. Collective over the world.

    With `content`, the hashes of the files are verified, too. `rest` is an object whose `load_state_dict` gets all plain values as
    one dict, before any weight changes.
    """
    tensors = locate_tensors(model, context, "loading")
    path, manifest, skipped = _newest_good(folder, step, content, context)

    # Names are matched on each rank separately. Tensors of the checkpoint that no rank has are known only from all ranks' notes,
    # because each rank has only some of the model.
    with _all_or_nothing(context, path):
        match = TensorMatch(tensors, manifest)
    notes = gather_from_all(match.note(), context)

    # Everything is read before anything changes on any rank: a read can fail on one rank only.
    with _all_or_nothing(context, path):
        match.check(notes, str(path))
        reader = TensorReader(path, manifest)
        values = SavedValues(reader, context)
        states, plain = values.extras(extra)
        objects = [
            _Stateful(f"extra[{name!r}]", extra[name].state_dict, extra[name].load_state_dict) for name in states
        ]
        for name, module in model.named_modules():
            key = f"model/{prefix_of(model)}{name}{'.' if name else ''}{EXTRA_STATE}"
            if values.has(key):
                states[key] = values.get(key)
                objects.append(_Stateful(f"the module {name}", module.get_extra_state, module.set_extra_state))
        if rest is not None:
            states["rest"] = plain
            objects.append(_Stateful("the run", rest.state_dict, rest.load_state_dict))
        state = None
        if optimizer is not None:
            state = OptimizerLoader(tensors, match.record_of, reader, values).state_dict_for(optimizer)
        found = match.read_tensors(reader, values)
        streams = values.random_state()

    # The objects run the user's code, which may fail too. Their old states are kept, so that a failure can be rolled back.
    before: list[Any] = []
    try:
        with _all_or_nothing(context, path):
            for target, saved in zip(objects, states.values(), strict=True):
                with as_checkpoint_errors(f"{target.name} does not accept its saved state"):
                    before.append(copy.deepcopy(target.get_state()))
                    target.set_state(saved)
    except CheckpointError:
        for target, old in zip(objects, before, strict=False):
            with suppress(Exception):  # the object that has just failed may fail again
                target.set_state(old)
        raise

    # The remaining work is copies into existing memory, and the optimizer's own `load_state_dict`, which runs the user's hooks.
    with agreed(context, f"{path} was read but only partly loaded; load again before you continue"):
        with torch.no_grad():
            for tensor, value in zip(tensors, found, strict=True):
                tensor.local.copy_(value)
        if state is not None:
            load_optimizer(optimizer, state)
        random = values.restore_random(*streams)
    get_dist_logger().info(f"loaded step {manifest.step} from {path}, saved on {manifest.layout}")
    return LoadedInfo(manifest.step, path, str(manifest.layout), values.same_layout, random, plain, skipped)


@dataclass(frozen=True)
class _Stateful:
    """The functions that get and set the state of a user's object."""

    name: str
    get_state: Callable[[], Any]
    set_state: Callable[[Any], Any]


@contextmanager
def _all_or_nothing(context: ParallelContext, path: Path) -> Iterator[None]:
    """`agreed`, for a block that changes nothing if it fails; the error message adds that."""
    try:
        with agreed(context, f"loading {path}"):
            yield
    except CheckpointError as error:
        raise CheckpointError(f"{error}\n(nothing was loaded; model and optimizer are unchanged)") from error


def _newest_good(
    folder: Path, step: int | None, content: bool, context: ParallelContext
) -> tuple[Path, Manifest, tuple[str, ...]]:
    """The newest checkpoint that all ranks find intact, and the reasons for skipping newer ones. Collective over the world."""
    # Rank 0 lists the folder for all: on a network file system, other ranks may not see the newest checkpoint yet.
    listing: list[list[Any]] = []
    with agreed(context, f"listing {folder}"):
        if context.get_global_rank() == 0:
            listing += [[found.step, found.revision, found.path.name] for found in reversed(published(folder))]
    there = [Found(number, revision, folder / name) for number, revision, name in gather_from_all(listing, context)[0]]
    wanted = [found for found in there if step in (None, found.step)]
    if not wanted:
        steps = listed(sorted({found.step for found in there}))
        missing = f"no checkpoint of step {step}; it has steps {steps}" if there else "no checkpoint"
        raise CheckpointError(f"{folder} has {missing}. Start without loading, or pass another folder or step.")

    skipped: list[str] = []
    for found in wanted:
        # Each file is hashed by one rank; the notes make all ranks reach the same verdict.
        note = {"damaged": "", "unreadable": ""}
        manifest = None
        try:
            manifest = read_manifest(found.path)
            check_files(found.path, manifest.files[context.get_global_rank() :: context.world_size], content)
        except (Damaged, OSError) as error:
            note["damaged"] = str(error)
        except Exception as error:
            # Another format is not damage: falling back to an older checkpoint would silently lose steps.
            note["unreadable"] = str(error)
        notes = gather_from_all(note, context)
        for other in notes:
            if other["unreadable"]:
                raise CheckpointError(f"{found.path} cannot be loaded: {other['unreadable']}")
        problem = next((other["damaged"] for other in notes if other["damaged"]), "")
        if manifest is not None and not problem:
            if skipped:
                get_dist_logger().warning(f"loading {found.path.name} instead, the newest intact checkpoint", ranks=[0])
            return found.path, manifest, tuple(skipped)
        skipped.append(f"{found.path.name}: {problem}")
        get_dist_logger().warning(f"the checkpoint {found.path} is damaged: {problem}", ranks=[0])
    of_step = f" of step {step}" if step is not None else ""
    raise CheckpointError(f"no intact checkpoint{of_step} in {folder}:\n  " + "\n  ".join(skipped), code="C080")


class TensorMatch:
    """Finds the records of the checkpoint for every tensor of this rank's model, by any of the tensor's names.

    A tensor has several records if weights are tied now, but were not tied at the time of the save.
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
                # The model now has the dtype of the master copy, for example fp32 after training in bf16. Its values are those
                # of the weight before rounding.
                self._sources[id(tensor)] = master
            elif here != (record.dtype, record.shape):
                self._mismatched.append(
                    f"{tensor.names[0]}: {record.dtype} {list(record.shape)} in the checkpoint, {here[0]} "
                    f"{list(tensor.shape)} in the model"
                )

    def record_of(self, tensor: LocalTensor) -> TensorRecord:
        """The record in the checkpoint from which `tensor` is loaded."""
        return self._records[id(tensor)]

    def note(self) -> dict[str, list[str]]:
        """The result of this rank's search as JSON. `check` takes the results of all ranks."""
        others = (record for records in self._others.values() for record in records)
        used = sorted({record.label for record in (*self._records.values(), *others)})
        return {"used": used, "missing": self._missing, "mismatched": self._mismatched}

    def check(self, notes: Sequence[dict[str, list[str]]], where: str) -> None:
        """Raise on every rank, with the same error, if the tensors of the checkpoint and those of all ranks do not match one
        to one."""
        used = {label for note in notes for label in note["used"]}
        problems = {
            "missing in the checkpoint": _union(note["missing"] for note in notes),
            "in the checkpoint, but not in the model": [
                (record.names or (record.label,))[0]
                for record in self._manifest.tensors
                if not record.state_name and record.label not in used
            ],
            "with a different shape or type": _union(note["mismatched"] for note in notes),
        }
        lines = [
            f"  {problem} ({len(names)}): {listed(names[:_SHOWN])}{' ...' if len(names) > _SHOWN else ''}"
            for problem, names in problems.items()
            if names
        ]
        if lines:
            raise CheckpointError(
                f"{where} does not fit this model:\n" + "\n".join(lines) + "\nBuild the model that "
                "was saved (names, sizes and types are in the manifest), or load another checkpoint.",
                code="C082",
            )

    def read_tensors(self, reader: TensorReader, values: SavedValues) -> list[Tensor]:
        """Read the local elements of every parameter and buffer of this rank into new memory. Reads no other bytes."""
        found = []
        for tensor in self._tensors:
            record = self.record_of(tensor)
            own = values.own_buffer(record.label)
            found.append(reader.local(tensor, self._sources.get(id(tensor), record)) if own is None else own)
            for other in self._others[id(tensor)]:
                if not torch.equal(reader.local(tensor, other), reader.local(tensor, record)):
                    raise CheckpointError(
                        f"{listed(tensor.names)} are one tied tensor in this model, but {record} and {other} have "
                        "different values in the checkpoint. The checkpoint was saved from a model without this tie. "
                        "Untie the parameters to load the checkpoint.",
                        code="C082",
                    )
        return found


def _union(lists: Iterable[Iterable[str]]) -> list[str]:
    return list(dict.fromkeys(name for names in lists for name in names))
