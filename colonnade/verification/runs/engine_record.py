"""A `Recorder` on an engine: what its tensors are in the whole, and which of its steps it is at."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from colonnade.checkpoint.plan.tensors import LocalTensor, locate_tensors, memory_order, prefix_of
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.engine.engine import Engine
from colonnade.engine.observers import Observer
from colonnade.engine.schedule.loss import split_loss
from colonnade.engine.schedule.pipeline import PipelineSchedule
from colonnade.optim.clip_settings import ClipSettings
from colonnade.parallel.demand import owed
from colonnade.parallel.held import held_tensors
from colonnade.verification.runs.joined import Axis
from colonnade.verification.runs.masks import Dropping
from colonnade.verification.runs.record import Loss, Piece, Recorder, TensorNote, Tracked, positions_of

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
        self.recorder = Recorder(
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
        self.record.about = about(engine)
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

    # -- what the engine tells ----------------------------------------------------------------------------

    def on_loss(self, loss: Any) -> None:
        self.recorder.note_loss(self._loss(loss))

    def on_reduced(self, scale: float | Tensor | None) -> None:
        scaler = self._engine._stepper.scaler
        unscaled = 1.0 if scaler is None else 1.0 / float(scaler.scale)
        self.recorder.scale_raw(unscaled * (1.0 if scale is None else float(scale)))
        self.recorder.note_gradients(unscaled)

    def on_stepped(self) -> None:
        if hasattr(self._engine.optimizer, "wait"):
            self._engine.optimizer.wait()
        norm = self._engine.grad_norm
        norms = {name: float(value) for name, value in self._engine.grad_norms().items()}
        self.recorder.note_step(None if norm is None else float(norm), norms, self._divisors())

    # -- inside -------------------------------------------------------------------------------------------

    def _loss(self, loss: Any) -> Loss | None:
        if loss is None:
            return None
        if self._engine.schedule.runs_backward:
            count = self._engine.schedule.loss_count
            return float(loss), None if count is None else float(count)
        value, count = split_loss(loss)
        if count is None:
            return float(value.detach()), None
        return float(value.detach()) / (float(count) or 1.0), float(count)

    def _gradients(self) -> Iterator[tuple[Tracked, Piece]]:
        """Of what this rank owns: slices of a sharded optimizer, else what lies in `.grad`."""
        optimizer, sharded = self._engine.optimizer, set()
        if hasattr(optimizer, "gradient_slices"):
            for parameter, start, stop, gradient in optimizer.gradient_slices():
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


def about(engine: Engine) -> dict[str, Any]:
    """What the comparison needs to know of the run."""
    context, layout = engine.context, engine.context.layout
    clip = ClipSettings.read(context.config.get("clip_grad_norm"))
    floating = [p.dtype for p in engine.model.parameters() if p.is_floating_point()]
    groups = {mode.name: [list(group) for group in layout.groups(mode)] for mode in layout.modes}
    return {
        "groups": {name: lists for name, lists in groups.items() if any(len(group) > 1 for group in lists)},
        "distinct_data": [axis.mode.name for axis in layout.axes if axis.data == "distinct" and axis.size > 1],
        "axes": axes_of(context),
        "coordinates": layout.coordinates(context.get_global_rank()),
        "dtype": str(engine._precision.dtype or (floating or [torch.get_default_dtype()])[0]).removeprefix("torch."),
        "micro_batches": micro_batches(engine),
        "accumulation": engine.accumulation * micro_batches(engine),
        "max_norm": None if clip is None else clip.options.get("max_norm"),
        "norm_type": 2.0 if clip is None else clip.norm_type,
    }


def axes_of(context: ParallelContext) -> list[Axis]:
    """The axes of the world, with what is known of how batches lie on them."""
    return [
        Axis(
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
