"""One process is the truth: the whole model on the joined batches of all ranks. Everything that a run is compared with.

There are two ways to play that process, and they share this file.

- `OneProcess`, for `colonnade.verify(engine)`: plain torch, here, in the process of rank 0. It runs the passes, clips and
  steps by itself, so that nothing of the engine is part of the truth.
- `SingleProcessScript` (scripts.py), for `colonnade verify train.py`: the script is started once more with every parallel size 1,
  because only its own loop knows its passes, its loss and how it clips. What it noted of its steps is read as `Truth`.

Both follow one protocol. The batches of the ranks are joined (`shares`, `join`). Dropout is repeated as the ranks had it,
and the modules where that is impossible are searched for and left without (`without_unjoinable_dropout`). A step divides
gradients by what clipping says (`divided`) and is a `Truth`. Runs that start one ulp away give the tolerance (`spreads_of`).
All of it together is a `TrueRun`, which `compare.assemble` puts beside the records of the ranks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from colonnade.context.parallel_context import ParallelContext
from colonnade.core import global_context
from colonnade.engine.schedule.loss import split_loss
from colonnade.errors import ParityError, did_you_mean, listed
from colonnade.parallel.dtensor import local_part
from colonnade.proof.dropout_masks import Dropping, Nothing
from colonnade.proof.record import ACTIVATION_BYTES, RAW_BYTES, Batch, RunInfo, copied, first_tensor

Tensors = dict[str, Tensor]
Groups = Sequence[tuple[Mapping[str, Any], Sequence[str]]]
_T = TypeVar("_T")

PERTURBED_RUNS = 2
"""From weights that are one ulp away: how far apart these are gives the tolerance."""


# --- What it gives ---


@dataclass
class Truth:
    """One step of one process. Gradients are whole, by the name of the parameter."""

    loss: float = 0.0
    passes: list[Tensors] = field(default_factory=list)
    """Of each backward pass, as it counts in the total."""
    total: Tensors = field(default_factory=dict)
    clipped: Tensors = field(default_factory=dict)
    norm: float | None = None
    weights: Tensors = field(default_factory=dict)
    buffers: Tensors = field(default_factory=dict)
    activations: Tensors = field(default_factory=dict)
    shards: list[Tensors] = field(default_factory=list)
    """Of each share of the batch alone."""


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


def spreads_of(truth: Sequence[Truth], moved: Iterable[Iterable[Truth]]) -> list[RoundingSpread]:
    """By step: how far rounding moves one process, seen in runs that start one ulp away."""
    spreads = [RoundingSpread() for _ in truth]
    for run in moved:
        for spread, plain, other in zip(spreads, truth, run, strict=True):
            spread.widen(plain, other)
    return spreads


@dataclass(frozen=True)
class TrueRun:
    """All that one process gave."""

    steps: Sequence[Truth]
    spreads: Sequence[RoundingSpread]
    """Of each step."""
    start: Mapping[str, Tensor]
    """The weights and buffers that it began with."""
    names: Mapping[str, str]
    """Each name that a tensor has, on any rank, to the one that it has here."""
    terms: int
    """How many terms an element of a gradient sums, at most."""
    notes: Sequence[str] = ()
    masks_apart: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Of each module that drops: the ranks that drop other elements of what they hold alike."""


# --- What it is given: the batches of the ranks, joined ---


@dataclass(frozen=True)
class Pass:
    """What one process is given in one pass: one batch, or several that cannot be joined. `weight` is its part of a step's mean."""

    batches: list[Batch]
    weight: float = 1.0


def shares(values: Sequence[Any], runs: Sequence[RunInfo]) -> list[Any]:
    """The shares of a batch: the values of ranks that see distinct data, once each. `values` and `runs` are by rank.

    Ranks that see the same data give one share. Parts of sequences are put together, as the model cut them apart itself.
    """
    axes = runs[0].axes or ()
    distinct = [axis for axis in axes if axis.distinct and axis.size > 1]
    table = {
        tuple(runs[rank].coordinates[axis.name] for axis in distinct): value
        for rank, value in reversed(list(enumerate(values)))
        if all(runs[rank].coordinates[axis.name] == 0 for axis in axes if not axis.distinct)
    }
    for at, axis in reversed(list(enumerate(distinct))):
        if axis.may_repeat:
            rows: dict[tuple[int, ...], list[Any]] = {}
            for key in sorted(table):
                rows.setdefault((*key[:at], *key[at + 1 :]), []).append(table[key])
            table = {key: found[0] if all_same(found) else _cat(found, axis.dim) for key, found in rows.items()}
            if any(value is None for value in table.values()):
                raise ValueError(
                    f"the batches of the ranks of the axis {axis.name!r} cannot be joined along dimension {axis.dim}"
                )
    return [table[key] for key in sorted(table)]


def join(parts: Sequence[Any], micro_batches: int = 1) -> Any:
    """The parts as one, along dimension 0; None where they do not fit together.

    A schedule cuts the joined batch into micro-batches again. Each then has the rows of that micro-batch of all ranks.
    """
    rows = {len(leaf) for part in parts for leaf in tree_leaves(part) if isinstance(leaf, Tensor) and leaf.dim()}
    if micro_batches > 1 and len(parts) > 1 and len(rows) == 1 and not (count := rows.pop()) % micro_batches:
        width = count // micro_batches
        parts = [
            tree_map_only(Tensor, partial(_rows, first=at * width, stop=(at + 1) * width), part)
            for at in range(micro_batches)
            for part in parts
        ]
    return parts[0] if len(parts) == 1 else _cat(parts, 0)


def _rows(leaf: Tensor, first: int, stop: int) -> Tensor:
    return leaf[first:stop] if leaf.dim() else leaf


def _cat(parts: Sequence[Any], dim: int) -> Any:
    flat = [tree_flatten(part) for part in parts]
    if any(spec != flat[0][1] for _, spec in flat):
        return None
    leaves = []
    for column in zip(*(leaves for leaves, _ in flat), strict=True):
        if not isinstance(column[0], Tensor) or column[0].dim() <= dim:
            leaves.append(column[0])
        elif all(_but(leaf, dim) == _but(column[0], dim) for leaf in column):
            leaves.append(torch.cat(column, dim))
        else:
            return None
    return tree_unflatten(leaves, flat[0][1])


def _but(leaf: Tensor, dim: int) -> tuple[int, ...]:
    return tuple(size for at, size in enumerate(leaf.shape) if at != dim)


def all_same(parts: Sequence[Any]) -> bool:
    """Whether all have the same tensors in the same places."""
    first, spec = tree_flatten(parts[0])
    for part in parts[1:]:
        leaves, other = tree_flatten(part)
        if other != spec:
            return False
        for mine, theirs in zip(first, leaves, strict=True):
            if isinstance(mine, Tensor) and not (mine.shape == theirs.shape and torch.equal(mine, theirs)):
                return False
    return True


def joined_steps(
    given: Sequence[Any], accumulation: int, runs: Sequence[RunInfo]
) -> tuple[list[list[Pass]], list[list[list[Pass]]]]:
    """The passes of each step for `OneProcess`; and of each step, those of each share of its batch alone.

    `given`: by rank, step, pass and micro-batch, (batch, its part of the mean over the batch).
    """
    steps: list[list[Pass]] = []
    apart: list[list[list[Pass]]] = []
    for at in range(len(given[0])):
        passes: list[Pass] = []
        alone: list[list[Pass]] = []
        for number in range(len(given[0][at])):
            for micro in range(len(given[0][at][number])):
                weight = given[0][at][number][micro][1] / accumulation
                parts = shares([rank[at][number][micro][0] for rank in given], runs)
                # Batches of unlike shapes cannot be joined. Here they may run one after another, each weighing the same.
                whole = join(parts)
                passes.append(Pass(parts if whole is None else [whole], weight))
                alone = alone or [[] for _ in parts]
                for share, part in zip(alone, parts, strict=True):
                    share.append(Pass([part], weight))
        steps.append(passes)
        apart.append(alone if len(alone) > 1 else [])
    return steps, apart


# --- Dropout ---


def without_unjoinable_dropout(
    run: Callable[[Mapping[str, str] | None], tuple[_T, Mapping[str, str]]], off: Mapping[str, str] | None
) -> tuple[_T, Mapping[str, str] | None]:
    """Run until one process can drop what the ranks drop; returns the result, and the modules in which nothing is dropped.

    `run(off)` runs the ranks and one process without dropout in `off` (by module, the reason), and returns its result and
    the modules whose masks are none that one process could have. What comes after such a module differs because of it, so
    only the first ones are known after each run. `off` None: nothing is dropped anywhere, and there is nothing to search.
    """
    while True:
        result, not_joined = run(off)
        if off is None or not not_joined:
            return result, off
        off = {**off, **not_joined}


# --- Clipping ---


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

    def divisors(self, total: Tensors, step: int) -> tuple[float, dict[str, float]]:
        """(the norm of these gradients, what each is divided by)"""
        norm = norm_of([value for name, value in total.items() if name not in self.uncounted], self.norm_type)
        groups: dict[str, list[Tensor]] = {}
        for name, (group, _) in self.own.items():
            if name in total:
                groups.setdefault(group, []).append(total[name])
        norms = {group: norm_of(values, self.norm_type) for group, values in groups.items()}
        found: dict[str, float] = {}
        for name in total:
            if name in self.unclipped:
                continue
            if self.factors:
                found[name] = self.factors[step].get(name, 1.0) if step < len(self.factors) else 1.0
            else:
                group, most = self.own.get(name, ("", self.max_norm))
                found[name] = max(1.0, ((norms[group] if name in self.own else norm) + 1e-6) / most)
        return norm, found


def divided(total: Tensors, divisors: Mapping[str, float]) -> Tensors:
    """The clipped gradients. Those that no divisor (or 1) is given for are left as they are."""
    return {name: value if divisors.get(name, 1.0) == 1.0 else value / divisors[name] for name, value in total.items()}


def norm_of(values: Sequence[Tensor], norm_type: float) -> float:
    """The norm of all of them together, in double: on a CPU, torch's sum of millions of squares in fp32 is off by 1e-4."""
    norms = [torch.linalg.vector_norm(value, norm_type, dtype=torch.float64) for value in values]
    return float(torch.linalg.vector_norm(torch.stack(norms), norm_type)) if norms else 0.0


# --- One process in plain torch ---


@dataclass
class OneProcess:
    """The reference of `colonnade.verify(engine)`. `loss_of(model, batch)` is the loss of a batch, in either form."""

    model: nn.Module
    loss_of: Callable[[nn.Module, Batch], Any]
    make_optimizer: Callable[[nn.Module], Any]
    limit: Limit | None = None
    dtype: torch.dtype | None = None
    """What the forward pass computes in, where that is not the dtype of the weights (autocast): whose ulp it is."""
    kept_in_eval: Mapping[str, bool] = field(default_factory=dict)
    """The modules that are in evaluation mode while the others train."""
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
        self.begin(start, noise)
        optimizer = self.make_optimizer(self.model)
        room = RAW_BYTES if whole else 0
        for at, passes in enumerate(steps):
            truth = Truth()

            # The passes of the joined batch. Activations are compared in the first step only: later ones start from weights
            # that differ where that one does.
            self.dropping.begin_step(at)
            with watched(self.model, truth.activations) if at == 0 else nullcontext():
                truth.loss, truth.total, truth.passes = self._gradients(passes, noise, room)
            room -= sum(_bytes(one) for one in truth.passes)

            # Each share of the batch alone, at the same weights: by that a diagnosis tells which ranks' data is missing. These
            # passes are extra, so they must leave no trace in running statistics.
            with kept_buffers(self.model):
                for number, share in enumerate(apart[at] if apart and room > 0 else ()):
                    self.dropping.begin_step(at, number)
                    truth.shards.append(self._gradients(share, noise, 0)[1])
                    room -= _bytes(truth.total)

            # Clipping as torch does it, on gradients of the whole model: here no rank, stage or shard can be forgotten.
            if self.limit is not None:
                truth.norm, divisors = self.limit.divisors(truth.total, at)
                truth.clipped = divided(truth.total, divisors)

            # The optimizer's step, on the gradients in the dtype and on the device of the parameters.
            gradients = truth.clipped or truth.total
            for name, parameter in self.model.named_parameters():
                found = gradients.get(name)
                parameter.grad = None if found is None else found.to(parameter.device, parameter.dtype, copy=True)
            optimizer.step()
            for name, parameter in self.model.named_parameters():
                parameter.grad = None
                truth.weights[name] = copied(parameter)
            truth.buffers = {name: copied(buffer) for name, buffer in self.model.named_buffers()}
            yield truth

    def begin(self, start: Mapping[str, Tensor], noise: torch.Generator | None = None) -> None:
        """Take the weights of the run, and the modes of its modules."""
        load(self.model, start, noise, ulp=self.dtype)
        self.model.train()
        set_eval(self.model, self.kept_in_eval)

    def forward_only(self, one: Pass) -> None:
        """A forward pass, as the first of a step."""
        self.dropping.begin_step(0)
        for batch in self._batches(one):
            self._loss(batch)

    def _gradients(self, passes: Sequence[Pass], noise: Any, room: int) -> tuple[float, Tensors, list[Tensors]]:
        """(mean loss, gradients, those of each pass): a loss that has a count is divided once by all of them."""
        each: list[Tensors] = []
        total: Tensors = {}
        loss, counted = 0.0, 0.0
        keep = room >= len(passes) * sum(p.numel() * p.element_size() for p in self.model.parameters())
        for one in passes:
            mine: Tensors = {}
            for batch in self._batches(one):
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

    def _batches(self, one: Pass) -> Iterator[Batch]:
        """The batches of a pass. Where there are several, each is one share of the data, and drops what its ranks drop."""
        for number, batch in enumerate(one.batches):
            if len(one.batches) > 1:
                self.dropping.share = number
            yield batch

    def _loss(self, batch: Batch, noise: Any = None) -> tuple[Any, Any]:
        device = next(self.model.parameters()).device
        batch = tree_map_only(Tensor, lambda leaf: moved_by_an_ulp(leaf, noise, self.dtype).to(device), batch)
        return split_loss(self.loss_of(self.model, batch))


def set_eval(model: nn.Module, kept_in_eval: Mapping[str, bool]) -> None:
    """Put these modules of a model in training into evaluation mode, each by itself."""
    for name, module in model.named_modules():
        if kept_in_eval.get(name):
            module.training = False


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
