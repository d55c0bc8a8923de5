"""Loading: find the newest good checkpoint together, see that it fits, then change the model. Collective."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from colonnade.checkpoint.collective import agreed, gather_json
from colonnade.checkpoint.format.manifest import Manifest
from colonnade.checkpoint.format.records import Damaged
from colonnade.checkpoint.format.tensors import TensorReader
from colonnade.checkpoint.plan.load import LoadPlan
from colonnade.checkpoint.plan.optimizer import OptimizerLoader, load_optimizer
from colonnade.checkpoint.plan.tensors import locate_tensors
from colonnade.checkpoint.plan.values import RandomSource, SavedValues
from colonnade.checkpoint.storage.folder import Found, published
from colonnade.checkpoint.storage.verify import check_files, read_manifest
from colonnade.context.parallel_context import ParallelContext
from colonnade.errors import CheckpointError, listed
from colonnade.logging import get_dist_logger


@dataclass(frozen=True)
class LoadedInfo:
    """What was loaded: the step, where from, the layout that saved it, and the plain values of `extra`.

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
) -> LoadedInfo:
    """Load the newest good checkpoint, or that of `step`; `content` asks for the hashes of the files too."""
    tensors = locate_tensors(model, context, "loading")
    path, manifest, skipped = _newest_good(folder, step, content, context)
    with agreed(context, f"loading {path}"):
        plan = LoadPlan(tensors, manifest)
    plan.check(gather_json(plan.note(), context), str(path))
    with agreed(context, f"loading {path}"):
        # Everything that may still fail is read and checked before the objects of this rank change.
        reader = TensorReader(path)
        values = SavedValues(manifest, reader, context)
        states, plain = values.extras(extra)
        state = OptimizerLoader(plan, reader, values).state_dict_for(optimizer) if optimizer is not None else None
        plan.load_model(model, reader, values)
        if state is not None:
            load_optimizer(optimizer, state)
        for name, value in states.items():
            extra[name].load_state_dict(value)
        random = values.restore_random()
    get_dist_logger().info(f"loaded step {manifest.step} from {path}, saved on {manifest.layout}")
    return LoadedInfo(manifest.step, path, str(manifest.layout), values.same_layout, random, plain, skipped)


def _newest_good(
    folder: Path, step: int | None, content: bool, context: ParallelContext
) -> tuple[Path, Manifest, tuple[str, ...]]:
    """The checkpoint that all ranks find in order, and why newer ones were skipped. Collective."""
    skipped: list[str] = []
    for found in _candidates(folder, step, context):
        manifest, problem = _examined(found, content, context)
        if manifest is not None:
            if skipped:
                get_dist_logger().warning(f"loading {found.path.name} instead, the last good one", ranks=[0])
            return found.path, manifest, tuple(skipped)
        skipped.append(f"{found.path.name}: {problem}")
        get_dist_logger().warning(f"the checkpoint {found.path} is damaged: {problem}", ranks=[0])
    wanted = f" of step {step}" if step is not None else ""
    raise CheckpointError(f"no good checkpoint{wanted} in {folder}:\n  " + "\n  ".join(skipped))


def _candidates(folder: Path, step: int | None, context: ParallelContext) -> list[Found]:
    """What rank 0 sees, newest first, on every rank."""
    listing: list[list[Any]] = []
    with agreed(context, f"listing {folder}"):
        if context.get_global_rank() == 0:
            listing += [[found.step, found.revision, found.path.name] for found in reversed(published(folder))]
    there = [Found(number, revision, folder / name) for number, revision, name in gather_json(listing, context)[0]]
    wanted = [found for found in there if step in (None, found.step)]
    if not wanted:
        steps = listed(sorted({found.step for found in there}))
        missing = f"no checkpoint of step {step}; there are steps {steps}" if there else "no checkpoint"
        raise CheckpointError(f"{folder} has {missing}. Start without loading, or give another folder or step.")
    return wanted


def _examined(found: Found, content: bool, context: ParallelContext) -> tuple[Manifest | None, str]:
    """The manifest if all ranks find it in order, else what is wrong. Each file is read by one rank."""
    note = {"damaged": "", "unreadable": ""}
    manifest = None
    try:
        manifest = read_manifest(found.path)
        check_files(found.path, manifest.files[context.get_global_rank() :: context.world_size], content)
    except (Damaged, OSError) as error:
        note["damaged"] = str(error)
    except Exception as error:  # a newer format is no damage, and an older checkpoint no answer to it
        note["unreadable"] = str(error)
    notes = gather_json(note, context)
    for told in notes:
        if told["unreadable"]:
            raise CheckpointError(f"{found.path} cannot be loaded: {told['unreadable']}")
    problem = next((told["damaged"] for told in notes if told["damaged"]), "")
    return (None, problem) if problem else (manifest, "")
