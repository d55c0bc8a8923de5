"""The record of one process: losses, gradients at each stage of a step, weights and activations of its first steps.

A `StepRecorder` watches a model through hooks and fills a `Record`. The steps themselves are reported to it by
`EngineRecorder` here, which observes an engine, or by `PlainRecorder` of watch.py, which follows a torch optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from colonnade.config.settings import ClipSettings
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.engine.engine import Engine, Observer
from colonnade.engine.schedule.loss import split_loss
from colonnade.engine.schedule.pipeline import PipelineSchedule
from colonnade.parallel.boxes import whole_box
from colonnade.parallel.demand import owed
from colonnade.parallel.dtensor import local_part
from colonnade.parallel.forward import ModelHook
from colonnade.parallel.held import checksum, held_tensors
from colonnade.parallel.placement import is_dtensor
from colonnade.parallel.whole import LocalTensor, locate_tensors, memory_order, prefix_of
from colonnade.proof.dropout_masks import Dropping, Masks, Nothing, Noting, Replays

Batch = tuple[Any, Any]
"""(data, label)"""
Loss = tuple[float, float | None]
"""(mean, what it is a mean over; None for a plain mean)"""

Options = list[dict[str, float]]
"""The numbers of each parameter group: learning rate, decay."""

RAW_BYTES = 1 << 30
"""Gradients of single passes are kept up to this size in all, the first steps' first."""
ACTIVATION_BYTES = 64 << 20


@dataclass(frozen=True)
class Piece:
    """Some elements of a tensor, and their places in the flat whole; None: all, in order."""

    value: Tensor
    positions: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Tracked:
    """A parameter or buffer of this process, under its first name here, and where its elements lie in the whole."""

    name: str
    names: tuple[str, ...]
    tensor: Tensor
    shape: tuple[int, ...]
    positions: Tensor | None = None
    placement: str = "replicated"

    @property
    def is_parameter(self) -> bool:
        return isinstance(self.tensor, nn.Parameter)


@dataclass(frozen=True)
class TensorNote:
    """The facts of a tracked tensor, for comparison with those of other ranks."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    positions: Tensor | None
    placement: str
    ledger: tuple[str, ...] = ()
    owed: tuple[tuple[str, tuple[int, ...], float], ...] = ()
    slot: str | None = None
    """What its norm is counted under, where the gradient is clipped."""
    is_parameter: bool = True
    trained: bool = True


@dataclass
class RecordedStep:
    """One step. Tensors are by the name that they have in this process."""

    losses: list[Loss | None] = field(default_factory=list)
    raw: dict[str, dict[int, Tensor]] = field(default_factory=dict)
    """By parameter: the number of the pass, and what its backward pass gave."""
    total: dict[str, list[Piece]] = field(default_factory=dict)
    divisors: dict[str, float] = field(default_factory=dict)
    """What clipping divides each gradient by; others are not divided."""
    clipped: dict[str, list[Piece]] = field(default_factory=dict)
    """The gradients that were stepped on, where they were seen themselves."""
    norm: float | None = None
    norms: dict[str, float] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    activations: dict[str, Tensor] = field(default_factory=dict)
    recomputed: dict[str, Tensor] = field(default_factory=dict)
    """Activations of modules that ran once more in the backward pass."""
    masks: Masks = field(default_factory=dict)
    """What dropout kept."""
    options: Options = field(default_factory=list)
    """What the optimizer stepped with."""


@dataclass(frozen=True)
class BatchAxis:
    """An axis of the layout: its size, whether its ranks see distinct data, and the dimension along which batches are cut."""

    name: str
    size: int
    distinct: bool
    dim: int = 0
    may_repeat: bool = False
    """Whether ranks may be given the same batch, of which the model takes its part (sequences)."""


@dataclass
class RunInfo:
    """The facts of a run that a comparison needs beside its numbers.

    A process fills in what it knows. Layout: from the context of an engine, the same on all ranks but for `coordinates`;
    plain torch has none, and `watch.with_layout` derives one from the batches. Last part: of scripts alone.
    """

    axes: Sequence[BatchAxis] | None = None
    """None: plain torch, no layout is known yet."""
    coordinates: dict[str, int] = field(default_factory=dict)
    """Of this rank, by axis."""
    groups: dict[str, list[list[int]]] = field(default_factory=dict)
    """By mode, those modes that have a group of several ranks."""
    distinct_data: list[str] = field(default_factory=list)
    """The modes whose ranks see distinct data."""
    data_parallel: bool = False
    """A wrapper of plain torch says that its ranks see distinct data."""

    dtype: str = ""
    """The coarsest in which the forward pass computes. Empty: not known."""
    micro_batches: int = 1
    """Into how many the schedule cuts each batch."""
    accumulation: int = 1
    """Backward passes in a step, of all micro-batches."""
    max_norm: float | None = None
    norm_type: float = 2.0
    kept_in_eval: dict[str, bool] = field(default_factory=dict)
    """By module: whether it is in evaluation mode although the model trains."""
    zeroed: set[str] = field(default_factory=set)
    """The modules in which something was to be dropped and was not."""

    given: dict[str, list[Any]] = field(default_factory=dict)
    """A script on its ranks: every batch that came in, by the place where it came in (loader, call, schedule, criterion)."""
    config: dict[str, str] = field(default_factory=dict)
    """A script: its config as text, to be compared with that which it has as one process."""
    names: dict[str, str] = field(default_factory=dict)
    """A script as one process: every name of a tensor, to its first."""
    replays: Replays = field(default_factory=Replays)
    """A script as one process: what became of the ranks' dropout masks."""


@dataclass
class Record:
    """Everything that one process noted."""

    rank: int
    tensors: dict[str, TensorNote] = field(default_factory=dict)
    start: dict[str, Tensor] = field(default_factory=dict)
    steps: list[RecordedStep] = field(default_factory=list)
    groups: list[tuple[dict[str, Any], list[str]]] = field(default_factory=list)
    """The parameter groups of the optimizer: options, and names of the parameters."""
    notes: list[str] = field(default_factory=list)
    ran_in_eval: dict[str, bool] = field(default_factory=dict)
    """By module: whether it was in evaluation mode when it first ran."""
    run: RunInfo = field(default_factory=RunInfo)


class StepRecorder:
    """Notes the steps of one process. `gradients` gives what the process holds of the final gradients.

    `by_count`: the passes of a parameter are told apart by their order, not by the losses that were noted before.
    """

    def __init__(
        self,
        model: nn.Module,
        tracked: Sequence[Tracked],
        rank: int,
        by_count: bool = False,
        gradients: Callable[[], Iterator[tuple[Tracked, Piece]]] | None = None,
        rename: Callable[[str], str] = lambda name: name,
        dropping: Dropping | None = None,
    ) -> None:
        self.record = Record(rank)
        self.dropping = dropping if dropping is not None else Nothing()
        self.tracked = list(tracked)
        self._by_count, self._rename = by_count, rename
        self._gradients = gradients or self._own_gradients
        self._handles: list[Any] = []
        self._fired: dict[str, int] = {}
        self._calls: dict[str, list[tuple[int, ...]]] = {}
        """By module: what it was given in each of its calls, as a checksum."""
        self._room, self._seen_room = RAW_BYTES, ACTIVATION_BYTES
        self._step = RecordedStep()
        self._coarsest: torch.dtype | None = None
        self.note_start()
        self._watch_gradients()
        self._watch_modules(model)

    def close(self) -> None:
        """Take all hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    # --- Called by the owner of the step, in the order of a step ---

    def note_start(self) -> None:
        """Training starts from the weights that are there now."""
        self.record.start = {one.name: copied(local_part(one.tensor)) for one in self.tracked}
        self.dropping.begin_step(0, self.dropping.share)

    def note_loss(self, loss: Loss | None) -> None:
        self._step.losses.append(loss)

    def note_gradients(self, factor: float = 1.0, into: str = "total") -> None:
        """The gradients as they are now; `factor` is what they, and those of each pass, are still multiplied by."""
        found: dict[str, list[Piece]] = getattr(self._step, into)
        for one, piece in self._gradients():
            value = copied(piece.value)
            found.setdefault(one.name, []).append(Piece(value if factor == 1.0 else value * factor, piece.positions))

    def note_options(self, options: Options) -> None:
        self._step.options = options

    def passes(self) -> list[dict[int, Tensor]]:
        """By parameter: the passes of this step so far."""
        return list(self._step.raw.values())

    def scale_raw(self, factor: float) -> None:
        """Put the gradients of single passes on the scale of the total."""
        if factor != 1.0:
            for passes in self._step.raw.values():
                for value in passes.values():
                    value.mul_(factor)

    def note_step(
        self,
        norm: float | None = None,
        norms: Mapping[str, float] | None = None,
        divisors: Mapping[str, float] | None = None,
    ) -> None:
        """The step is over."""
        step = self._step
        step.norm, step.norms, step.divisors = norm, dict(norms or {}), dict(divisors or {})
        for one in self.tracked:
            (step.weights if one.is_parameter else step.buffers)[one.name] = copied(local_part(one.tensor))
        # Autocast computes in a coarser dtype than that of the weights, and the tolerance has to be that of the coarser.
        if self._coarsest is not None and self.record.run.dtype:
            own = getattr(torch, self.record.run.dtype)
            self.record.run.dtype = str(coarser(self._coarsest, own)).removeprefix("torch.")
        if isinstance(self.dropping, Noting):
            step.masks = self.dropping.masks
        self.record.steps.append(step)
        self.dropping.begin_step(len(self.record.steps), self.dropping.share)
        self._step, self._fired, self._seen_room = RecordedStep(), {}, 0

    # --- Hooks ---

    def _watch_gradients(self) -> None:
        for one in self.tracked:
            if one.is_parameter and one.tensor.requires_grad and not is_dtensor(one.tensor):
                self._handles.append(
                    one.tensor.register_hook(lambda grad, name=one.name: self._on_gradient(name, grad))
                )

    def _on_gradient(self, name: str, grad: Tensor) -> None:
        """By a tensor hook: what this backward pass alone gives, before it is added to anything or summed."""
        at = self._fired.get(name, -1) + 1 if self._by_count else len(self._step.losses) - 1
        self._fired[name] = at
        size = grad.numel() * grad.element_size()
        if grad.layout is torch.strided and self._room >= size:
            self._room -= size
            before = self._step.raw.setdefault(name, {}).get(at)
            self._step.raw[name][at] = copied(grad) if before is None else before + copied(grad)

    def _watch_modules(self, model: nn.Module) -> None:
        for name, module in model.named_modules():
            # A copy of the model (an average, a teacher), or a pickle of it, takes no hook along: its outputs are not those of the model.
            look = ModelHook(partial(self._on_output, self._rename(name)))
            self._handles.append(module.register_forward_hook(look, with_kwargs=True))

    def _on_output(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """The first output of each module in the first step, that of the first pass; and when it is computed again."""
        again = torch._C._current_graph_task_id() != -1  # inside a backward pass
        if torch.is_grad_enabled() and self._seen_room and self._is_another_call(name, (args, kwargs), again):
            return
        if torch.is_grad_enabled():
            self.record.ran_in_eval.setdefault(name, not module.training)
        into = self._step.recomputed if again else self._step.activations
        value = first_tensor(output)
        if value is None or not torch.is_grad_enabled() or name in into:
            return
        self._coarsest = coarser(self._coarsest, value.dtype)
        size = value.numel() * value.element_size()
        if size <= self._seen_room:
            self._seen_room -= size
            into[name] = copied(value)

    def _is_another_call(self, name: str, given: Any, again: bool) -> bool:
        """Whether a call of a module computes another call again than the first. Only the output of the first is kept."""
        value = first_tensor(given)
        bits = () if value is None else tuple(checksum(value.contiguous()).tolist())
        calls = self._calls.setdefault(name, [])
        if not again:
            calls.append(bits)
        return again and len(calls) > 1 and bits != calls[0]

    def _own_gradients(self) -> Iterator[tuple[Tracked, Piece]]:
        for one in self.tracked:
            grad = one.tensor.grad if one.is_parameter else None
            if grad is not None:
                grad = local_part(grad, one.tensor)
                yield one, Piece(grad.to_dense() if grad.is_sparse else grad, one.positions)


def copied(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def coarser(one: torch.dtype | None, other: torch.dtype) -> torch.dtype:
    """The one that rounds more."""
    return other if one is None or torch.finfo(other).eps > torch.finfo(one).eps else one


def options_of(optimizer: Any) -> Options:
    def is_number(value: Any) -> bool:
        return (isinstance(value, (int, float)) and not isinstance(value, bool)) or (
            isinstance(value, Tensor) and value.numel() == 1
        )

    return [{key: float(value) for key, value in group.items() if is_number(value)} for group in optimizer.param_groups]


def on_cpu(value: Any) -> Any:
    """A batch with its tensors on the host, apart from what the run may still change."""
    return tree_map_only(Tensor, lambda leaf: leaf.detach().to("cpu", copy=True), value)


def first_tensor(output: Any) -> Tensor | None:
    """The first floating point tensor of a module's output; None where there is none, or its elements lie elsewhere."""
    for leaf in tree_leaves(dict(output) if isinstance(output, Mapping) else output):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            if is_dtensor(leaf):
                whole = all(spec.is_replicate() for spec in leaf.placements)  # type: ignore[attr-defined]
                return local_part(leaf) if whole else None
            return leaf
    return None


def positions_of(tensor: LocalTensor) -> Tensor | None:
    """Where the elements of this rank's part lie in the flat whole; None where it is the whole."""
    local = tensor.local
    if tuple(local.shape) == tuple(tensor.shape):
        return None
    places = torch.empty(local.shape, dtype=torch.int64)
    whole, strides = whole_box(local.shape), [1] * len(tensor.shape)
    for dim in range(len(tensor.shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * tensor.shape[dim + 1]
    for box, here in tensor.places:
        at = torch.zeros((), dtype=torch.int64)
        for offset, size, stride in zip(box.offset, box.shape, strides, strict=True):
            at = at.unsqueeze(-1) + (offset + torch.arange(size)) * stride
        places[here.slices_in(whole)] = at
    return places


# --- An engine that is recorded ---


_FP16_SCALE = 256.0


class EngineRecorder(Observer):
    """Notes the steps of an engine from now on, until `close`. Collective over the world to make."""

    def __init__(self, engine: Engine, dropping: Dropping | None = None) -> None:
        self._engine = engine
        context = engine.context
        located = locate_tensors(engine.model, context, "verifying")
        self._prefix = prefix_of(engine.model)
        self.tracked = [_tracked(one) for one in located]
        self._by_tensor = {id(one.tensor): one for one in self.tracked}
        self.recorder = StepRecorder(
            engine.model,
            self.tracked,
            context.get_global_rank(),
            micro_batches(engine) > 1,
            self._gradients,
            rename=partial(name_in_whole, engine.model),
            dropping=dropping,
        )
        self.record = self.recorder.record
        self._slots = self._slot_names()
        self.record.tensors = {
            one.name: self._note(one, place) for one, place in zip(self.tracked, located, strict=True)
        }
        self.record.groups = groups_of(engine.optimizer, self._by_tensor)
        self.record.run = info_of(engine)
        engine.observers.append(self)
        self._scale = self._lower_scale()

    def _lower_scale(self) -> Tensor | None:
        """fp16 begins with a scale at which first steps are dropped; a dropped step says nothing."""
        scaler = self._engine._stepper.scaler
        if scaler is None:
            return None
        before = scaler.scale.clone()
        scaler.scale.clamp_(max=_FP16_SCALE)
        return before

    def close(self) -> None:
        self.recorder.close()
        scaler = self._engine._stepper.scaler
        if scaler is not None and self._scale is not None:
            scaler.scale.copy_(self._scale)
        if self in self._engine.observers:
            self._engine.observers.remove(self)

    # --- Events of the engine ---

    def on_loss(self, loss: Any) -> None:
        self.recorder.note_loss(self._loss(loss))

    def on_reduced(self, scale: float | Tensor | None) -> None:
        scaler = self._engine._stepper.scaler
        unscaled = 1.0 if scaler is None else 1.0 / float(scaler.scale)
        self.recorder.scale_raw(unscaled * (1.0 if scale is None else float(scale)))
        self.recorder.note_gradients(unscaled)

    def on_stepped(self) -> None:
        self._engine.wait_for_weights()
        norm = self._engine.grad_norm
        norms = {name: float(value) for name, value in self._engine.grad_norms().items()}
        self.recorder.note_step(None if norm is None else float(norm), norms, self._divisors())

    def _loss(self, loss: Any) -> Loss | None:
        if loss is None:
            return None
        if self._engine.schedule.runs_backward:
            count = self._engine.loss_count
            return float(loss), None if count is None else float(count)
        value, count = split_loss(loss)
        if count is None:
            return float(value.detach()), None
        return float(value.detach()) / (float(count) or 1.0), float(count)

    def _gradients(self) -> Iterator[tuple[Tracked, Piece]]:
        """Of what this rank owns: slices of a sharded optimizer, else what lies in `.grad`."""
        sharded = set()
        for parameter, start, stop, gradient in self._engine.engine_optimizer.gradient_slices():
            one = self._by_tensor[id(parameter)]
            sharded.add(one.name)
            if gradient is not None:
                yield one, Piece(gradient, _in_memory(one)[start:stop])
        for one, piece in self.recorder._own_gradients():
            if one.name not in sharded:
                yield one, piece

    def _slot_names(self) -> dict[int, tuple[str, int]]:
        """By parameter: the name and the number of what its norm is counted under."""
        slots = self._engine._stepper._slots
        if slots is None:
            return {}
        held = held_tensors(self._engine.model, self._engine.context)
        at = {id(entry.tensor): slots.of_parameter[entry.label] for entry in held}
        return {key: (slots.names[number], number) for key, number in at.items()}

    def _divisors(self) -> dict[str, float]:
        last = self._engine._stepper.last
        if last is None:
            return {}
        found = [float(value) for value in last.divisor.flatten().tolist()]
        return {
            one.name: found[self._slots[id(one.tensor)][1] if len(found) > 1 else 0]
            for one in self.tracked
            if id(one.tensor) in self._slots
        }

    def _note(self, one: Tracked, located: LocalTensor) -> TensorNote:
        context = self._engine.context
        rows = [row for row in self._engine.ledger().rows if f"{self._prefix}{row.parameter}" in one.names]
        factors = owed(context.layout, located.placement, context.get_global_rank()) if one.is_parameter else ()
        return TensorNote(
            names=one.names,
            shape=one.shape,
            positions=one.positions,
            placement=one.placement,
            ledger=tuple(
                f"{row.mode} {list(row.ranks)} / {row.divisor:g} by {row.done_by or 'nobody'}" for row in rows
            ),
            owed=tuple((factor.mode.name, factor.ranks, float(factor.divisor)) for factor in factors),
            slot=self._slots.get(id(one.tensor), (None, 0))[0],
            is_parameter=one.is_parameter,
            trained=one.tensor.requires_grad,
        )


def name_in_whole(model: nn.Module, name: str) -> str:
    """The name that a module of this rank's model has in the whole model."""
    return f"{prefix_of(model)}{name}" if name else name


def info_of(engine: Engine) -> RunInfo:
    """The layout, the passes and the clipping of an engine's run."""
    context, layout = engine.context, engine.context.layout
    clip = ClipSettings.read(context.config.get("clip_grad_norm"))
    floating = [p.dtype for p in engine.model.parameters() if p.is_floating_point()]
    groups = {mode.name: [list(group) for group in layout.groups(mode)] for mode in layout.modes}
    return RunInfo(
        axes=axes_of(context),
        coordinates=layout.coordinates(context.get_global_rank()),
        groups={name: lists for name, lists in groups.items() if any(len(group) > 1 for group in lists)},
        distinct_data=[axis.mode.name for axis in layout.axes if axis.data == "distinct" and axis.size > 1],
        dtype=str(engine._precision.dtype or (floating or [torch.get_default_dtype()])[0]).removeprefix("torch."),
        micro_batches=micro_batches(engine),
        accumulation=engine.accumulation * micro_batches(engine),
        max_norm=None if clip is None else clip.method_options.get("max_norm"),
        norm_type=2.0 if clip is None else clip.norm_type,
    )


def axes_of(context: ParallelContext) -> list[BatchAxis]:
    """The axes of the world, with what is known of how batches lie on them."""
    return [
        BatchAxis(
            axis.name,
            axis.size,
            axis.data == "distinct",
            dim=1 if axis.mode is ParallelMode.SEQUENCE else 0,
            may_repeat=axis.mode is not ParallelMode.DATA,
        )
        for axis in context.layout.axes
    ]


def micro_batches(engine: Engine) -> int:
    """Into how many the schedule cuts each batch."""
    return engine.schedule.num_microbatches if isinstance(engine.schedule, PipelineSchedule) else 1


def _tracked(one: LocalTensor) -> Tracked:
    return Tracked(one.names[0], one.names, one.tensor, tuple(one.shape), positions_of(one), str(one.placement))


def _in_memory(one: Tracked) -> Tensor:
    """Where the elements of a parameter lie in the whole, in the order in which they lie in memory."""
    local = one.tensor
    places = one.positions
    if places is None:
        places = torch.arange(local.numel()).view(local.shape)
    return places.permute(memory_order(local)).reshape(-1)


def groups_of(optimizer: Any, known: dict[int, Tracked]) -> list[tuple[dict[str, Any], list[str]]]:
    return [
        (
            {key: value for key, value in group.items() if key not in ("params", "param_names")},
            [known[id(parameter)].name for parameter in group["params"] if id(parameter) in known],
        )
        for group in optimizer.param_groups
    ]
