"""What one process does in its first steps, noted as it happens: losses, gradients at each stage, weights, activations.

A `Recorder` looks at a model through hooks; an engine, or a script of plain torch, tells it where a step has got to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from colonnade.checkpoint.format.boxes import whole_box
from colonnade.checkpoint.plan.tensors import LocalTensor
from colonnade.parallel.checksum import checksum
from colonnade.parallel.dtensor import local_part
from colonnade.parallel.hooks import ModelHook
from colonnade.parallel.placement import is_dtensor
from colonnade.verification.runs.masks import Dropping, Masks, Nothing, Noting

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
    """What is told of a tracked tensor to others."""

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
class StepRecord:
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


@dataclass
class Record:
    """All that one process noted."""

    rank: int
    tensors: dict[str, TensorNote] = field(default_factory=dict)
    start: dict[str, Tensor] = field(default_factory=dict)
    steps: list[StepRecord] = field(default_factory=list)
    groups: list[tuple[dict[str, Any], list[str]]] = field(default_factory=list)
    """The parameter groups of the optimizer: options, and names of the parameters."""
    notes: list[str] = field(default_factory=list)
    resting: dict[str, bool] = field(default_factory=dict)
    """By module: whether it was in evaluation mode when it first ran."""
    about: dict[str, Any] = field(default_factory=dict)
    """What all processes know alike: the layout, the accumulation, the clipping."""


class Recorder:
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
        self._step = StepRecord()
        self._coarsest: torch.dtype | None = None
        self.note_start()
        self._watch_gradients()
        self._watch_modules(model)

    def close(self) -> None:
        """Take all hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    # -- told by who runs the step ----------------------------------------------------------------------

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
        if (
            self._coarsest is not None and "dtype" in self.record.about
        ):  # autocast computes in another than the weights'
            own = getattr(torch, self.record.about["dtype"])
            self.record.about["dtype"] = str(coarser(self._coarsest, own)).removeprefix("torch.")
        if isinstance(self.dropping, Noting):
            step.masks = self.dropping.masks
        self.record.steps.append(step)
        self.dropping.begin_step(len(self.record.steps), self.dropping.share)
        self._step, self._fired, self._seen_room = StepRecord(), {}, 0

    # -- hooks ------------------------------------------------------------------------------------------

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
            self.record.resting.setdefault(name, not module.training)
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
        """Of a module that is called several times: whether what is computed again is another call than the first."""
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
