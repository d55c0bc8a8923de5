"""Loading: find the newest good checkpoint together, see that it fits, then change the model. Collective."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from colonnade.checkpoint.agreement import agreed, as_checkpoint_errors
from colonnade.checkpoint.manifest import Damaged, Manifest
from colonnade.checkpoint.state import LoadPlan, OptimizerLoader, RandomSource, SavedValues, load_optimizer
from colonnade.checkpoint.storage import Found, check_files, published, read_manifest
from colonnade.checkpoint.tensor_files import TensorReader
from colonnade.checkpoint.tensors import EXTRA_STATE, locate_tensors, prefix_of
from colonnade.comm.messages import gather_from_all
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
    rest: Any = None,
) -> LoadedInfo:
    """Load the newest good checkpoint, or that of `step`; `content` asks for the hashes of the files too.

    `rest` is an object that takes the plain values all together, before weights change.
    """
    tensors = locate_tensors(model, context, "loading")
    path, manifest, skipped = _newest_good(folder, step, content, context)
    with _all_or_nothing(context, path):
        plan = LoadPlan(tensors, manifest)
    notes = gather_from_all(plan.note(), context)
    with _all_or_nothing(context, path):
        # All that is read, and may fail, comes before the first object of any rank changes.
        plan.check(notes, str(path))
        reader = TensorReader(path, manifest)
        values = SavedValues(manifest, reader, context)
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
        state = OptimizerLoader(plan, reader, values).state_dict_for(optimizer) if optimizer is not None else None
        found = plan.read_tensors(reader, values)
        streams = values.random_state()
    _take_all(takers, list(states.values()), context, path)
    with agreed(context, f"{path} was read, but loaded only in part; load again before you go on"):
        plan.set_tensors(found)
        if state is not None:
            load_optimizer(optimizer, state)
        random = values.restore_random(*streams)
    get_dist_logger().info(f"loaded step {manifest.step} from {path}, saved on {manifest.layout}")
    return LoadedInfo(manifest.step, path, str(manifest.layout), values.same_layout, random, plain, skipped)


@dataclass(frozen=True)
class _Taker:
    """An object of the user's that takes a state, and can give the one that it has."""

    what: str
    give: Callable[[], Any]
    take: Callable[[Any], Any]


def _take_all(takers: Sequence[_Taker], states: Sequence[Any], context: ParallelContext, path: Path) -> None:
    """Give each its state; where one on some rank cannot take it, all get back what they had. Collective."""
    before: list[Any] = []
    try:
        with _all_or_nothing(context, path):
            for taker, state in zip(takers, states, strict=True):
                with as_checkpoint_errors(f"{taker.what} does not take its state"):
                    before.append(copy.deepcopy(taker.give()))
                    taker.take(state)
    except CheckpointError:
        for taker, state in zip(takers, before, strict=False):
            with suppress(Exception):  # what has just failed may fail again
                taker.take(state)
        raise


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
    raise CheckpointError(f"no good checkpoint{wanted} in {folder}:\n  " + "\n  ".join(skipped), code="C080")


def _candidates(folder: Path, step: int | None, context: ParallelContext) -> list[Found]:
    """What rank 0 sees, newest first, on every rank."""
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
    notes = gather_from_all(note, context)
    for told in notes:
        if told["unreadable"]:
            raise CheckpointError(f"{found.path} cannot be loaded: {told['unreadable']}")
    problem = next((told["damaged"] for told in notes if told["damaged"]), "")
    return (None, problem) if problem else (manifest, "")
