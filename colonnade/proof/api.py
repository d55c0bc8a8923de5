"""verify: an engine's first steps beside one process on the same weights and the joined batches."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from colonnade.config.settings import ClipSettings
from colonnade.context.parallel_context import ParallelContext
from colonnade.engine.engine import Engine
from colonnade.engine.schedule.criterion import call_criterion
from colonnade.engine.schedule.micro_batch import cut_batch
from colonnade.engine.schedule.pipeline import PipelineSchedule
from colonnade.engine.stepper import label_of
from colonnade.errors import ParityError
from colonnade.hf.model_loss import criterion_of
from colonnade.parallel.placement import is_dtensor
from colonnade.parallel.split import Split, call_layer
from colonnade.proof.compare import Evidence, Report, assemble, dropped_by, whole_shapes, whole_tensors
from colonnade.proof.diagnose import diagnose
from colonnade.proof.dropout_masks import Dropping, Nothing, Noting, Replaying, Replays, notes_of
from colonnade.proof.exchange import agreed, attempt, everyones, gather_to_first, shared
from colonnade.proof.record import (
    Batch,
    EngineRecorder,
    Pass,
    Record,
    RecordedStep,
    join,
    micro_batches,
    name_in_whole,
    on_cpu,
    shares,
)
from colonnade.proof.reference import (
    PERTURBED_RUNS,
    Limit,
    OneProcess,
    RoundingSpread,
    canonical_names,
    check_names,
    kept_buffers,
    load,
    rest,
    same_optimizer,
    world_of_one,
)


def verify(
    engine: Engine,
    reference: Callable[[], nn.Module] | None = None,
    batches: Sequence[Sequence[Any]] = (),
    steps: int | None = None,
    *,
    criterion: Any = None,
    dropout: bool = True,
) -> Report:
    """Train `engine` for some steps, and one process beside it; says whether they are equal, and if not, why.

    `reference` builds the whole model as one process has it, with the parameter names of the parallel one; it is called
    on rank 0, in a world of one. Without it, a copy of the engine's model is taken, which must be whole on this rank.
    `batches`: for each step the list of batches that this rank is given, one for each pass (`gradient_accumulation`).
    `criterion`: that of the reference, where the engine's is made for a model in parts; a model with a method `criterion`
    is asked. `dropout`: one process drops what the ranks drop, as far as it can; if False, nothing is dropped.
    Collective over the world; every rank gets the report. The engine is `steps` steps further afterwards.
    """
    evidence = gather_evidence(engine, reference, batches, steps, criterion=criterion, dropout=dropout)
    return shared(engine.context, lambda: diagnose(evidence) if evidence is not None else None)


def gather_evidence(
    engine: Engine,
    reference: Callable[[], nn.Module] | None = None,
    batches: Sequence[Sequence[Any]] = (),
    steps: int | None = None,
    *,
    criterion: Any = None,
    dropout: bool = True,
) -> Evidence | None:
    """What `verify` judges: on rank 0, None elsewhere. Collective over the world."""
    chosen = [list(step) for step in batches][: steps if steps is not None else len(batches)]
    if not chosen or any(len(step) != engine.accumulation for step in chosen):
        raise ParityError(
            f"batches are those of this rank: for each step a list of {engine.accumulation} (gradient_accumulation), not "
            f"{[len(step) for step in chosen]}",
            code="C100",
        )
    _refuse_a_begun_optimizer(engine)
    resting = {name: engine.model.training and not one.training for name, one in engine.model.named_modules()}
    off = _cannot_agree(engine, reference, criterion, chosen[0][0], resting) if dropout else None
    record, given = _recorded(engine, chosen, off, resting)
    everyone = gather_to_first((record, given), engine.context)
    found: Any = None
    if everyone is not None:
        records, told = [one for one, _ in everyone], [batches for _, batches in everyone]
        found = attempt(lambda: _evidence(engine, reference, criterion, records, told, off))
    return agreed(engine.context, found)


def _refuse_a_begun_optimizer(engine: Engine) -> None:
    """One process begins with no state of the optimizer, so the run has to."""
    keeper = getattr(engine.optimizer, "stepped", engine.optimizer)  # of a sharded one: that of this rank's slices
    kept = [value for state in keeper.state.values() for value in state.values()]
    stepped = engine._total_passes > 0 and any(isinstance(value, Tensor) for value in kept)
    if any(everyones(stepped, engine.context)):
        raise ParityError(
            f"the {type(engine.optimizer).__name__} of this engine has stepped already, and its state (momentum, moments) would make "
            f"the run differ from one process, which begins with none; verify before the first step, or an engine that is built "
            f"anew from the same weights",
            code="C100",
        )


def _recorded(
    engine: Engine, batches: Sequence[Sequence[Any]], off: Mapping[str, str] | None, resting: Mapping[str, bool]
) -> tuple[Record, Any]:
    """Run the steps; what was noted, and what went in, taken apart. `off`: where nothing is dropped; None: nowhere.

    `resting`: which modules are in evaluation mode while the others train.
    """
    given = []
    dropping = Nothing() if off is None else Noting(off)
    recorder = EngineRecorder(engine, dropping)
    engine.train()
    rest(engine.model, resting)
    recorder.record.about["resting"] = resting
    try:
        with dropping.watching(engine.model, partial(name_in_whole, engine.model)), dropping:
            for step in batches:
                given.append([_pieces(engine, batch) for batch in step])
                for batch in step:
                    engine.zero_grad()
                    engine.execute_schedule(iter([batch]), return_output_label=False)
                    with torch._C.DisableTorchFunction():  # a step is ours, and knows its dtypes
                        engine.step()
        recorder.record.notes += notes_of(dropping, off)
        recorder.record.about["zeroed"] = dropping.zeroed
    finally:
        recorder.close()
    return recorder.record, given


def _cannot_agree(
    engine: Engine, reference: Any, criterion: Any, batch: Any, resting: Mapping[str, bool]
) -> dict[str, str]:
    """The modules whose dropout one process cannot do the same, and why: found by forward passes that change nothing.

    The first of them in each pass: what comes after it differs because of it.
    """
    off: dict[str, str] = {}
    while True:
        dropping = Noting(off)
        engine.train()
        rest(engine.model, resting)
        again = tree_map_only(Tensor, torch.clone, batch)  # layers remember what they have been given
        with (
            torch.random.fork_rng(),
            kept_buffers(engine.model),
            dropping.watching(engine.model, partial(name_in_whole, engine.model)),
            dropping,
        ):
            engine.execute_schedule(iter([again]), forward_only=True, return_output_label=False)
        if not any(everyones(bool(dropping.masks), engine.context)):
            return off
        recorder = EngineRecorder(engine)
        recorder.close()
        recorder.record.steps.append(RecordedStep(masks=dropping.masks))
        recorder.record.about |= {"zeroed": dropping.zeroed, "resting": resting}
        everyone = gather_to_first((recorder.record, [[_pieces(engine, batch)]]), engine.context)
        found: Any = None
        if everyone is not None:
            records, told = [one for one, _ in everyone], [batches for _, batches in everyone]
            found = attempt(lambda: _not_joined(engine, reference, criterion, records, told, off))  # noqa: B023
        agreed(engine.context, found)
        more = shared(engine.context, lambda: found)  # noqa: B023
        if not more:
            return off
        off |= more


def _pieces(engine: Engine, batch: Any) -> list[tuple[Batch, float]]:
    """A batch taken apart as one process takes it: (data, label) of each micro-batch, and its part of the batch."""
    schedule = engine.schedule
    if not isinstance(schedule, PipelineSchedule):
        return [(on_cpu(_apart(engine, batch)), 1.0)]
    data, label = schedule.take_apart(batch)
    found = []
    for piece in cut_batch(data, label, micro_batches(engine)):
        given = (piece.data, piece.label)
        given = schedule._stage_data_func(None, given) if schedule._stage_data_func else given
        found.append((on_cpu(given), piece.weight if schedule._loss_reduction == "mean" else 1.0))
    return found


def _apart(engine: Engine, batch: Any) -> Batch:
    return engine.schedule.take_apart(batch)


# -- on the first rank --------------------------------------------------------------------------------------


def _evidence(
    engine: Engine,
    reference: Callable[[], nn.Module] | None,
    criterion: Any,
    records: Sequence[Record],
    given: Sequence[Any],
    off: Mapping[str, str] | None,
) -> Evidence:
    with torch.random.fork_rng(), world_of_one(engine.context):
        dropping = Nothing() if off is None else Replaying(dropped_by(records, off))
        one, start, names = _one_process(engine, reference, criterion, records, dropping)
        steps, apart = joined_steps(given, engine, records)
        with dropping.watching(one.model), dropping:
            truth = list(one.run(start, steps, apart))
            spreads = [RoundingSpread() for _ in truth]
            for seed in range(PERTURBED_RUNS):
                noise = torch.Generator().manual_seed(seed)
                for spread, plain, moved in zip(
                    spreads, truth, one.run(start, steps, noise=noise, whole=False), strict=True
                ):
                    spread.widen(plain, moved)
    replays = dropping.found if isinstance(dropping, Replaying) else Replays()
    for module, reason in replays.not_joined.items():
        raise ParityError(f"one process cannot drop what the ranks drop in {module}: {reason}; give dropout=False")
    return assemble(records, truth, spreads, start, names, terms_of(steps), _notes(engine), replays.apart)


def _not_joined(
    engine: Engine,
    reference: Any,
    criterion: Any,
    records: Sequence[Record],
    given: Sequence[Any],
    off: Mapping[str, str],
) -> dict[str, str]:
    with torch.random.fork_rng(), world_of_one(engine.context), torch.no_grad():
        dropping = Replaying(dropped_by(records, off))
        one, start, _ = _one_process(engine, reference, criterion, records, dropping)
        load(one.model, start)
        one.model.train()
        rest(one.model, one.resting)
        with dropping.watching(one.model), dropping:
            one.passed(joined_steps(given, engine, records)[0][0][0])
        return dropping.found.not_joined


def _one_process(
    engine: Engine, reference: Any, criterion: Any, records: Sequence[Record], dropping: Dropping
) -> tuple[OneProcess, dict[str, Tensor], dict[str, str]]:
    """The whole model and how it is trained, the weights that it starts from, and its names of them."""
    model = _whole_model(engine, reference, engine.context)
    names = canonical_names(model)
    check_names(model, whole_shapes(records, names))
    for record in records:
        record.groups = [(options, [names[name] for name in theirs]) for options, theirs in record.groups]
    engine._precision.apply(model, engine.context.device, 0)
    one = OneProcess(
        model,
        _loss_of(engine, model, criterion),
        lambda model: same_optimizer(engine.optimizer, merged_groups(records), model),
        limit_of(engine, records, names),
        engine._precision.dtype,
        {name: rests for record in reversed(records) for name, rests in record.about["resting"].items()},
        dropping,
    )
    return one, _wide(engine, whole_tensors(records, names)), names


def _whole_model(engine: Engine, reference: Callable[[], nn.Module] | None, context: ParallelContext) -> nn.Module:
    if reference is not None:
        built: Any = reference()
        built = built.whole if isinstance(built, Split) else built
        if not isinstance(built, nn.Module):
            raise ParityError(
                f"reference() returns the one-process model, a torch.nn.Module, not {type(built).__name__}", code="C100"
            )
        return built.to(context.device)
    if engine.uses_pipeline or any(is_dtensor(parameter) for parameter in engine.model.parameters()):
        raise ParityError(
            "no rank has the whole model: give reference=, a function that builds it as one process has it", code="C100"
        )
    return copy.deepcopy(engine.model)


def _wide(engine: Engine, start: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights that the optimizer keeps an fp32 copy of are fp32 in one process."""
    if engine._precision.dtype is None or not engine._precision.master_weights:
        return start
    half = (torch.float16, torch.bfloat16)
    return {name: tensor.float() if tensor.dtype in half else tensor for name, tensor in start.items()}


def _loss_of(engine: Engine, model: nn.Module, criterion: Any) -> Callable[[nn.Module, Batch], Any]:
    """The loss of a batch as the schedule without a pipeline takes it."""
    own = criterion_of(model) if engine.own_loss is not None else None
    asked = getattr(model, "criterion", None)
    if criterion is None and callable(asked) and not isinstance(asked, nn.Module):
        criterion = asked()
    if criterion is None:
        criterion = engine.criterion
    else:
        criterion = engine._precision.around(criterion, engine.context.device)
    forward = own.run if own is not None else model

    def loss_of(model: nn.Module, batch: Batch) -> Any:
        data, label = batch
        if own is not None and label is not None and isinstance(data, Mapping):
            data, label = {**data, "labels": label}, None
        return call_criterion(None if own is not None else criterion, call_layer(forward, data), label)

    return loss_of


def merged_groups(records: Sequence[Record]) -> list[tuple[dict[str, Any], list[str]]]:
    """The parameter groups of all ranks, by their number: stages have other parameters, with the same options."""
    found: list[tuple[dict[str, Any], list[str]]] = []
    seen: set[str] = set()
    for record in records:
        for at, (options, names) in enumerate(record.groups):
            if at == len(found):
                found.append((options, []))
            new = [name for name in names if name not in seen]
            seen.update(new)
            found[at][1].extend(new)
    return found


def limit_of(engine: Engine, records: Sequence[Record], names: Mapping[str, str]) -> Limit | None:
    """The clipping of the run in the words of torch."""
    settings = ClipSettings.read(engine.context.config.get("clip_grad_norm"))
    if settings is None:
        return None
    if settings.method != "norm":
        factors = []
        for at in range(len(records[0].steps)):
            factors.append({names[n]: d for record in records for n, d in record.steps[at].divisors.items()})
        return Limit(norm_type=settings.norm_type, factors=factors)
    groups = settings.clip_groups()
    of = {name: groups[settings.group_of(name)] for name in names}
    own = {name: (group.name, group.max_norm) for name, group in of.items() if group.max_norm is not None}
    if settings.per != "group":
        each = {
            name: (f"{group.name} {label_of(name, settings.per)}", settings.method_options["max_norm"])
            for name, group in of.items()
        }
        own = {**each, **own}
    return Limit(
        settings.method_options["max_norm"],
        settings.norm_type,
        own,
        frozenset(name for name, group in of.items() if not group.counted),
        frozenset(name for name, group in of.items() if not group.clipped),
    )


def joined_steps(
    given: Sequence[Any], engine: Engine, records: Sequence[Record]
) -> tuple[list[list[Pass]], list[list[list[Pass]]]]:
    """The passes of each step for one process; and of each step, those of each share of its batch alone."""
    axes, layout = axes_of_records(records)
    steps: list[list[Pass]] = []
    apart: list[list[list[Pass]]] = []
    for at in range(len(given[0])):
        passes: list[Pass] = []
        alone: list[list[Pass]] = []
        for number in range(len(given[0][at])):
            for micro in range(len(given[0][at][number])):
                weight = given[0][at][number][micro][1] / engine.accumulation
                parts = shares([rank[at][number][micro][0] for rank in given], axes, layout)
                whole = join(parts)
                passes.append(Pass(parts if whole is None else [whole], weight))
                alone = alone or [[] for _ in parts]
                for share, part in zip(alone, parts, strict=True):
                    share.append(Pass([part], weight))
        steps.append(passes)
        apart.append(alone if len(alone) > 1 else [])
    return steps, apart


def axes_of_records(records: Sequence[Record]) -> tuple[Any, Callable[[int], dict[str, int]]]:
    return records[0].about["axes"], lambda rank: records[rank].about["coordinates"]


def terms_of(steps: Sequence[Sequence[Pass]]) -> int:
    """How many terms an element of a gradient may sum: the rows and places of all batches of a step."""
    most = 1
    for passes in steps:
        total = 0
        for one in passes:
            for batch in one.batches:
                total += max((leaf.numel() for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)), default=1)
        most = max(most, total)
    return most


def _notes(engine: Engine) -> list[str]:
    told = []
    settings = ClipSettings.read(engine.context.config.get("clip_grad_norm"))
    if settings is not None and settings.method != "norm":
        told.append(f"what clip method {settings.method!r} divides by was taken from the run")
    return told
