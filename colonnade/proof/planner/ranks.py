"""The plan of every kind of rank in a world: its stages, passes and gradient reductions, computed once per kind."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from colonnade.comm.groups import ProcessGroups
from colonnade.comm.torch_versions import apart_from_world
from colonnade.config import Config
from colonnade.config.settings import ActivationSettings
from colonnade.context.layout import Layout
from colonnade.context.layout_builder import build_layout
from colonnade.context.parallel_context import ParallelContext
from colonnade.engine.checks import forms_of, same_stages
from colonnade.engine.prepare import prepare_model, read_losses, read_numerics, read_stages
from colonnade.engine.schedule.actions import Kind, Table
from colonnade.engine.schedule.micro_batch import split_into_micro_batches
from colonnade.engine.schedule.schedules import NonPipelineSchedule, PipelineSchedule
from colonnade.errors import ColonnadeError, ConfigError
from colonnade.gradients.ledger import Ledger
from colonnade.optim.zero.fsdp import shard_model
from colonnade.parallel.demand import check_same_data
from colonnade.parallel.placement import Placement, logical_shape, placement_of
from colonnade.parallel.split import Split, build_schedule
from colonnade.proof.planner.compiled import compile_blocks
from colonnade.proof.planner.cuda_operators import CudaOperators
from colonnade.proof.planner.hardware import Clock
from colonnade.proof.planner.job import ASSUMED_LOSS, Job, no_loss
from colonnade.proof.planner.planned_passes import (
    StagePass,
    extended,
    fake_module,
    find_repeat,
    run_repeated,
    run_stage,
    signature,
)
from colonnade.proof.planner.planned_sums import GradientPlan, plan_gradients
from colonnade.proof.planner.recorder import OperatorRecorder
from colonnade.proof.roles import built, first_ranks, stage_of

# --- A world without processes --------------------------------------------------------------------
#
# Ranks can talk in it by torch's fake process group, whose calls return at once. A rank receives what it has sent, so values mean
# nothing. Shapes, dtypes and the calls themselves are those of a real run, because the run's own code makes them.


class FakeGroups(ProcessGroups):
    """The process groups of one rank, created on demand: in a large world, a rank needs only a few."""

    def group(self, ranks: Iterable[int]) -> Any:
        key = tuple(ranks)
        self.add(key, alone=True)
        return super().group(key)

    def second_group(self, ranks: Iterable[int], rank_sets: Iterable[Iterable[int]], backend: str) -> Any:
        """Return the first group again, because the fake backend supports all devices."""
        return self.group(ranks)


@contextmanager
def fake_rank(config: Config, world_size: int, rank: int, context: ParallelContext) -> Iterator[FakeGroups]:
    """Make `context` simulate a rank of a world without processes, in which collectives return at once."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # the backend "fake" comes with it

    hook = sys.excepthook
    with apart_from_world():
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        sys.excepthook = hook  # no error is that of one rank
        try:
            groups = FakeGroups(rank)
            context.simulate(config, world_size, rank, groups)
            try:
                yield groups
            finally:
                context.destroy()
        finally:
            dist.destroy_process_group()


NOT_PLANNED = {
    "compile": "without a calibration sweep in the hardware file, kernels are not fused",
    "float8": "linear layers are estimated in their dtype without float8",
}


NO_SWEEP = (
    "the hardware file has no calibration sweep: the step time differs by up to 20% from a run in which the device is the limit, and "
    "is too low if the host is; reserved memory is not estimated. `colonnade plan --measure` writes a file with a sweep"
)
NO_OFFLOADING = (
    "`activation_checkpoint.offload` is not planned: memory is estimated as if stored activations stayed on the device, and the time "
    "of the copies is missing"
)


@dataclass(frozen=True)
class PlannedParameter:
    """A parameter of a kind of rank: the number of elements on the rank (`elements`) and of the full tensor (`whole`)."""

    name: str
    elements: int
    whole: int
    placement: Placement


@dataclass
class Kinds:
    """The kinds of ranks of a world: one for each pipeline rank, or more if some ranks are in no group of a mode.

    `models`, `gradients` and `parameters` are by the first rank of a kind, `passes` by stage. `table` is the order of
    passes; None without a pipeline.
    """

    layout: Layout
    table: Table | None
    num_microbatches: int
    schedule: str
    stage_ranks: tuple[int, ...]
    models: dict[int, nn.Module] = field(default_factory=dict)
    gradients: dict[int, GradientPlan] = field(default_factory=dict)
    passes: dict[int, StagePass] = field(default_factory=dict)
    parameters: dict[int, list[PlannedParameter]] = field(default_factory=dict)
    data: Any = None
    one_pass: bool = False
    """Whether a step has only one pass. Then the memory of the pass contains the gradients that are in no bucket."""
    notes: dict[str, None] = field(default_factory=dict)
    problems: dict[str, None] = field(default_factory=dict)


class Known:
    """A cache of the passes that other plans of the same job have run."""

    def __init__(self) -> None:
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.passes: dict[Any, list[tuple[Any, StagePass]]] = {}


def plan_ranks(
    config: Config, world_size: int, job: Job, clock: Clock, context: ParallelContext, known: Known | None = None
) -> Kinds:
    """Plan the gradient reductions of each kind of rank, and run each stage on fake tensors."""
    return _Planning(config, world_size, job, clock, context, known or Known()).run()


class _Planning:
    def __init__(
        self, config: Config, world_size: int, job: Job, clock: Clock, context: ParallelContext, known: Known
    ) -> None:
        self.config, self.world_size, self.job, self.clock, self.context = config, world_size, job, clock, context
        self.layout = build_layout(config, world_size)
        self.firsts = first_ranks(self.layout)
        self.fake, self.passes = known.fake, known.passes
        self.precision, self.zero = read_numerics(config)
        self.sums: dict[Any, GradientPlan] = {}

    def run(self) -> Kinds:
        kinds, whole = self._start()
        for rank in self.firsts:
            kinds.models[rank] = self._model(rank, whole, kinds)
        self._warn_of_same_stages(whole, kinds)
        for rank in self.firsts if self.zero.stage != 3 else ():
            key = (signature(kinds.models[rank]), self._inside(rank))
            if key not in self.sums:
                with fake_rank(self.config, self.world_size, rank, self.context):
                    self.sums[key] = self._gradients(kinds.models[rank], kinds)
            kinds.gradients[rank] = self.sums[key]
        self._run_stages(kinds)
        return kinds

    def _warn_of_same_stages(self, whole: Any, kinds: Kinds) -> None:
        """Note that the model was not cut where all stages have parameters of equal names and shapes, as `initialize` does."""
        if isinstance(whole, Split) or len(kinds.stage_ranks) == 1 or self.config.get("compare_stages") is False:
            return
        forms = {stage_of(self.layout, rank): forms_of(model) for rank, model in kinds.models.items()}
        first, *others = forms.values()
        if first and others and all(other == first for other in others):
            cut = f"colonnade.split(model, num_stages={len(kinds.stage_ranks)})"
            kinds.notes[f"{same_stages(first, len(forms))}; return {cut} unless the stages are meant to be alike"] = (
                None
            )

    def _start(self) -> tuple[Kinds, Any]:
        """The schedule, and the model where one build has all stages."""
        with fake_rank(self.config, self.world_size, self.firsts[0], self.context):
            self.schedule = schedule = build_schedule(self.context)
            piped = isinstance(schedule, PipelineSchedule)
            stages = self.context.pipeline_parallel_size
            kinds = Kinds(
                self.layout,
                schedule.table(stages) if piped else None,
                schedule.num_microbatches if piped else 1,
                type(schedule).__name__ if not piped or schedule.order is None else schedule.order,
                schedule.stage_ranks(stages) if piped else (0,),
            )
            if not piped and type(schedule) is not NonPipelineSchedule:
                kinds.notes[f"the schedule {kinds.schedule} is estimated as one pass over the batch of a rank"] = None
            kinds.notes |= {
                f"`{key}` is not planned: {why}": None
                for key, why in NOT_PLANNED.items()
                if self.config.get(key) and not (key == "compile" and self.clock.kernels is not None)
            }
            if self.clock.hardware.device == "cuda" and self.clock.kernels is None:
                kinds.notes[NO_SWEEP] = None
            if ActivationSettings.read(self.config.get("activation_checkpoint")).offload:
                kinds.notes[NO_OFFLOADING] = None
            kinds.one_pass = not piped and int(self.config.get("gradient_accumulation") or 1) == 1
            whole = built(self.job.build, self.context)
            module = (whole.whole or list(whole)[-1]) if isinstance(whole, Split) else whole
            criterion, own = read_losses(module, self.job.given_criterion(module, self.context), schedule)
            loss = criterion if criterion is not None else own
            if loss is None:
                kinds.notes[ASSUMED_LOSS] = None
                loss = no_loss
            self.criterion = self.precision.around(loss, torch.device("cpu"))
            schedule.choose_label_keys(module, loss, own)
            with self.fake:
                loaded = tree_map_only(Tensor, _faked, self.job.loaded(self.context))
                kinds.data = data, label = schedule.unpack_batch(loaded)
                self.first, *_ = split_into_micro_batches(data, label, kinds.num_microbatches)
        return kinds, whole

    def _model(self, rank: int, whole: Any, kinds: Kinds) -> nn.Module:
        """This rank's part of the model, as `initialize` prepares it."""
        with fake_rank(self.config, self.world_size, rank, self.context):
            if not isinstance(whole, Split) and rank != self.firsts[0]:
                whole = built(self.job.build, self.context)  # the user's function makes the stage of the rank that asks
            model, _ = prepare_model(read_stages(whole), self.context, self.schedule, device=None)
            self.precision.apply(model, torch.device("cpu"), self.zero.stage)
        kinds.parameters[rank] = [self._held(rank, name, p) for name, p in model.named_parameters()]
        return model

    def _held(self, rank: int, name: str, parameter: nn.Parameter) -> PlannedParameter:
        placement = placement_of(parameter)
        check_same_data(self.layout, placement, rank, name)
        inside = [mode for mode in placement.modes if self.layout.has(mode, rank)]
        sizes = {mode: len(self.layout.group_of(mode, rank)) for mode in inside}
        return PlannedParameter(name, parameter.numel(), prod(logical_shape(parameter, placement, sizes)), placement)

    def _gradients(self, model: nn.Module, kinds: Kinds) -> GradientPlan:
        optimizer = self.job.stepper(model, kinds.notes)
        device = self.clock.hardware.device
        return plan_gradients(model, optimizer, self.zero, self.context, self.fake, device, kinds.notes, kinds.problems)

    # -- passes -------------------------------------------------------------------------------------------

    def _run_stages(self, kinds: Kinds) -> None:
        """Stage after stage, since each takes what the one before gives; one of a kind is run."""
        apart = kinds.table is not None and any(a.kind is Kind.INPUT for row in kinds.table.values() for a in row)
        value, last = self.first.data, len(kinds.stage_ranks) - 1
        for stage, (rank, module) in enumerate(self._modules(kinds)):
            loose = kinds.gradients[rank].loose if kinds.one_pass and self.zero.stage != 3 else frozenset()
            pending = kinds.gradients[rank].pending if self.zero.stage != 3 else ()
            whole = module is kinds.models[rank]
            how = (self.zero.stage == 3, kinds.one_pass, whole, loose, pending, apart, stage == 0, stage == last)
            key = (signature(module), self._inside(rank), *how)
            known = self.passes.setdefault(key, [])
            found = self._known(known, value)
            if found is None:
                criterion = self.criterion if stage == last else None
                found, self.sums[key] = self._run(stage, rank, module, value, criterion, apart, kinds)
            known.append((value, found))
            kinds.passes[stage] = found
            if self.zero.stage == 3:
                kinds.gradients[rank] = _joined(kinds.gradients.get(rank), self.sums[key])
            value = found.output

    def _known(self, known: list[tuple[Any, StagePass]], value: Any) -> StagePass | None:
        """The pass of an input through a stage like others before: as it was, or going on as it went from one to the next."""
        for before, found in known:
            if _form(before) == _form(value):
                return found
        if len(known) < 2:
            return None
        (first, one), (second, two) = known[-2:]
        steps = [[_sizes(each) for each in tree_leaves(given)] for given in (first, second, value)]
        if [_apart(a, b) for a, b in zip(*steps[:2], strict=True)] != [
            _apart(a, b) for a, b in zip(*steps[1:], strict=True)
        ]:
            return None
        with self.fake:
            return extended(one, two, 1)

    def _modules(self, kinds: Kinds) -> list[tuple[int, nn.Module]]:
        """For each stage, the first rank that has it, and the stage."""
        found = []
        for stage, home in enumerate(kinds.stage_ranks):
            rank = next(rank for rank in self.firsts if stage_of(self.layout, rank) == home)
            model = kinds.models[rank]
            mine = [at for at, other in enumerate(kinds.stage_ranks) if other == home]
            chunk = model[mine.index(stage)] if isinstance(model, nn.ModuleList) and len(mine) > 1 else model
            found.append((rank, chunk))
        return found

    def _run(
        self,
        stage: int,
        rank: int,
        module: nn.Module,
        value: Any,
        criterion: Any,
        apart: bool,
        kinds: Kinds,
    ) -> tuple[StagePass, Any]:
        sharded = self.zero.stage == 3
        recorder = OperatorRecorder(self.clock, memory=True, resizes=sharded)
        with fake_rank(self.config, self.world_size, rank, self.context):
            summed = None
            if sharded:
                shard_model(module, self.context, self.zero)
                summed = self._gradients(module, kinds)
            # Where a stage is all that the rank has, places among its parameters are those in the plan.
            gradients = summed or kinds.gradients[rank]
            loose = gradients.loose if kinds.one_pass else frozenset()
            # Of equal blocks only two are run, which tells nothing of where each of several buckets is full, and a chunk is not all
            # that its rank has: then `Steps` adds the largest bucket whole.
            whole = module is kinds.models[rank]
            in_pass = whole and (len(gradients.pending) <= 1 or find_repeat(module) is None)
            with self.fake:
                fake_module(module)
                if self.clock.kernels is not None and self.config.get("compile"):
                    compile_blocks(module, criterion, self.config, recorder)
                ids = [id(parameter) for parameter in module.parameters()]
                fresh = {ids[at] for at in loose}
                pending = [
                    ({ids[at] for at in each.large}, {ids[at] for at in each.members})
                    for each in (gradients.pending if in_pass else ())
                ]

                on_gpu = CudaOperators(recorder) if self.clock.hardware.device == "cuda" else nullcontext()

                def run() -> StagePass:
                    with on_gpu:
                        return run_stage(stage, module, self.first, value, criterion, recorder, apart, fresh, pending)

                try:
                    recorded = recorder if self.clock.kernels is not None else None
                    found = run_repeated(module, run, sharded=sharded, recorder=recorded)
                except DynamicOutputShapeException as error:
                    raise ConfigError(
                        f"the model makes a tensor whose size depends on values ({error}; a mask or nonzero(), for example), and "
                        f"an estimate has no values. Branch on `context.is_simulated` there, and assume a size"
                    ) from error
                except ColonnadeError:
                    raise
                except (RuntimeError, TypeError, ValueError) as error:
                    raise ConfigError(
                        f"stage {stage} fails on tensors of the batch's shapes ({_form(value)}), which have no values in an estimate: "
                        f"{type(error).__name__}: {error}. Check that `batch` returns the inputs of the model, and that the model reads no values"
                    ) from error
        largest = 0 if in_pass else max((each.nbytes for each in gradients.pending), default=0)
        return replace(found, rank=rank, pending=largest), summed

    def _inside(self, rank: int) -> tuple[Any, ...]:
        """The modes that a rank is in, and the links of their groups: what else tells two kinds of ranks apart."""
        modes = [mode for mode in self.layout.modes if self.layout.has(mode, rank)]
        return tuple((mode.name, len(self.layout.group_of(mode, rank))) for mode in modes)


def _form(value: Any) -> str:
    return str(tree_map_only(Tensor, lambda each: (tuple(each.shape), each.dtype), value))


def _sizes(value: Any) -> tuple[int, ...]:
    return tuple(value.shape) if isinstance(value, Tensor) else ()


def _apart(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(b - a for a, b in zip(one, other, strict=True))


def _faked(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype)


def _joined(one: GradientPlan | None, other: Any) -> GradientPlan:
    """The sums of several stages of one rank."""
    if one is None:
        return other
    numbers = ("parameters", "gradients", "loose_bytes", "turns", "state", "host", "stepped")
    return replace(
        one,
        ledger=Ledger([*one.ledger.rows, *other.ledger.rows]),
        buckets=one.buckets + other.buckets,
        notes=one.notes or other.notes,
        **{name: max(getattr(one, name), getattr(other, name)) for name in ("largest", "beside", "stepping")},
        **{name: getattr(one, name) + getattr(other, name) for name in numbers},
    )


def samples_of(data: Any) -> tuple[int, int]:
    """Return (rows, tokens) of a rank's data for one pass.

    Tokens are the elements of the first two-dimensional integer tensor.
    """
    tensors = [leaf for leaf in tree_leaves(data) if isinstance(leaf, Tensor) and leaf.dim()]
    tokens = next((t.numel() for t in tensors if t.dim() == 2 and not t.is_floating_point()), 0)
    return len(tensors[0]), tokens
