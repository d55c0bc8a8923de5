"""verify: an engine's first steps beside one process on the same weights and the joined batches.

`gather_evidence` is the whole of `colonnade.verify(engine)`, in this order. (The command `colonnade verify train.py` goes another way:
`scripts.py` starts the script on the ranks and alone, and `script_job.py` records it where a batch meets the model.)

1. On the ranks, before anything is recorded: `_dropout_that_cannot_be_repeated` runs forward passes that change nothing.
   There a batch meets the model first, if dropout is on.
2. On the ranks: `_record_steps` trains for the steps. Without dropout a batch meets the model here first, in
   `engine.execute_schedule`, and `_pieces` takes the same batch apart for one process.
3. On rank 0: `_evidence` gives the joined batches to the whole model in one process (`OneProcess` in reference.py, where
   the batch meets that model in `OneProcess._loss`), and puts both side by side (`compare.assemble`).

What differs, and why, is then said by `diagnose`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from colonnade.comm.messages import gather_from_all
from colonnade.config.settings import ClipSettings
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
from colonnade.proof.exchange import agreed, attempt, gather_to_first, shared
from colonnade.proof.record import (
    Batch,
    EngineRecorder,
    Record,
    RecordedStep,
    micro_batches,
    name_in_whole,
    on_cpu,
)
from colonnade.proof.reference import (
    PERTURBED_RUNS,
    Limit,
    OneProcess,
    Pass,
    TrueRun,
    canonical_names,
    check_names,
    joined_steps,
    kept_buffers,
    same_optimizer,
    set_eval,
    spreads_of,
    without_unjoinable_dropout,
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
    """Train `engine` for some steps, and one process beside it; the report says whether they are equal, and if not, why.

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
    """The comparison that `verify` judges: on rank 0, None elsewhere. Collective over the world."""
    chosen = [list(step) for step in batches][: steps if steps is not None else len(batches)]
    if not chosen or any(len(step) != engine.accumulation for step in chosen):
        raise ParityError(
            f"batches are those of this rank: for each step a list of {engine.accumulation} (gradient_accumulation), not "
            f"{[len(step) for step in chosen]}",
            code="C100",
        )
    _refuse_a_begun_optimizer(engine)
    # A module may stay in evaluation mode while the model trains (frozen statistics). One process has to do the same.
    kept_in_eval = {name: engine.model.training and not one.training for name, one in engine.model.named_modules()}

    # Dropout that one process cannot repeat is turned off on the ranks as well, so it must be known before the first step:
    # a step cannot be taken back.
    off: Mapping[str, str] | None = None
    if dropout:
        off = _dropout_that_cannot_be_repeated(engine, reference, criterion, chosen[0][0], kept_in_eval)

    # The ranks train, and everything that they noted goes to rank 0, with their batches.
    record, given = _record_steps(engine, chosen, off, kept_in_eval)
    everyone = gather_to_first((record, given), engine.context)

    # One process on rank 0. An error there is raised on every rank: the others wait for the report.
    found: Any = None
    if everyone is not None:
        records, batches_of_ranks = [one for one, _ in everyone], [theirs for _, theirs in everyone]
        found = attempt(lambda: _evidence(engine, reference, criterion, records, batches_of_ranks, off))
    return agreed(engine.context, found)


# --- On every rank ---


def _refuse_a_begun_optimizer(engine: Engine) -> None:
    """One process begins with no state of the optimizer, so the run has to begin with none."""
    kept = [value for state in engine.engine_optimizer.stepped.state.values() for value in state.values()]
    stepped = engine._total_passes > 0 and any(isinstance(value, Tensor) for value in kept)
    if any(gather_from_all(stepped, engine.context)):
        raise ParityError(
            f"the {type(engine.optimizer).__name__} of this engine has stepped already, and its state (momentum, moments) would make "
            f"the run differ from one process, which begins with none; verify before the first step, or an engine that is built "
            f"anew from the same weights",
            code="C100",
        )


def _record_steps(
    engine: Engine, batches: Sequence[Sequence[Any]], off: Mapping[str, str] | None, kept_in_eval: Mapping[str, bool]
) -> tuple[Record, Any]:
    """Run the steps; returns the record of this rank, and its batches taken apart. `off`: where nothing is dropped; None: nowhere."""
    given = []
    dropping = Nothing() if off is None else Noting(off)
    recorder = EngineRecorder(engine, dropping)
    engine.train()
    set_eval(engine.model, kept_in_eval)
    recorder.record.run.kept_in_eval = dict(kept_in_eval)
    try:
        with dropping.watching(engine.model, partial(name_in_whole, engine.model)), dropping:
            for step in batches:
                # Taken apart before the model sees them: a model may change its batch in place.
                given.append([_pieces(engine, batch) for batch in step])
                for batch in step:
                    engine.zero_grad()
                    engine.execute_schedule(iter([batch]), return_output_label=False)
                    with torch._C.DisableTorchFunction():  # a step is ours, and knows its dtypes
                        engine.step()
        recorder.record.notes += notes_of(dropping, off)
        recorder.record.run.zeroed = dropping.zeroed
    finally:
        recorder.close()
    return recorder.record, given


def _dropout_that_cannot_be_repeated(
    engine: Engine, reference: Any, criterion: Any, batch: Any, kept_in_eval: Mapping[str, bool]
) -> Mapping[str, str] | None:
    """The modules whose dropout one process cannot repeat, and why: found by forward passes that change nothing."""

    def run(off: Mapping[str, str] | None) -> tuple[None, Mapping[str, str]]:
        dropping = Noting(off or {})
        engine.train()
        set_eval(engine.model, kept_in_eval)
        again = tree_map_only(Tensor, torch.clone, batch)  # layers remember what they have been given
        with (
            torch.random.fork_rng(),
            kept_buffers(engine.model),
            dropping.watching(engine.model, partial(name_in_whole, engine.model)),
            dropping,
        ):
            engine.execute_schedule(iter([again]), forward_only=True, return_output_label=False)
        if not any(gather_from_all(bool(dropping.masks), engine.context)):
            return None, {}
        # A record of one step that has nothing but masks.
        recorder = EngineRecorder(engine)
        recorder.close()
        recorder.record.steps.append(RecordedStep(masks=dropping.masks))
        recorder.record.run.zeroed, recorder.record.run.kept_in_eval = dropping.zeroed, dict(kept_in_eval)
        everyone = gather_to_first((recorder.record, [[_pieces(engine, batch)]]), engine.context)
        found: Any = None
        if everyone is not None:
            records, given = [one for one, _ in everyone], [theirs for _, theirs in everyone]
            found = attempt(lambda: _not_joined(engine, reference, criterion, records, given, off or {}))
        agreed(engine.context, found)
        return None, shared(engine.context, lambda: found)

    return without_unjoinable_dropout(run, {})[1]


def _pieces(engine: Engine, batch: Any) -> list[tuple[Batch, float]]:
    """A batch taken apart as one process takes it: (data, label) of each micro-batch, and its part of the mean over the batch."""
    schedule = engine.schedule
    if not isinstance(schedule, PipelineSchedule):
        return [(on_cpu(schedule.take_apart(batch)), 1.0)]
    data, label = schedule.take_apart(batch)
    found = []
    for piece in cut_batch(data, label, micro_batches(engine)):
        given = (piece.data, piece.label)
        given = schedule._stage_data_func(None, given) if schedule._stage_data_func else given
        found.append((on_cpu(given), piece.weight if schedule._loss_reduction == "mean" else 1.0))
    return found


# --- On rank 0 ---


def _evidence(
    engine: Engine,
    reference: Callable[[], nn.Module] | None,
    criterion: Any,
    records: Sequence[Record],
    given: Sequence[Any],
    off: Mapping[str, str] | None,
) -> Evidence:
    # Layers are built and called in a world of one, and the random numbers of the run go on as if this had not been.
    with torch.random.fork_rng(), world_of_one(engine.context):
        dropping = Nothing() if off is None else Replaying(dropped_by(records, off))
        one, start, names = _one_process(engine, reference, criterion, records, dropping)
        steps, apart = joined_steps(given, engine.accumulation, [record.run for record in records])
        with dropping.watching(one.model), dropping:
            truth = list(one.run(start, steps, apart))
            noises = (torch.Generator().manual_seed(seed) for seed in range(PERTURBED_RUNS))
            spreads = spreads_of(truth, (one.run(start, steps, noise=noise, whole=False) for noise in noises))
    replays = dropping.found if isinstance(dropping, Replaying) else Replays()
    for module, reason in replays.not_joined.items():
        raise ParityError(f"one process cannot drop what the ranks drop in {module}: {reason}; give dropout=False")
    notes = []
    clip = ClipSettings.read(engine.context.config.get("clip_grad_norm"))
    if clip is not None and clip.method != "norm":
        notes.append(f"what clip method {clip.method!r} divides by was taken from the run")
    return assemble(records, TrueRun(truth, spreads, start, names, _terms_of(steps), notes, replays.apart))


def _not_joined(
    engine: Engine,
    reference: Any,
    criterion: Any,
    records: Sequence[Record],
    given: Sequence[Any],
    off: Mapping[str, str],
) -> dict[str, str]:
    """The modules, and why, in which one process cannot drop what the ranks dropped in one forward pass."""
    with torch.random.fork_rng(), world_of_one(engine.context), torch.no_grad():
        dropping = Replaying(dropped_by(records, off))
        one, start, _ = _one_process(engine, reference, criterion, records, dropping)
        one.begin(start)
        steps, _ = joined_steps(given, engine.accumulation, [record.run for record in records])
        with dropping.watching(one.model), dropping:
            one.forward_only(steps[0][0])
        return dropping.found.not_joined


def _one_process(
    engine: Engine, reference: Any, criterion: Any, records: Sequence[Record], dropping: Dropping
) -> tuple[OneProcess, dict[str, Tensor], dict[str, str]]:
    """The whole model and how it is trained, the weights that it starts from, and its names of them."""
    model = _whole_model(engine, reference)
    names = canonical_names(model)
    check_names(model, whole_shapes(records, names))
    for record in records:
        record.groups = [(options, [names[name] for name in theirs]) for options, theirs in record.groups]
    engine._precision.apply(model, engine.context.device, 0)
    one = OneProcess(
        model,
        _loss_of(engine, model, criterion),
        lambda model: same_optimizer(engine.optimizer, _merged_groups(records), model),
        _limit_of(engine, records, names),
        engine._precision.dtype,
        {name: kept for record in reversed(records) for name, kept in record.run.kept_in_eval.items()},
        dropping,
    )
    # Weights that the optimizer keeps an fp32 copy of are fp32 in one process.
    start, half = whole_tensors(records, names), (torch.float16, torch.bfloat16)
    if engine._precision.dtype is not None and engine._precision.master_weights:
        start = {name: tensor.float() if tensor.dtype in half else tensor for name, tensor in start.items()}
    return one, start, names


def _whole_model(engine: Engine, reference: Callable[[], nn.Module] | None) -> nn.Module:
    if reference is not None:
        built: Any = reference()
        built = built.whole if isinstance(built, Split) else built
        if not isinstance(built, nn.Module):
            raise ParityError(
                f"reference() returns the one-process model, a torch.nn.Module, not {type(built).__name__}", code="C100"
            )
        return built.to(engine.context.device)
    if engine.uses_pipeline or any(is_dtensor(parameter) for parameter in engine.model.parameters()):
        raise ParityError(
            "no rank has the whole model: give reference=, a function that builds it as one process has it", code="C100"
        )
    return copy.deepcopy(engine.model)


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


def _merged_groups(records: Sequence[Record]) -> list[tuple[dict[str, Any], list[str]]]:
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


def _limit_of(engine: Engine, records: Sequence[Record], names: Mapping[str, str]) -> Limit | None:
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


def _terms_of(steps: Sequence[Sequence[Pass]]) -> int:
    """How many terms an element of a gradient may sum: the rows and places of all batches of a step."""
    most = 1
    for passes in steps:
        total = 0
        for one in passes:
            for batch in one.batches:
                total += max((leaf.numel() for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)), default=1)
        most = max(most, total)
    return most
