"""One process: the whole model on the joined batches, in plain torch. What it gives is the truth."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from colonnade.context.parallel_context import ParallelContext
from colonnade.core import global_context
from colonnade.engine.schedule.loss import split_loss
from colonnade.errors import ParityError, did_you_mean, listed
from colonnade.parallel.dtensor import local_part
from colonnade.proof.dropout_masks import Dropping, Nothing
from colonnade.proof.record import ACTIVATION_BYTES, RAW_BYTES, Batch, Pass, copied, first_tensor

Tensors = dict[str, Tensor]
Groups = Sequence[tuple[Mapping[str, Any], Sequence[str]]]

PERTURBED_RUNS = 2
"""From weights that are one ulp away: how far apart these are gives the tolerance."""


@dataclass(frozen=True)
class Limit:
    """Clipping to a norm as torch.nn.utils.clip_grad_norm_ does it; `own` are the limits of parameters that have one."""

    max_norm: float = inf
    norm_type: float = 2.0
    own: Mapping[str, tuple[str, float]] = field(default_factory=dict)
    """By parameter: (group, its limit)"""
    uncounted: frozenset[str] = frozenset()
    unclipped: frozenset[str] = frozenset()
    factors: Sequence[Mapping[str, float]] = ()
    """By step and parameter: what the run divided by, where its rule is not one of torch."""


@dataclass
class Truth:
    """One step of one process."""

    loss: float = 0.0
    passes: list[Tensors] = field(default_factory=list)
    total: Tensors = field(default_factory=dict)
    clipped: Tensors = field(default_factory=dict)
    norm: float | None = None
    weights: Tensors = field(default_factory=dict)
    buffers: Tensors = field(default_factory=dict)
    activations: Tensors = field(default_factory=dict)
    shards: list[Tensors] = field(default_factory=list)


@dataclass
class RoundingSpread:
    """How far one step of one process moves, in each of its numbers, when its weights are one ulp away."""

    loss: float = 0.0
    tensors: dict[tuple[str, str], float] = field(default_factory=dict)
    """By (field of `Truth`, name): the 2-norm of the distance."""

    def widen(self, truth: Truth, moved: Truth) -> None:
        """Take in one more run."""
        self.loss = max(self.loss, abs(moved.loss - truth.loss))
        for kind in ("total", "clipped", "weights", "buffers", "activations"):
            others: Tensors = getattr(moved, kind)
            for name, value in getattr(truth, kind).items():
                other = others.get(name)
                if other is not None and other.shape == value.shape and value.is_floating_point():
                    apart = float((other.double() - value.double()).norm())
                    self.tensors[kind, name] = max(self.tensors.get((kind, name), 0.0), apart)


@dataclass
class OneProcess:
    """The reference. `loss_of(model, batch)` is the loss of a batch, in either form."""

    model: nn.Module
    loss_of: Callable[[nn.Module, Batch], Any]
    make_optimizer: Callable[[nn.Module], Any]
    limit: Limit | None = None
    dtype: torch.dtype | None = None
    """What the forward pass computes in, where that is not the dtype of the weights (autocast): whose ulp it is."""
    resting: Mapping[str, bool] = field(default_factory=dict)
    """Which modules are in evaluation mode while the others train."""
    dropping: Dropping = field(default_factory=Nothing)

    def run(
        self,
        start: Mapping[str, Tensor],
        steps: Sequence[Sequence[Pass]],
        apart: Sequence[Sequence[Sequence[Pass]]] = (),
        noise: torch.Generator | None = None,
        whole: bool = True,
    ) -> Iterator[Truth]:
        """Train from `start`, whose values are moved by one ulp with `noise`. `apart`: by step, the shares of its batch.

        Each step is given when it is done; with `whole` it has the gradients of single passes too.
        """
        load(self.model, start, noise, ulp=self.dtype)
        self.model.train()
        rest(self.model, self.resting)
        optimizer = self.make_optimizer(self.model)
        room = RAW_BYTES if whole else 0
        for at, passes in enumerate(steps):
            truth = Truth()
            seen = watched(self.model, truth.activations) if at == 0 else _nothing()
            self.dropping.begin_step(at)
            with seen:
                truth.loss, truth.total, truth.passes = self._gradients(passes, noise, room)
            room -= sum(_bytes(one) for one in truth.passes)
            with kept_buffers(self.model):
                for number, share in enumerate(apart[at] if apart and room > 0 else ()):
                    self.dropping.begin_step(at, number)
                    truth.shards.append(self._gradients(share, noise, 0)[1])
                    room -= _bytes(truth.total)
            truth.norm, truth.clipped = self._clip(truth.total, at)
            self._step(optimizer, truth)
            yield truth

    def _gradients(self, passes: Sequence[Pass], noise: Any, room: int) -> tuple[float, Tensors, list[Tensors]]:
        """(mean loss, gradients, those of each pass): a loss that has a count is divided once by all of them."""
        each: list[Tensors] = []
        total: Tensors = {}
        loss, counted = 0.0, 0.0
        keep = room >= len(passes) * sum(p.numel() * p.element_size() for p in self.model.parameters())
        for one in passes:
            mine: Tensors = {}
            for batch in self._apart(one):
                value, count = self._loss(batch, noise)
                weight = one.weight / len(one.batches) if count is None else 1.0
                loss += float(value.detach()) * weight
                counted += float(count or 0.0)
                (value * weight).backward()
                _take(self.model, mine)
            _add(total, mine, share=keep)
            if keep:
                each.append(mine)
        if counted:
            for gradients in (total, *each):
                for gradient in gradients.values():
                    gradient.div_(counted)
        return loss / (counted or 1.0), total, each

    def _apart(self, one: Pass) -> Iterator[Batch]:
        """The batches of a pass; of several, each is one share of what ranks see."""
        for number, batch in enumerate(one.batches):
            if len(one.batches) > 1:
                self.dropping.share = number
            yield batch

    def _loss(self, batch: Batch, noise: Any = None) -> tuple[Any, Any]:
        device = next(self.model.parameters()).device
        batch = tree_map_only(Tensor, lambda leaf: moved_by_an_ulp(leaf, noise, self.dtype).to(device), batch)
        return split_loss(self.loss_of(self.model, batch))

    def passed(self, one: Pass) -> None:
        """A forward pass, as the first of a step."""
        self.dropping.begin_step(0)
        for batch in self._apart(one):
            self._loss(batch)

    def _clip(self, total: Tensors, step: int) -> tuple[float | None, Tensors]:
        if self.limit is None:
            return None, {}
        limit = self.limit
        norm = norm_of([value for name, value in total.items() if name not in limit.uncounted], limit.norm_type)
        groups: dict[str, list[Tensor]] = {}
        for name, (group, _) in limit.own.items():
            if name in total:
                groups.setdefault(group, []).append(total[name])
        norms = {group: norm_of(values, limit.norm_type) for group, values in groups.items()}
        clipped: Tensors = {}
        for name, value in total.items():
            if limit.factors:
                divisor = limit.factors[step].get(name, 1.0) if step < len(limit.factors) else 1.0
            else:
                group, most = limit.own.get(name, ("", limit.max_norm))
                divisor = max(1.0, ((norms[group] if name in limit.own else norm) + 1e-6) / most)
            clipped[name] = value if divisor == 1.0 or name in limit.unclipped else value / divisor
        return norm, clipped

    def _step(self, optimizer: Any, truth: Truth) -> None:
        gradients = truth.clipped or truth.total
        for name, parameter in self.model.named_parameters():
            found = gradients.get(name)
            parameter.grad = None if found is None else found.to(parameter.device, parameter.dtype, copy=True)
        optimizer.step()
        for name, parameter in self.model.named_parameters():
            parameter.grad = None
            truth.weights[name] = copied(parameter)
        truth.buffers = {name: copied(buffer) for name, buffer in self.model.named_buffers()}


def rest(model: nn.Module, resting: Mapping[str, bool]) -> None:
    """Put these modules of a model in training into evaluation mode, each by itself."""
    for name, module in model.named_modules():
        if resting.get(name):
            module.training = False


def norm_of(values: Sequence[Tensor], norm_type: float) -> float:
    """The norm of all of them together, in double: on a CPU, torch's sum of millions of squares in fp32 is off by 1e-4."""
    norms = [torch.linalg.vector_norm(value, norm_type, dtype=torch.float64) for value in values]
    return float(torch.linalg.vector_norm(torch.stack(norms), norm_type)) if norms else 0.0


def load(
    model: nn.Module,
    start: Mapping[str, Tensor],
    noise: torch.Generator | None = None,
    in_place: bool = False,
    rename: Callable[[str], str] = lambda name: name,
    ulp: torch.dtype | None = None,
) -> None:
    """Give the model the weights and buffers of the run, by name; with their dtype, unless `in_place`."""
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if rename(name) in start:
                value = moved_by_an_ulp(start[rename(name)], noise, ulp)
                if in_place:
                    local_part(tensor).copy_(value)
                else:
                    tensor.data = value.to(tensor.device, copy=True)


def canonical_names(model: nn.Module, rename: Callable[[str], str] = lambda name: name) -> dict[str, str]:
    """Every name of every parameter and buffer, to the first one that it has."""
    first: dict[int, str] = {}
    found: dict[str, str] = {}
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, tensor in named:
        found[rename(name)] = first.setdefault(id(tensor), rename(name))
    return found


def check_names(model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse a reference that is not the model of the run: parameters of other names or shapes."""
    mine = {name: tuple(p.shape) for name, p in model.named_parameters()}
    missing = [name for name in mine if name not in shapes]
    extra = [name for name in shapes if name not in mine]
    if missing or extra:
        raise ParityError(
            f"the reference is not the whole model of this run: no rank holds {listed(missing[:5])}, and the reference has no "
            f"{listed(extra[:5])}.{did_you_mean(extra[0], mine) if extra else ''} Give reference=, a function that builds the "
            f"one-process model, with the parameter names of the parallel one",
            code="C100",
        )
    for name, shape in mine.items():
        if shape != shapes[name]:
            raise ParityError(
                f"the reference has {name} of shape {shape}, and the ranks hold parts of {shapes[name]}; build the reference "
                f"with the sizes of the whole model",
                code="C100",
            )


def same_optimizer(like: Any, groups: Groups, model: nn.Module) -> Any:
    """An optimizer of the same class and options for the reference, with its parameter groups by name."""
    named = dict(model.named_parameters())
    made = [{**options, "params": [named[name] for name in names]} for options, names in groups]
    made = [group for group in made if group["params"]]
    kind = getattr(like, "optimizer_class", type(like))
    if kind.__init__ is not object.__init__:
        known = inspect.signature(kind.__init__).parameters
        options = {key: value for key, value in getattr(like, "defaults", {}).items() if key in known}
        try:
            return kind(made, **options)
        except TypeError:
            pass
    twin = object.__new__(kind)
    vars(twin).update({key: value for key, value in vars(like).items() if key != "step"})  # a scheduler's, of the other
    twin.param_groups, twin.state = made, type(like.state)(dict)
    return twin


@contextmanager
def world_of_one(context: ParallelContext) -> Iterator[None]:
    """Inside, the context (and the global one) is a world of one rank, with the same config: layers are built whole."""
    held = [(one, dict(vars(one))) for one in {id(one): one for one in (context, global_context)}.values()]
    try:
        for one, before in held:
            vars(one).update(vars(ParallelContext()))
            one.config, one.device = before["config"], before["device"]
        yield
    finally:
        for one, before in held:
            vars(one).clear()
            vars(one).update(before)


@contextmanager
def watched(model: nn.Module, into: Tensors) -> Iterator[None]:
    """Note the first output of each module."""
    room = [ACTIVATION_BYTES * 4]

    def look(name: str, output: Any) -> None:
        value = first_tensor(output)
        if value is not None and name not in into and (size := value.numel() * value.element_size()) <= room[0]:
            room[0] -= size
            into[name] = copied(value)

    hooks = [
        module.register_forward_hook(lambda module, args, output, name=name: look(name, output))
        for name, module in model.named_modules()
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def kept_buffers(model: nn.Module) -> Iterator[None]:
    """Buffers are afterwards what they were."""
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]
    yield
    for buffer, value in before:
        buffer.copy_(value)


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def moved_by_an_ulp(tensor: Tensor, noise: torch.Generator | None, dtype: torch.dtype | None = None) -> Tensor:
    """Each element one ulp up or down: of its own dtype, or of one that is coarser."""
    if noise is None or not tensor.is_floating_point():
        return tensor
    eps = max(torch.finfo(one).eps for one in (tensor.dtype, dtype or tensor.dtype))
    up = torch.randint(0, 2, tensor.shape, generator=noise, dtype=torch.int8).to(tensor.device)
    return torch.where(up == 1, tensor + tensor * eps, tensor - tensor * eps)


def _take(model: nn.Module, into: Tensors) -> None:
    """Move the gradients out of the model, onto those that are there."""
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradient = parameter.grad.detach()
            gradient = (gradient.to_dense() if gradient.is_sparse else gradient).cpu()
            into[name] = into[name] + gradient if name in into else gradient
            parameter.grad = None


def _add(total: Tensors, more: Tensors, share: bool) -> None:
    """Add up; where the terms are kept, the sum is another tensor."""
    for name, value in more.items():
        if name in total:
            total[name] = total[name] + value if share else total[name].add_(value)
        else:
            total[name] = value.clone() if share else value


def _bytes(tensors: Tensors) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
