"""The record of one process: losses, gradients at each stage of a step, weights and activations of its first steps.

A `StepRecorder` watches a model through hooks and fills a `Record`. The steps themselves are reported to it by
`EngineRecorder` here, which observes an engine, or by `PlainRecorder` of watch.py, which follows a torch optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from colonnade.config.settings import ClipSettings
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.engine.engine import Engine, Observer
from colonnade.engine.schedule.loss import split_loss
from colonnade.engine.schedule.schedules import PipelineSchedule
from colonnade.parallel.boxes import full_box
from colonnade.parallel.demand import owed
from colonnade.parallel.forward import ModelHook
from colonnade.parallel.held import checksum, held_tensors
from colonnade.parallel.placement import is_dtensor, local_part
from colonnade.parallel.whole import LocalTensor, locate_tensors, memory_order, prefix_of
from colonnade.proof.random_numbers import Draws, RandomNumbers, RecordedDraws, Replays
from colonnade.proof.sketch import LARGE, Block, Blocks, Stored, are_whole, sketch, sketches

Batch = tuple[Any, Any]
"""(data, label)"""
Loss = tuple[float, float | None]
"""(mean, the count that the mean divides by; None for a plain mean)"""

Options = list[dict[str, float]]
"""The numbers of each parameter group: learning rate, decay."""

StateName = tuple[str, str]
"""(key, name of the parameter) of a tensor of the optimizer's state"""
Event = tuple[str, str]
"""("in" or "out", name of a module)"""
RAW_BYTES = 1 << 30
"""The largest total size of the gradients of single passes that are kept; those of the first steps are kept first."""
ACTIVATION_BYTES = 64 << 20
INPUTS = 4
"""The number of tensors that are recorded of the inputs of a module."""


@dataclass(frozen=True)
class Piece:
    """Some elements of a tensor. `positions`: their indices in the flattened full tensor; None: all elements."""

    value: Tensor
    positions: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Tracked:
    """A parameter or buffer of this process that is recorded.

    `name` is the first of its `names`; `positions` are the flat indices of its elements in the full tensor.
    """

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
    """The description of a tracked tensor that is sent to rank 0."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    positions: Tensor | None
    placement: str
    ledger: tuple[str, ...] = ()
    required: tuple[tuple[str, tuple[int, ...], float], ...] = ()
    slot: str | None = None
    """The norm group of the gradient, if gradients are clipped."""
    is_parameter: bool = True
    trained: bool = True


@dataclass
class RecordedStep:
    """The values of one step. Tensors are keyed by their names in this process."""

    losses: list[Loss | None] = field(default_factory=list)
    lengths: dict[str, float] = field(default_factory=dict)
    """The norms of the total gradients that were sketched."""
    raw: dict[str, dict[int, Tensor]] = field(default_factory=dict)
    """By parameter and number of the pass: the local gradient of the backward pass."""
    total: dict[str, list[Piece]] = field(default_factory=dict)
    divisors: dict[str, float] = field(default_factory=dict)
    """The divisors of clipping; other gradients are not divided."""
    clipped: dict[str, list[Piece]] = field(default_factory=dict)
    """The gradients that the optimizer used, if they were recorded themselves."""
    stepped: dict[str, list[Piece]] = field(default_factory=dict)
    """The gradients at the end of the optimizer's step, if the step changed them."""
    held: list[str] = field(default_factory=list)
    """Parameters whose gradients a wrapper accumulates without reducing them, so that `.grad` is empty."""
    norm: float | None = None
    norms: dict[str, float] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    activations: dict[str, Tensor] = field(default_factory=dict)
    recomputed: dict[str, Tensor] = field(default_factory=dict)
    """Outputs of modules that were recomputed in the backward pass."""
    inputs: dict[str, list[Tensor]] = field(default_factory=dict)
    """For each module: the tensors in the arguments of its first call."""
    events: list[Event] = field(default_factory=list)
    """The recorded inputs and outputs, in the order of the forward pass."""
    rows: dict[str, int] = field(default_factory=dict)
    """The first module of the step, and the number of rows in all of its calls."""
    changed: dict[str, Tensor] = field(default_factory=dict)
    """Weights and buffers that changed between the previous step and the first forward pass of this one."""
    changed_state: list[StateName] = field(default_factory=list)
    """Tensors of the optimizer's state that changed between the steps."""
    in_eval: dict[str, bool] = field(default_factory=dict)
    """For each module that ran: whether it was in evaluation mode."""
    evaluations: int = 0
    """The number of passes of the model without gradients since the previous step."""
    draws: Draws = field(default_factory=dict)
    """The results of random operators."""
    options: Options = field(default_factory=list)
    """The options of the optimizer in this step."""
    state: dict[StateName, Tensor] = field(default_factory=dict)
    """The state of the optimizer before its step, if two runs of the script are compared with each other."""
    generators: Tensor | None = None
    """The state of torch's random number generator before the optimizer's step, likewise."""


@dataclass(frozen=True)
class BatchAxis:
    """An axis of the layout and its effect on batches.

    `distinct`: whether its ranks see distinct data. `dim`: the dimension along which it shards batches.
    """

    name: str
    size: int
    distinct: bool
    dim: int = 0
    may_repeat: bool = False
    """Whether ranks may be given the same batch, which the model slices (sequences)."""


@dataclass
class OwnStart:
    """The initial weights of a script in a single process, compared with those of its ranks (start_weights.py)."""

    agreeing: list[str] = field(default_factory=list)
    """The names of weights that are equal, without constant ones."""
    differing: dict[str, Tensor] = field(default_factory=dict)
    """The script's own values of weights that differ."""
    order: list[str] = field(default_factory=list)
    """The names of agreeing and differing weights, in the order of the model."""


@dataclass
class RunInfo:
    """The description of a run: the facts that a comparison needs in addition to the recorded numbers.

    Each process sets the fields that it knows. The layout is that of the engine's context, equal on all ranks except
    for `coordinates`. Plain torch has no layout, so `watch.with_layout` derives one from the batches. The last fields
    are for scripts.
    """

    axes: Sequence[BatchAxis] | None = None
    """The axes of the layout. None: plain torch, whose layout is not known yet."""
    coordinates: dict[str, int] = field(default_factory=dict)
    """The position of this rank on each axis."""
    groups: dict[str, list[list[int]]] = field(default_factory=dict)
    """The process groups by mode, for modes with a group of several ranks."""
    distinct_data: list[str] = field(default_factory=list)
    """The modes whose ranks see distinct data."""
    data_parallel: bool = False
    """Whether a data-parallel wrapper of plain torch shows that the ranks should see distinct data."""

    dtype: str = ""
    """The coarsest dtype in which the forward pass computes. Empty: unknown."""
    micro_batches: int = 1
    """The number of micro-batches that the schedule makes of each batch."""
    accumulation: int = 1
    """The number of backward passes in a step, of all micro-batches."""
    max_norm: float | None = None
    norm_type: float = 2.0
    kept_in_eval: dict[str, bool] = field(default_factory=dict)
    """For each module: whether it is in evaluation mode although the model trains."""
    has_engine: bool = False
    zeroed: set[str] = field(default_factory=set)
    """The modules whose dropout was turned off."""

    sketched: dict[str, Block | None] = field(default_factory=dict)
    """The tensors of which this rank recorded sketches, with the elements that it stores (None: all)."""
    stored: dict[str, Stored] = field(default_factory=dict)
    """Only for a script on its ranks: the initial values of the sketched tensors."""
    given: dict[str, list[Any]] = field(default_factory=dict)
    """Only for a script on its ranks: every batch that came in, by place (loader, call, schedule, criterion)."""
    given_in: dict[str, list[int]] = field(default_factory=dict)
    """By place: the number of the step in which each batch of `given` came in."""
    config: dict[str, str] = field(default_factory=dict)
    """Only for a script: its config as text, for the comparison with its config in a single process."""
    names: dict[str, str] = field(default_factory=dict)
    """Only for a script in a single process: maps all names of each tensor to its first name."""
    replays: Replays = field(default_factory=Replays)
    """Only for a script in a single process: the outcome of repeating the ranks' random numbers."""
    own_start: OwnStart = field(default_factory=OwnStart)
    """Only for a script in a single process: the weights from which it would have started."""
    host: dict[str, list[int]] = field(default_factory=dict)
    """For each module that draws from Python's or NumPy's generator: a checksum of their states after each draw."""


@dataclass
class Record:
    """All recorded values of one process."""

    rank: int
    tensors: dict[str, TensorNote] = field(default_factory=dict)
    start: dict[str, Tensor] = field(default_factory=dict)
    state: dict[StateName, Tensor] | None = field(default_factory=dict)
    """The optimizer's state before the first step: empty, unless the run resumes. None: its elements are not those of parameters."""
    steps: list[RecordedStep] = field(default_factory=list)
    groups: list[tuple[dict[str, Any], list[str]]] = field(default_factory=list)
    """The parameter groups of the optimizer: options, and names of the parameters."""
    notes: list[str] = field(default_factory=list)
    run: RunInfo = field(default_factory=RunInfo)


class StepRecorder:
    """Records the steps of one process through hooks.

    Args:
        model: The model, whose modules and parameters get hooks.
        tracked: The parameters and buffers to record.
        rank: The rank of this process.
        by_count: How the pass of a local gradient is found. True: by the number of hook calls of its parameter; False: by the
            number of losses recorded before.
        gradients: Yields the final gradients that this process stores; default: those in `.grad`.
        rename: Maps a module name to the name in the unsharded model.
        dropping: Intercepts the random operators of the run.
        sketched: Returns the blocks of a tensor that are recorded as sketches; default: none, tensors are recorded in full.
        whole: Returns a block in which tensors can be read, if they are stored elsewhere in the meantime (ZeRO 3 of DeepSpeed).
    """

    def __init__(
        self,
        model: nn.Module,
        tracked: Sequence[Tracked],
        rank: int,
        by_count: bool = False,
        gradients: Callable[[], Iterator[tuple[Tracked, Piece]]] | None = None,
        rename: Callable[[str], str] = lambda name: name,
        dropping: RandomNumbers | None = None,
        sketched: Callable[[Tracked], Blocks] = lambda entry: (),
        whole: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.record = Record(rank)
        self._whole = whole
        self.dropping = dropping if dropping is not None else RandomNumbers()
        self.tracked = list(tracked)
        self.sketched = {entry.name: blocks for entry in self.tracked if (blocks := sketched(entry))}
        self._by_count, self._rename = by_count, rename
        self._gradients = gradients or self._own_gradients
        self._handles: list[Any] = []
        self._fired: dict[str, int] = {}
        self._calls: dict[str, list[tuple[int, ...]]] = {}
        """By module: checksums of the inputs of its calls."""
        self._copies = CopiesOfTensors(ACTIVATION_BYTES)
        self._room, self._seen_room = RAW_BYTES, ACTIVATION_BYTES
        self._step = RecordedStep()
        self.state: Callable[[], Iterator[tuple[StateName, Tensor]]] = lambda: iter(())
        """Yields the tensors of the optimizer's state."""
        self._bits: dict[str | StateName, list[int]] = {}
        """Checksums of weights, buffers and optimizer state at the end of the previous step."""
        self._begun = False
        self._model = model
        self._counted: nn.Module | None = None
        """The module whose rows are counted: a wrapper has the name of the model inside it."""
        self._coarsest: torch.dtype | None = None
        self.note_start()
        for entry in self.tracked:
            if entry.is_parameter and entry.tensor.requires_grad:
                hook = partial(self._on_gradient, entry.name, getattr(entry.tensor, "placements", None))
                self._handles.append(entry.tensor.register_hook(hook))
        for name, module in model.named_modules():
            # A copy of the model (an average, a teacher) or a pickle of it must not record its outputs, so the hook does not
            # go along with copies.
            look = ModelHook(partial(self._on_output, self._rename(name)))
            self._handles.append(module.register_forward_hook(look, with_kwargs=True))
            before = ModelHook(partial(self._on_input, self._rename(name)))
            self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))

    def close(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    # --- Called by the owner of the step, in the order of a step ---

    def note_start(self) -> None:
        """Record the current weights as the initial weights of the training."""
        with self._whole():
            self.record.start = {entry.name: self._kept(entry.name, local_part(entry.tensor)) for entry in self.tracked}
            self._bits = dict(self._checksums())

    def note_loss(self, loss: Loss | None) -> None:
        """Record the loss of one forward pass."""
        self._step.losses.append(loss)

    def note_gradients(self, factor: float = 1.0, into: str = "total") -> None:
        """Record the current gradients times `factor`, in the field `into` of the step."""
        found: dict[str, list[Piece]] = getattr(self._step, into)
        for entry, piece in self._gradients():
            value = self._kept(entry.name, piece.value)
            if entry.name in self.sketched and into == "total":
                length = torch.linalg.vector_norm(piece.value, self.record.run.norm_type, dtype=torch.float64)
                self._step.lengths[entry.name] = float(length) * factor
            found.setdefault(entry.name, []).append(Piece(value if factor == 1.0 else value * factor, piece.positions))

    def note_stepped(self, has_passes: bool) -> None:
        """Record the gradients at the end of the optimizer's step, if the step changed them.

        `has_passes`: whether a backward pass had run before the step. LBFGS runs all passes inside its step; gradients
        from before the step then belong to the previous step, and are removed.
        """
        if self.has_passes and not has_passes:
            self._step.total, self._step.clipped = {}, {}
        before = self._step.clipped or self._step.total
        after = list(self._gradients())
        changed = any(
            (pieces := before.get(entry.name)) is None
            or len(pieces) != 1
            or not torch.equal(pieces[0].value, self._kept(entry.name, piece.value).to(pieces[0].value.device))
            for entry, piece in after
        )
        if changed:
            self.note_gradients(into="stepped")

    def note_held(self, names: list[str]) -> None:
        """Record the names of parameters whose gradients a wrapper accumulates without reducing them."""
        self._step.held = names

    @property
    def has_passes(self) -> bool:
        """Whether a backward pass has run in this step."""
        return bool(self._step.losses or self._step.raw)

    def note_options(self, options: Options) -> None:
        """Record the options of the optimizer in this step."""
        self._step.options = options

    def note_state(self) -> None:
        """Record the state of the optimizer and of the random number generator."""
        self._step.state = {name: copied(value) for name, value in self.state()}
        self._step.generators = torch.get_rng_state()

    def total(self) -> dict[str, list[Piece]]:
        """Return the recorded final gradients of this step."""
        return self._step.total

    def passes(self) -> list[dict[int, Tensor]]:
        """Return, for each parameter, its local gradients in this step by number of the pass."""
        return list(self._step.raw.values())

    def scale_raw(self, factor: float) -> None:
        """Multiply the local gradients of all passes by a factor, so that they have the scale of the final gradient."""
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
        """Record the end of a step."""
        step = self._step
        step.norm, step.norms, step.divisors = norm, dict(norms or {}), dict(divisors or {})
        with self._whole():
            for entry in self.tracked:
                (step.weights if entry.is_parameter else step.buffers)[entry.name] = self._kept(
                    entry.name, local_part(entry.tensor)
                )
            self._bits = dict(self._checksums())
        # Autocast computes in a coarser dtype than that of the weights. The tolerance is that of the coarser one.
        if self._coarsest is not None and self.record.run.dtype:
            own = getattr(torch, self.record.run.dtype)
            self.record.run.dtype = str(coarser(self._coarsest, own)).removeprefix("torch.")
        if isinstance(self.dropping, RecordedDraws):
            step.draws = self.dropping.draws
        self.record.steps.append(step)
        self.dropping.begin_step(len(self.record.steps), self.dropping.data_rank)
        self._step, self._fired, self._seen_room = RecordedStep(), {}, 0
        self._copies.clear()
        self._begun = False

    def _checksums(self) -> Iterator[tuple[str | StateName, list[int]]]:
        own: list[tuple[str | StateName, Tensor]] = [(entry.name, local_part(entry.tensor)) for entry in self.tracked]
        for name, tensor in [*own, *self.state()]:
            yield name, checksum(tensor.detach().contiguous()).tolist() if tensor.numel() else []

    def begin_step(self) -> None:
        """Record the weights, buffers and state that changed since the previous step, before a forward pass changes them.

        Called by the hook of the first module that runs, if it was not called before.
        """
        if self._begun:
            return
        self._begun = True
        if not self.record.steps:
            self.record.state = self._first_state()
        with self._whole():
            now = dict(self._checksums())
            for entry in self.tracked:
                if now[entry.name] != self._bits.get(entry.name):
                    self._step.changed[entry.name] = self._kept(entry.name, local_part(entry.tensor))
        changed = [name for name, bits in self._bits.items() if bits != now.get(name)]
        self._step.changed_state = [name for name in changed if isinstance(name, tuple)]

    def _first_state(self) -> dict[StateName, Tensor] | None:
        """The tensors of the optimizer's state that have the elements of a parameter, and numbers; None if there are others."""
        sizes, found = {entry.name: local_part(entry.tensor).numel() for entry in self.tracked}, {}
        for key, value in self.state():
            if key[1] not in sizes or value.numel() not in (1, sizes[key[1]]):
                return None
            is_sketched = key[1] in self.sketched and value.dim()
            found[key] = sketches(value, self.sketched[key[1]]) if is_sketched else copied(value)
        return found

    # --- Hooks ---

    def _on_gradient(self, name: str, placements: Any, grad: Tensor | None) -> None:
        """Tensor hook: the local gradient of this backward pass, before it is accumulated or reduced.

        `placements`: those of the parameter, if it is a DTensor.
        """
        # A custom backward pass may return None, and torch calls the hook all the same. The partial gradient of a DTensor has no
        # place among the elements of the parameter.
        if grad is None or getattr(grad, "placements", placements) != placements:
            return
        grad = local_part(grad)
        # Usually the last recorded loss is that of this backward pass. A pipeline runs several forward passes before the first
        # backward pass, so there the calls of the hook are counted.
        at = self._fired.get(name, -1) + 1 if self._by_count else len(self._step.losses) - 1
        self._fired[name] = at
        size = 0 if name in self.sketched else grad.numel() * grad.element_size()
        # Local gradients take as much memory as the model for each pass, so only the first ones are kept of a large model.
        if self._room >= size:
            self._room -= size
            grad = grad.to_dense() if grad.is_sparse else grad
            before, value = self._step.raw.setdefault(name, {}).get(at), self._kept(name, grad)
            self._step.raw[name][at] = value if before is None else before + value.to(before.device)

    def _on_input(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Module hook: the inputs of the first call in the first step, before the module can change them."""
        step = self._step
        if not torch.is_grad_enabled() and module is self._model:
            step.evaluations += 1
        if not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
            return
        self.begin_step()
        if _in_transform():
            return
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if tensors and tensors[0].dim() and not step.rows:
            self._counted = module
        if tensors and tensors[0].dim() and module is self._counted:
            step.rows[name] = step.rows.get(name, 0) + len(tensors[0])
        if self._seen_room and tensors and name not in step.inputs:
            copies = [self._copies.of(leaf) for leaf in tensors[:INPUTS]]
            step.inputs[name] = [value for value in copies if value is not None]
            if len(step.inputs[name]) < len(copies):
                step.inputs[name] = []  # some of them are sharded, or too large
            step.events.append(("in", name))

    def _on_output(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Module hook: record the output of the first call in the first step, and the output of its recomputation."""
        if not torch.is_grad_enabled() or _in_transform():
            return
        is_recomputed = torch._C._current_graph_task_id() != -1  # inside a backward pass

        # Only the first call of a module is kept. A module with several calls is recomputed as often, in any order, so the
        # recomputation of the first call is recognized by its input.
        if self._seen_room:
            value = first_tensor((args, kwargs))
            bits = () if value is None else tuple(checksum(value.contiguous()).tolist())
            calls = self._calls.setdefault(name, [])
            if not is_recomputed:
                calls.append(bits)
            elif len(calls) > 1 and bits != calls[0]:
                return
        self._step.in_eval.setdefault(name, not module.training)
        into = self._step.recomputed if is_recomputed else self._step.activations
        value = first_tensor(output)
        if value is None or name in into:
            return
        self._coarsest = coarser(self._coarsest, value.dtype)
        size = value.numel() * value.element_size()
        if size <= self._seen_room:
            self._seen_room -= size
            into[name] = copied(value)
            if not is_recomputed:
                self._copies.add(value, into[name])
                self._step.events.append(("out", name))

    def _kept(self, name: str, value: Tensor) -> Tensor:
        """The record of a value of a tracked tensor: a copy or a sketch."""
        return sketches(value, self.sketched[name]) if name in self.sketched else recorded(value)

    def _own_gradients(self) -> Iterator[tuple[Tracked, Piece]]:
        for entry in self.tracked:
            grad = entry.tensor.grad if entry.is_parameter else None
            if grad is not None:
                grad = local_part(grad, entry.tensor)
                yield entry, Piece(grad.to_dense() if grad.is_sparse else grad, entry.positions)


def _in_transform() -> bool:
    """Whether a transform of torch.func (grad, vmap, jvp) runs, whose tensors have no storage that could be recorded."""
    return torch._C._functorch.maybe_current_level() is not None


def is_sketchable(shape: Sequence[int], value: Tensor, positions: Tensor | None) -> bool:
    """Return whether a tensor can be recorded as a sketch: it is large, and the rank stores all of it or a block of it."""
    return prod(shape) > LARGE and value.is_floating_point() and (positions is None or Block.at(positions) is not None)


def common_sketches(
    every: Sequence[Collection[str]], found: Sequence[Mapping[str, Block | None]], counts: Mapping[str, int]
) -> set[str]:
    """Return the names of tensors that every rank can sketch, if the blocks of all ranks cover the full tensor.

    Args:
        every: By rank, the names of its tensors.
        found: By rank, the tensors that it can sketch.
        counts: The number of elements of each full tensor.
    """
    names = {name for some in found for name in some}
    names -= {name for own, some in zip(every, found, strict=True) for name in set(own).difference(some)}
    return {name for name in names if are_whole([some[name] for some in found if name in some], counts[name])}


def sketchable(record: Record) -> dict[str, Block | None]:
    """Return the tensors of a record that this rank can sketch, with the block that it stores (None: all elements).

    A tensor counts only if its gradients can be sketched too.
    """
    found = {}
    for name, value in record.start.items():
        note = record.tensors[name]
        pieces = [piece for step in record.steps for piece in step.total.get(name, ())]
        if is_sketchable(note.shape, value, note.positions) and all(p.positions is note.positions for p in pieces):
            found[name] = None if note.positions is None else Block.at(note.positions)
    return found


def sketched_record(record: Record, sketched: Mapping[str, Block | None]) -> Record:
    """Return a copy of a record in which the given tensors are replaced by their sketches, and all others are on the CPU."""

    def short_value(name: str, value: Tensor) -> Tensor:
        return sketch(value) if name in sketched else value.cpu()

    def short(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: short_value(name, value) for name, value in tensors.items()}

    def short_pieces(pieces: Mapping[str, list[Piece]]) -> dict[str, list[Piece]]:
        return {
            name: [
                Piece(short_value(name, piece.value), None if name in sketched else piece.positions) for piece in some
            ]
            for name, some in pieces.items()
        }

    def short_raw(raw: Mapping[str, dict[int, Tensor]]) -> dict[str, dict[int, Tensor]]:
        return {
            name: {number: short_value(name, value) for number, value in by_pass.items()}
            for name, by_pass in raw.items()
        }

    # The positions of the elements in a shard take twice the memory of the shard. The block of a sketch has the same information.
    tensors = {
        name: replace(note, positions=None) if name in sketched else note for name, note in record.tensors.items()
    }

    steps = [
        replace(
            step,
            raw=short_raw(step.raw),
            total=short_pieces(step.total),
            clipped=short_pieces(step.clipped),
            stepped=short_pieces(step.stepped),
            changed=short(step.changed),
            weights=short(step.weights),
            buffers=short(step.buffers),
        )
        for step in record.steps
    ]
    run = replace(record.run, sketched=dict(sketched))
    return replace(record, tensors=tensors, start=short(record.start), steps=steps, run=run)


class CopiesOfTensors:
    """Copies of tensors on the CPU. If the output of a module is the input of the next module, both share one copy."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._known: dict[int, tuple[ref[Tensor], int, Tensor]] = {}

    def add(self, tensor: Tensor, copy: Tensor) -> None:
        self._known[id(tensor)] = ref(tensor), tensor._version, copy

    def of(self, tensor: Tensor) -> Tensor | None:
        """Return a copy of a tensor; None if the tensor is sharded, or if the memory limit is reached."""
        if is_dtensor(tensor):
            if not all(spec.is_replicate() for spec in tensor.placements):  # type: ignore[attr-defined]
                return None
            tensor = local_part(tensor)
        known = self._known.get(id(tensor))
        if known is not None and known[0]() is tensor and known[1] == tensor._version:
            return known[2]
        size = tensor.numel() * tensor.element_size()
        if size > self._room:
            return None
        self._room -= size
        copy = copied(tensor)
        self.add(tensor, copy)
        return copy

    def clear(self) -> None:
        self._known.clear()


def copied(tensor: Tensor) -> Tensor:
    return _unwrapped(as_real(tensor.detach()).to("cpu", copy=True))


def _unwrapped(tensor: Tensor) -> Tensor:
    """Return a copy that was made inside a transform of torch.func without the transform's wrappers."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def as_real(tensor: Tensor) -> Tensor:
    """Return a complex tensor as a real one with a last dimension of 2, and others unchanged."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def recorded(tensor: Tensor, copy: bool = True) -> Tensor:
    """Return a tensor for a record: on the CPU, or on its GPU if it is large and a quarter of the GPU's memory stays free.

    A GPU sketches a tensor in milliseconds. Its transfer and a sketch on the CPU take seconds for each GB.

    Args:
        tensor: A weight, buffer or gradient.
        copy: Whether the caller still changes the tensor.
    """
    device = torch.device("cpu")
    if tensor.is_cuda and tensor.numel() > LARGE:
        free, total = torch.cuda.mem_get_info(tensor.device)
        if free - tensor.numel() * tensor.element_size() > total // 4:
            device = tensor.device
    return _unwrapped(as_real(tensor.detach()).to(device, copy=copy))


def coarser(a: torch.dtype | None, b: torch.dtype) -> torch.dtype:
    """Return the dtype with the larger rounding error."""
    return b if a is None or torch.finfo(b).eps > torch.finfo(a).eps else a


def options_of(optimizer: Any) -> Options:
    def is_number(value: Any) -> bool:
        return (isinstance(value, (int, float)) and not isinstance(value, bool)) or (
            isinstance(value, Tensor) and value.numel() == 1
        )

    return [{key: float(value) for key, value in group.items() if is_number(value)} for group in optimizer.param_groups]


def on_cpu(value: Any) -> Any:
    """Copy a batch to the CPU, so that later changes in place do not affect the copy."""
    return tree_map_only(Tensor, lambda leaf: leaf.detach().to("cpu", copy=True), value)


def first_tensor(output: Any) -> Tensor | None:
    """Return the first floating point tensor of a module's output; None if there is none, or if it is a DTensor."""
    for leaf in tree_leaves(dict(output) if isinstance(output, Mapping) else output):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            if is_dtensor(leaf):
                is_replicated = all(spec.is_replicate() for spec in leaf.placements)  # type: ignore[attr-defined]
                return local_part(leaf) if is_replicated else None
            return leaf
    return None


def positions_of(tensor: LocalTensor) -> Tensor | None:
    """Return the flat indices of this rank's elements in the full tensor; None if the rank has all elements."""
    local = tensor.local
    if tuple(local.shape) == tuple(tensor.shape):
        return None
    places, local_box = torch.empty(local.shape, dtype=torch.int64), full_box(local.shape)
    for box, here in tensor.places:
        places[here.slices_in(local_box)] = flat_indices(box.offset, box.shape, tensor.shape)
    return places


def flat_indices(offsets: Sequence[int], sizes: Sequence[int], shape: Sequence[int]) -> Tensor:
    """Return the flat indices of a box of elements in a tensor of this shape."""
    found, stride = torch.zeros(tuple(sizes), dtype=torch.int64), 1
    for dim in reversed(range(len(shape))):
        rows = (offsets[dim] + torch.arange(sizes[dim])) * stride
        found += rows.view(sizes[dim], *[1] * (len(shape) - 1 - dim))
        stride *= shape[dim]
    return found


# --- Recording an engine ---


_FP16_SCALE = 256.0


class EngineRecorder(Observer):
    """Records the steps of an engine until `close`. The constructor is collective over the world."""

    def __init__(
        self,
        engine: Engine,
        dropping: RandomNumbers | None = None,
        sketched: Callable[[Tracked], Blocks] = lambda entry: (),
    ) -> None:
        self._engine = engine
        context = engine.context
        located = locate_tensors(engine.model, context, "verifying")
        self._prefix = prefix_of(engine.model)
        self.tracked = [_tracked(entry) for entry in located]
        self._by_tensor = {id(entry.tensor): entry for entry in self.tracked}
        # The gradient of a tensor in a sharded optimizer is a slice, which is no sketch of the whole.
        sliced = {id(parameter) for parameter, *_ in engine.engine_optimizer.gradient_slices()}
        self.recorder = StepRecorder(
            engine.model,
            self.tracked,
            context.get_global_rank(),
            micro_batches(engine) > 1,
            self._gradients,
            rename=partial(name_in_full_model, engine.model),
            dropping=dropping,
            sketched=lambda entry: () if id(entry.tensor) in sliced else sketched(entry),
        )
        self.record = self.recorder.record

        # By parameter: the name and number of the norm group that it counts in.
        self._slots: dict[int, tuple[str, int]] = {}
        slots = engine._stepper._slots
        if slots is not None:
            for entry in held_tensors(engine.model, context):
                number = slots.of_parameter[entry.label]
                self._slots[id(entry.tensor)] = slots.names[number], number
        self.record.tensors = {
            entry.name: self._note(entry, place) for entry, place in zip(self.tracked, located, strict=True)
        }
        self.record.groups = groups_of(engine.optimizer, self._by_tensor)
        self.record.run = info_of(engine)
        self.recorder.state = lambda: state_of(engine.engine_optimizer.stepped, self._by_tensor)
        engine.observers.append(self)

        # The initial loss scale of fp16 makes the first steps overflow, and a skipped step cannot be compared.
        self._scale: Tensor | None = None
        scaler = engine._stepper.scaler
        if scaler is not None:
            self._scale = scaler.scale.clone()
            scaler.scale.clamp_(max=_FP16_SCALE)

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
        # With fp16 the recorded gradients are those of the scaled loss. `scale` is the factor that the engine applies at the end
        # of the reductions; local gradients get both, so that they add up to the total.
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
        """The slices of a sharded optimizer, and `.grad` of other parameters."""
        sharded = set()
        for parameter, start, stop, gradient in self._engine.engine_optimizer.gradient_slices():
            entry = self._by_tensor[id(parameter)]
            sharded.add(entry.name)
            if gradient is not None:
                # Slices count elements in memory order, which is not that of the dimensions for a transposed parameter.
                places = entry.positions
                if places is None:
                    places = torch.arange(entry.tensor.numel()).view(entry.tensor.shape)
                in_memory = places.permute(memory_order(entry.tensor)).reshape(-1)
                yield entry, Piece(gradient, in_memory[start:stop])
        for entry, piece in self.recorder._own_gradients():
            if entry.name not in sharded:
                yield entry, piece

    def _divisors(self) -> dict[str, float]:
        last = self._engine._stepper.last
        if last is None:
            return {}
        found = [float(value) for value in last.divisor.flatten().tolist()]
        return {
            entry.name: found[self._slots[id(entry.tensor)][1] if len(found) > 1 else 0]
            for entry in self.tracked
            if id(entry.tensor) in self._slots
        }

    def _note(self, entry: Tracked, located: LocalTensor) -> TensorNote:
        context = self._engine.context
        rows = [row for row in self._engine.ledger().rows if f"{self._prefix}{row.parameter}" in entry.names]
        factors = owed(context.layout, located.placement, context.get_global_rank()) if entry.is_parameter else ()
        return TensorNote(
            names=entry.names,
            shape=entry.shape,
            positions=entry.positions,
            placement=entry.placement,
            ledger=tuple(
                f"{row.mode} {list(row.ranks)} / {row.divisor:g} by {row.done_by or 'no handler'}" for row in rows
            ),
            required=tuple((factor.mode.name, factor.ranks, float(factor.divisor)) for factor in factors),
            slot=self._slots.get(id(entry.tensor), (None, 0))[0],
            is_parameter=entry.is_parameter,
            trained=entry.tensor.requires_grad,
        )


def name_in_full_model(model: nn.Module, name: str) -> str:
    """Return the name that a module of this rank has in the full model."""
    return f"{prefix_of(model)}{name}" if name else name


def info_of(engine: Engine) -> RunInfo:
    """Return the layout, the passes and the clipping of an engine's run."""
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
        has_engine=True,
    )


def axes_of(context: ParallelContext) -> list[BatchAxis]:
    """Return the axes of the world, with their effect on batches."""
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
    """Return the number of micro-batches into which the schedule splits each batch."""
    return engine.schedule.num_microbatches if isinstance(engine.schedule, PipelineSchedule) else 1


def _tracked(entry: LocalTensor) -> Tracked:
    return Tracked(
        entry.names[0], entry.names, entry.tensor, tuple(entry.shape), positions_of(entry), str(entry.placement)
    )


def groups_of(optimizer: Any, known: dict[int, Tracked]) -> list[tuple[dict[str, Any], list[str]]]:
    return [
        (
            {key: value for key, value in group.items() if key not in ("params", "param_names")},
            [known[id(parameter)].name for parameter in group["params"] if id(parameter) in known],
        )
        for group in optimizer.param_groups
    ]


def state_of(optimizer: Any, known: dict[int, Tracked]) -> Iterator[tuple[StateName, Tensor]]:
    """Yield ((parameter name, key), tensor) for the tensors of an optimizer's state."""
    for at, (parameter, values) in enumerate(optimizer.state.items()):
        entry = known.get(id(parameter))
        if isinstance(values, Mapping):
            for key, value in values.items():
                if isinstance(value, Tensor):
                    yield (str(key), entry.name if entry is not None else str(at)), local_part(value)
