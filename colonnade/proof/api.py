"""`colonnade.verify(engine)`: train an engine and a single process from the same weights on the same data, and compare.

`gather_evidence` does everything, in this order:

1. On the ranks, before anything is recorded: `_unjoinable_dropout` runs forward passes without side effects, to find the
   modules whose dropout a single process cannot repeat.
2. On the ranks: `_record_steps` trains for the steps, and keeps the batches of each rank.
3. On rank 0: `_true_run` trains the full model on the global batches (`OneProcess` in reference.py), and `_side_by_side`
   combines the two (`compare.assemble`). For large tensors, the ranks send sketches; they send the full tensors only if
   the sketches differ.

`diagnose` then explains the differences.

The command `colonnade verify train.py` is the second way to the same report. There the caller passes no engine and no
batches: `scripts.py` starts the script on its ranks and again in a single process, and `script_job.py` runs inside
these processes. It replaces the functions through which batches reach the model, and the script itself is the
reference. Both ways record an engine with `EngineRecorder`, and both make a `Record` for each rank and a `TrueRun`.
They meet in `compare.assemble`, which `_side_by_side` calls here and `SingleProcessScript.judge` calls there.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import astuple, replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from colonnade.comm.messages import gather_from_all
from colonnade.config.settings import ClipSettings
from colonnade.engine.engine import Engine
from colonnade.engine.schedule.loss import call_criterion
from colonnade.engine.schedule.micro_batch import split_into_micro_batches
from colonnade.engine.schedule.schedules import PipelineSchedule
from colonnade.engine.stepper import label_of
from colonnade.errors import ParityError
from colonnade.hf.model_loss import criterion_of
from colonnade.parallel.placement import is_dtensor
from colonnade.parallel.split import Split, call_layer
from colonnade.proof.compare import (
    Evidence,
    Report,
    assemble,
    compare,
    drawn_by,
    full_shapes,
    full_tensors,
    needed_as_a_whole,
    sketched_blocks,
)
from colonnade.proof.diagnose import diagnose
from colonnade.proof.exchange import agreed, attempt, gather_to_first, shared
from colonnade.proof.random_numbers import (
    RandomNumbers,
    RecordedDraws,
    ReplayedDraws,
    host_generators,
    notes_of,
    set_host_generators,
)
from colonnade.proof.record import (
    Batch,
    EngineRecorder,
    Record,
    RecordedStep,
    common_sketches,
    micro_batches,
    name_in_full_model,
    on_cpu,
    recorded,
    sketchable,
    sketched_record,
)
from colonnade.proof.reference import (
    PERTURBED_RUNS,
    Limit,
    OneProcess,
    TrueRun,
    Truth,
    canonical_names,
    check_names,
    joined_steps,
    kept_buffers,
    same_optimizer,
    set_eval,
    sketched_truth,
    spreads_of,
    without_unjoinable_dropout,
    world_of_one,
)
from colonnade.proof.sketch import Block, sketches


def verify(
    engine: Engine,
    reference: Callable[[], nn.Module] | None = None,
    batches: Sequence[Sequence[Any]] = (),
    steps: int | None = None,
    *,
    criterion: Any = None,
    dropout: bool = True,
) -> Report:
    """Train `engine` for some steps, train a single process on the same data, and compare the two.

    Afterwards, the engine has taken `steps` more steps. Collective over the world; every rank gets the report.

    Args:
        engine: An engine whose optimizer has no state yet.
        reference: Builds the unsharded model, with the parameter names of the parallel one. It is called on rank 0, in a
            world of one. Default: a copy of the engine's model, if that is unsharded.
        batches: For each step the batches of this rank, one for each pass of `gradient_accumulation`.
        steps: The number of steps to compare; default: all of `batches`.
        criterion: The criterion of the reference, if the engine's criterion is for a sharded model. Default: the result
        of
            the model's method `criterion`, else the engine's.
        dropout: The single process drops the same elements as the ranks, as far as possible. False: dropout is off.

    Raises:
        ParityError: the run cannot be compared, for example because the reference is a different model.

    Example::

        gpc = colonnade.launch(dict(clip_grad_norm=1.0))
        model = nn.Linear(4, 2)
        engine, *_ = colonnade.initialize(model, torch.optim.AdamW(model.parameters()), nn.MSELoss())
        batch = torch.randn(8, 4), torch.randn(8, 2)
        report = colonnade.verify(engine, batches=[[batch]])  # one step with one batch
        print(report)
        assert report.ok
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
    """Train both runs and return the data that `verify` judges, on rank 0; None on other ranks.

    Collective over the world.
    """
    chosen = [list(step) for step in batches][: steps if steps is not None else len(batches)]
    lengths = gather_from_all([len(step) for step in chosen], engine.context)
    for rank, own in enumerate(lengths):
        if not own or any(length != engine.accumulation for length in own):
            raise ParityError(
                f"batches must contain a list for each step, and each list must contain {engine.accumulation} "
                f"batches of this rank, because gradient_accumulation is {engine.accumulation}. At least one step is "
                f"required. On rank {rank} the lists have the lengths {own}.",
                code="C100",
            )
    # A step is collective, so ranks that were given more steps than others leave these out.
    fewest = min(map(len, lengths))
    chosen, notes = chosen[:fewest], list[str]()
    if any(len(own) > fewest for own in lengths):
        by_rank = ", ".join(f"rank {rank} {len(own)}" for rank, own in enumerate(lengths))
        notes.append(
            f"warning: the ranks were given batches for different numbers of steps: {by_rank}. Only the first "
            f"{fewest} were compared"
        )

    # The single process starts without optimizer state, so the run has to do so as well.
    state = [value for values in engine.engine_optimizer.stepped.state.values() for value in values.values()]
    has_stepped = engine._total_passes > 0 and any(isinstance(value, Tensor) for value in state)
    if any(gather_from_all(has_stepped, engine.context)):
        raise ParityError(
            f"the {type(engine.optimizer).__name__} of this engine has already stepped, so it has state (momentum, "
            "moments). The single process starts without state, so the results would differ. Call verify before the "
            "first step, or build a new engine from the same weights.",
            code="C100",
        )
    # A module may stay in evaluation mode while the model trains (frozen statistics). The single process has to do the same.
    kept_in_eval = {
        name: engine.model.training and not module.training for name, module in engine.model.named_modules()
    }

    # Dropout that a single process cannot repeat is turned off on the ranks too. A step cannot be undone, so these modules
    # must be known before the first one. Unless `dropout` is False, this probe of random numbers (at least one
    # forward pass) always runs, also for models without dropout modules: random operators may be anywhere in the model's code, so only
    # a pass shows whether there are any.
    off: Mapping[str, str] | None = None
    if dropout:
        off = _unjoinable_dropout(engine, reference, criterion, chosen[0][0], kept_in_eval)

    generators = host_generators()
    # The ranks train, and send their records and batches to rank 0: of large tensors only sketches. Initial weights go there as a
    # whole, from the first rank that stores them.
    record, given = _record_steps(engine, chosen, off, kept_in_eval)
    record.notes += notes
    own = sketchable(record)
    counts = {name: prod(note.shape) for name, note in record.tensors.items()}
    notes_of_ranks = gather_from_all(
        [counts, {name: block and astuple(block) for name, block in own.items()}], engine.context
    )
    blocks = [
        {name: block and Block(block[0], tuple(block[1]), tuple(block[2])) for name, block in some.items()}
        for _, some in notes_of_ranks
    ]
    every = [list(some) for some, _ in notes_of_ranks]
    sketched = common_sketches(
        every, blocks, {name: count for some, _ in notes_of_ranks for name, count in some.items()}
    )
    before = blocks[: engine.context.get_global_rank()]
    start = {
        name: record.start[name]
        for name, block in own.items()
        if name in sketched and not any(name in some and some[name] == block for some in before)
    }

    def shortened(names: Collection[str]) -> Record:
        return sketched_record(record, {name: block for name, block in own.items() if name in names})

    everyone = gather_to_first((shortened(sketched), given, start), engine.context)

    # The reference runs on rank 0. An error there is raised on every rank, because the others wait for the report.
    found: Any = None
    if everyone is not None:
        records, batches_of_ranks = [record for record, *_ in everyone], [given for _, given, _ in everyone]
        whole: dict[str, Tensor] = {}
        for sender, _, some in everyone:
            for name, value in some.items():
                block = sender.run.sketched[name]
                if block is None:
                    whole[name] = value
                else:
                    block.of(whole.setdefault(name, value.new_zeros(sender.tensors[name].shape))).copy_(value)
        found = attempt(
            lambda: _true_run(engine, reference, criterion, records, batches_of_ranks, off, generators, whole)
        )
    truth: TrueRun | None = agreed(engine.context, found)
    if truth is not None:
        found = attempt(lambda: _side_by_side(records, truth))
    evidence: Evidence | None = agreed(engine.context, found if truth is not None else None)

    # Of the tensors that differ, the elements are needed to find out why.
    needed = shared(
        engine.context,
        lambda: needed_as_a_whole(compare(evidence), sketched, truth.names) if sketched and evidence and truth else [],
    )
    if not needed:
        return evidence
    left = sketched.difference(needed)
    everyone = gather_to_first((shortened(left), None), engine.context)
    if everyone is not None and truth is not None:
        found = attempt(lambda: _side_by_side([record for record, _ in everyone], truth))
    return agreed(engine.context, found if everyone is not None else None)


# --- On every rank ---


def _record_steps(
    engine: Engine, batches: Sequence[Sequence[Any]], off: Mapping[str, str] | None, kept_in_eval: Mapping[str, bool]
) -> tuple[Record, Any]:
    """Train; returns the record of this rank and its batches. `off`: modules without dropout; None: all of them."""
    given = []
    dropping = RecordedDraws(off)
    recorder = EngineRecorder(engine, dropping)
    engine.train()
    set_eval(engine.model, kept_in_eval)
    recorder.record.run.kept_in_eval = dict(kept_in_eval)
    try:
        with dropping.watching(engine.model, partial(name_in_full_model, engine.model)), dropping:
            for step in batches:
                # Copied before the model sees them: a model may change its batch in place.
                given.append([_pieces(engine, batch) for batch in step])
                for batch in step:
                    engine.zero_grad()
                    engine.execute_schedule(iter([batch]), return_output_label=False)
                    # The optimizer has no dropout, and must not compute in the dtypes of the recorded model.
                    with torch._C.DisableTorchFunction():
                        engine.step()
        recorder.record.notes += notes_of(dropping, off)
        recorder.record.run.zeroed, recorder.record.run.host = dropping.zeroed, dropping.host
    finally:
        recorder.close()
    return recorder.record, given


def _unjoinable_dropout(
    engine: Engine, reference: Any, criterion: Any, batch: Any, kept_in_eval: Mapping[str, bool]
) -> Mapping[str, str] | None:
    """The modules whose dropout a single process cannot repeat, with reasons, from forward passes without side effects."""

    def run(off: Mapping[str, str] | None) -> tuple[None, Mapping[str, str]]:
        dropping = RecordedDraws(off or {})
        engine.train()
        set_eval(engine.model, kept_in_eval)
        copied = tree_map_only(Tensor, torch.clone, batch)  # a layer may keep its input, or change it in place
        with (
            torch.random.fork_rng(),
            kept_buffers(engine.model),
            dropping.watching(engine.model, partial(name_in_full_model, engine.model)),
            dropping,
        ):
            engine.execute_schedule(iter([copied]), forward_only=True, return_output_label=False)
        drops = any(draw.is_dropout for some in dropping.draws.values() for draw in some)
        if not any(gather_from_all(drops, engine.context)):
            return None, {}

        # A record of one step that has only draws.
        recorder = EngineRecorder(engine)
        recorder.close()
        recorder.record.steps.append(RecordedStep(draws=dropping.draws))
        recorder.record.run.zeroed, recorder.record.run.kept_in_eval = dropping.zeroed, dict(kept_in_eval)
        everyone = gather_to_first((recorder.record, [[_pieces(engine, batch)]]), engine.context)

        def replay(everyone: Sequence[tuple[Record, Any]]) -> dict[str, str]:
            """Run one forward pass on rank 0; returns the modules whose masks cannot be joined."""
            records, given = [record for record, _ in everyone], [given for _, given in everyone]
            with torch.random.fork_rng(), world_of_one(engine.context), torch.no_grad():
                replaying = ReplayedDraws(drawn_by(records, off or {}))
                single, start, _ = _one_process(engine, reference, criterion, records, replaying)
                single.begin(start)
                steps, _ = joined_steps(given, engine.accumulation, [record.run for record in records])
                with replaying.watching(single.model), replaying:
                    single.forward_only(steps[0][0])
            return replaying.found.not_joined

        found: Any = attempt(lambda: replay(everyone)) if everyone is not None else None
        agreed(engine.context, found)
        return None, shared(engine.context, lambda: found)

    return without_unjoinable_dropout(run, {})[1]


def _pieces(engine: Engine, batch: Any) -> list[tuple[Batch, float]]:
    """A batch for the single process: (data, label) of each micro-batch, with its weight in the mean over the batch."""
    schedule = engine.schedule
    if not isinstance(schedule, PipelineSchedule):
        return [(on_cpu(schedule.unpack_batch(batch)), 1.0)]
    data, label = schedule.unpack_batch(batch)
    found = []
    for piece in split_into_micro_batches(data, label, micro_batches(engine)):
        given = (piece.data, piece.label)
        given = schedule._stage_data_func(None, given) if schedule._stage_data_func else given
        found.append((on_cpu(given), piece.weight if schedule._loss_reduction == "mean" else 1.0))
    return found


# --- On rank 0 ---


def _true_run(
    engine: Engine,
    reference: Callable[[], nn.Module] | None,
    criterion: Any,
    records: Sequence[Record],
    given: Sequence[Any],
    off: Mapping[str, str] | None,
    before: tuple[Any, Any],
    whole: Mapping[str, Tensor],
) -> TrueRun:
    """Train the single process. `whole` has the initial values of the tensors that the records contain as sketches."""
    # Layers are built and called in a world of one. The random numbers of the run continue as if this had not happened.
    with torch.random.fork_rng(), world_of_one(engine.context):
        dropping = ReplayedDraws(drawn_by(records, off))
        single, start, names = _one_process(engine, reference, criterion, records, dropping, whole)
        start = {name: recorded(value.to(engine.context.device), copy=False) for name, value in start.items()}
        steps, apart = joined_steps(given, engine.accumulation, [record.run for record in records])
        same_host = all(record.run.host == records[0].run.host for record in records)
        short = partial(_short, records=records, names=names)

        def run(noise: torch.Generator | None = None) -> list[Truth]:
            # Numbers that all ranks drew alike from Python's or NumPy's generator are repeated. Others differ between the runs.
            if same_host:
                set_host_generators(before)
            with dropping.watching(single.model), dropping:
                if noise is None:
                    return list(single.run(start, steps, apart))
                # Of the moved runs only the distances to the reference count, so sketches of them are enough.
                return [short(step) for step in single.run(start, steps, noise=noise, whole=False)]

        with dropping.kept_host():
            truth = run()
            host = {name: list(states) for name, states in dropping.host.items()}
            noises = (torch.Generator(engine.context.device).manual_seed(seed) for seed in range(PERTURBED_RUNS))
            spreads = spreads_of([short(step) for step in truth], map(run, noises))
    for module, reason in dropping.found.not_joined.items():
        raise ParityError(
            f"a single process cannot drop the same elements as the ranks in {module}: {reason}. Pass dropout=False."
        )
    notes = []
    clip = ClipSettings.read(engine.context.config.get("clip_grad_norm"))
    if clip is not None and clip.method != "norm":
        notes.append(f"the divisors of clip method {clip.method!r} were taken from the run")

    # A bound on the terms in an element of a gradient: the rows and tokens of all batches of a step.
    terms = 1
    for passes in steps:
        leaves = [[x for x in tree_leaves(batch) if isinstance(x, Tensor)] for item in passes for batch in item.batches]
        terms = max(terms, sum(max((x.numel() for x in some), default=1) for some in leaves))
    return TrueRun(truth, spreads, start, names, terms, notes, dropping.found, host)


def _short(truth: Truth, records: Sequence[Record], names: Mapping[str, str]) -> Truth:
    """A step of the reference with the sketches that the ranks have."""
    return sketched_truth(truth, sketched_blocks(records, names), records[0].run.norm_type)


def _side_by_side(records: Sequence[Record], truth: TrueRun) -> Evidence:
    """The records of the ranks and the reference, with the sketches that the ranks have."""
    blocks = sketched_blocks(records, truth.names)
    start = {
        name: sketches(value, blocks[name]) if name in blocks else value.cpu() for name, value in truth.start.items()
    }
    return assemble(
        records, replace(truth, steps=[_short(step, records, truth.names) for step in truth.steps], start=start)
    )


def _one_process(
    engine: Engine,
    reference: Any,
    criterion: Any,
    records: Sequence[Record],
    dropping: RandomNumbers,
    whole: Mapping[str, Tensor] | None = None,
) -> tuple[OneProcess, dict[str, Tensor], dict[str, str]]:
    """The single process, its initial weights, and its names of the ranks' tensors."""
    if reference is not None:
        built: Any = reference()
        built = built.whole if isinstance(built, Split) else built
        if not isinstance(built, nn.Module):
            raise ParityError(
                f"reference() returned a {type(built).__name__}; return the unsharded model, a torch.nn.Module",
                code="C100",
            )
        model = built.to(engine.context.device)
    elif engine.uses_pipeline or any(is_dtensor(parameter) for parameter in engine.model.parameters()):
        raise ParityError(
            "no rank has the full model. Pass reference=, a function that builds the full model.", code="C100"
        )
    else:
        model = copy.deepcopy(engine.model)
    names = canonical_names(model)
    check_names(model, full_shapes(records, names))

    # The parameter groups of all ranks, by number: pipeline stages have different parameters with the same options.
    groups: list[tuple[dict[str, Any], list[str]]] = []
    seen: set[str] = set()
    for record in records:
        record.groups = [(options, [names[name] for name in group]) for options, group in record.groups]
        for at, (options, group) in enumerate(record.groups):
            if at == len(groups):
                groups.append((options, []))
            new = [name for name in group if name not in seen]
            seen.update(new)
            groups[at][1].extend(new)

    engine._precision.apply(model, engine.context.device, 0)
    single = OneProcess(
        model,
        _loss_of(engine, model, criterion),
        lambda model: same_optimizer(engine.optimizer, groups, model),
        _limit_of(engine, records, names),
        engine._precision.dtype,
        {name: kept for record in reversed(records) for name, kept in record.run.kept_in_eval.items()},
        dropping,
    )
    # If the optimizer keeps fp32 master weights, the weights of the single process are fp32.
    initial = {names.get(name, name): value for name, value in (whole or {}).items()}
    start, half = {**full_tensors(records, names), **initial}, (torch.float16, torch.bfloat16)
    if engine._precision.dtype is not None and engine._precision.master_weights:
        start = {name: tensor.float() if tensor.dtype in half else tensor for name, tensor in start.items()}
    return single, start, names


def _loss_of(engine: Engine, model: nn.Module, criterion: Any) -> Callable[[nn.Module, Batch], Any]:
    """The loss of a batch, computed like in a schedule without pipeline."""
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


def _limit_of(engine: Engine, records: Sequence[Record], names: Mapping[str, str]) -> Limit | None:
    """Return the clipping of the single process, by the rule of `torch.nn.utils.clip_grad_norm_`; None without clipping."""
    settings = ClipSettings.read(engine.context.config.get("clip_grad_norm"))
    if settings is None:
        return None
    # Only the built-in method is computed again. Of any other, the single process takes the divisors of the run.
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
