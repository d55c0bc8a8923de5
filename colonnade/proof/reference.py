"""The single-process reference: the full model on the global batches. Every parallel run is compared with it.

There are two kinds of reference, which share this file:

- `OneProcess`, for `colonnade.verify(engine)`: plain torch in the process of rank 0. It runs passes, clipping and optimizer
  itself, so that no code of the engine is part of the reference.
- `SingleProcessScript` (scripts.py), for `colonnade verify train.py`: the script is started again with every parallel size
  1, because only its own loop knows its passes, loss and clipping. Its record is read as `Truth`.

Both follow one protocol. The batches of the ranks are joined to global batches (`data_rank_batches`, `join`). The random numbers of the
ranks are repeated; modules whose dropout masks cannot be joined are found and run without dropout (`without_unjoinable_dropout`). A step
divides gradients by the divisors of clipping (`divided`) and is a `Truth`. Runs with weights moved by one ulp give the
tolerance (`spreads_of`). All of it together is a `TrueRun`, which `compare.assemble` combines with the records of the ranks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from colonnade.context.parallel_context import ParallelContext
from colonnade.core import global_context
from colonnade.engine.schedule.loss import split_loss
from colonnade.errors import ParityError, did_you_mean, listed
from colonnade.parallel.placement import local_part
from colonnade.proof.random_numbers import RandomNumbers, ReplayedDraws, Replays
from colonnade.proof.record import (
    ACTIVATION_BYTES,
    INPUTS,
    RAW_BYTES,
    Batch,
    CopiesOfTensors,
    Event,
    RunInfo,
    StateName,
    copied,
    first_tensor,
    recorded,
)
from colonnade.proof.sketch import Blocks, Stored, sketches

Tensors = dict[str, Tensor]
Groups = Sequence[tuple[Mapping[str, Any], Sequence[str]]]
_T = TypeVar("_T")

PERTURBED_RUNS = 2
"""The number of runs with weights moved by one ulp; their distance from the reference gives the tolerance."""


# --- The results of the reference ---


@dataclass
class Truth:
    """One step of the reference. Gradients are full tensors, keyed by the name of the parameter."""

    loss: float = 0.0
    passes: list[Tensors] = field(default_factory=list)
    """The gradients of each backward pass, weighted such that they add up to `total`."""
    total: Tensors = field(default_factory=dict)
    lengths: dict[str, float] = field(default_factory=dict)
    """The norms of those gradients in `total` that are sketches."""
    clipped: Tensors = field(default_factory=dict)
    norm: float | None = None
    weights: Tensors = field(default_factory=dict)
    buffers: Tensors = field(default_factory=dict)
    activations: Tensors = field(default_factory=dict)
    inputs: dict[str, list[Tensor]] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    """The recorded inputs and outputs of modules, in the order of the forward pass."""
    rows: dict[str, int] = field(default_factory=dict)
    """The first module, and the number of rows in all of its calls; empty: unknown."""
    changed: Tensors = field(default_factory=dict)
    """Weights and buffers that changed between the previous step and this one."""
    changed_state: list[StateName] = field(default_factory=list)
    started: Tensors = field(default_factory=dict)
    """Weights and buffers at the end of the previous step."""
    losses: list[float | None] = field(default_factory=list)
    """The loss of each pass; empty: unknown."""
    stepped: Tensors = field(default_factory=dict)
    """The gradients at the end of the optimizer's step, if the step changed them."""
    by_data_rank: list[Tensors] = field(default_factory=list)
    """The gradients of each data rank's batch."""


def sketched_truth(truth: Truth, sketched: Mapping[str, Blocks], norm_type: float) -> Truth:
    """Return a copy of a step with sketches of the tensors that have blocks in `sketched`, and all other tensors on the CPU."""

    def short(tensors: Tensors) -> Tensors:
        return {name: sketches(x, sketched[name]) if name in sketched else x.cpu() for name, x in tensors.items()}

    return replace(
        truth,
        passes=[short(gradients) for gradients in truth.passes],
        total=short(truth.total),
        lengths={name: norm_of([value], norm_type) for name, value in truth.total.items() if name in sketched},
        clipped=short(truth.clipped),
        stepped=short(truth.stepped),
        started=short(truth.started),
        changed=short(truth.changed),
        weights=short(truth.weights),
        buffers=short(truth.buffers),
        by_data_rank=[short(gradients) for gradients in truth.by_data_rank],
    )


@dataclass
class RoundingSpread:
    """The effect of rounding on one step: the distance by which each value changes if the weights change by one ulp."""

    loss: float = 0.0
    tensors: dict[tuple[str, str], float] = field(default_factory=dict)
    """By (field of `Truth`, name): the 2-norm of the distance."""

    def widen(self, truth: Truth, moved: Truth) -> None:
        """Enlarge the distances so that they cover the distance between the reference (`truth`) and another perturbed run
        (`moved`).
        """
        self.loss = max(self.loss, abs(moved.loss - truth.loss))
        for kind in ("total", "clipped", "stepped", "weights", "changed", "buffers", "activations"):
            others: Tensors = getattr(moved, kind)
            for name, value in getattr(truth, kind).items():
                other = others.get(name)
                if other is not None and other.shape == value.shape and value.is_floating_point():
                    apart = float((other.double() - value.double()).norm())
                    self.tensors[kind, name] = max(self.tensors.get((kind, name), 0.0), apart)


def spreads_of(truth: Sequence[Truth], moved: Iterable[Iterable[Truth]]) -> list[RoundingSpread]:
    """Return the effect of rounding on each step: the largest distance of a perturbed run (`moved`) from the reference."""
    spreads = [RoundingSpread() for _ in truth]
    for run in moved:
        for spread, plain, other in zip(spreads, truth, run, strict=True):
            spread.widen(plain, other)
    return spreads


@dataclass(frozen=True)
class TrueRun:
    """All results of the reference: its steps, and the effect of rounding on each."""

    steps: Sequence[Truth]
    spreads: Sequence[RoundingSpread]
    """The effect of rounding on each step."""
    start: Mapping[str, Tensor]
    """The initial weights and buffers."""
    names: Mapping[str, str]
    """The name in the reference of each name that a tensor has on a rank."""
    terms: int
    """A bound on the number of terms that an element of a gradient sums."""
    notes: Sequence[str] = ()
    replays: Replays = field(default_factory=Replays)
    """The outcome of repeating the ranks' random numbers."""
    host: Mapping[str, list[int]] = field(default_factory=dict)
    """For each module that draws from Python's or NumPy's generator: a checksum of their states after each draw."""
    state: Mapping[StateName, Tensor] | None = None
    """The optimizer's state before the first step; None: the reference is not the script, and starts without state."""


# --- The inputs of the reference: global batches ---


@dataclass(frozen=True)
class Pass:
    """The input of one pass of the reference: the global batch, or several batches that cannot be joined.

    `weight` is the weight of the pass in the mean over the step.
    """

    batches: list[Batch]
    weight: float = 1.0


def data_rank_batches(values: Sequence[Any], runs: Sequence[RunInfo]) -> list[Any]:
    """Return the batch of each data rank.

    `values` and `runs` are by rank; of ranks that see the same data, one counts.

    Slices of sequences are concatenated, because the full model computes on full sequences.
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
                    f"the batches of the ranks on the axis {axis.name!r} cannot be joined along dimension {axis.dim}"
                )
    return [table[key] for key in sorted(table)]


def join(parts: Sequence[Any], micro_batches: int = 1) -> Any:
    """Concatenate the batches of the data ranks along dimension 0; returns None if their shapes do not match.

    A schedule splits the global batch into micro-batches again. Rows are therefore ordered by micro-batch first: each
    micro-batch has the rows of the same micro-batch of all ranks.
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
    """Return whether all nested structures have the same form and equal tensors."""
    first, spec = tree_flatten(parts[0])
    for part in parts[1:]:
        leaves, other = tree_flatten(part)
        if other != spec:
            return False
        for a, b in zip(first, leaves, strict=True):
            if isinstance(a, Tensor) and not (a.shape == b.shape and torch.equal(a, b)):
                return False
    return True


def joined_steps(
    given: Sequence[Any], accumulation: int, runs: Sequence[RunInfo]
) -> tuple[list[list[Pass]], list[list[list[Pass]]]]:
    """Return, for each step, the passes on the global batches, and the passes on the batches of each data rank.

    `given`: by rank, step, pass and micro-batch: (batch, its weight in the mean over the batch).
    """
    steps: list[list[Pass]] = []
    apart: list[list[list[Pass]]] = []
    for at in range(len(given[0])):
        passes: list[Pass] = []
        by_rank: list[list[Pass]] = []
        for number in range(len(given[0][at])):
            for micro in range(len(given[0][at][number])):
                weight = given[0][at][number][micro][1] / accumulation
                parts = data_rank_batches([rank[at][number][micro][0] for rank in given], runs)
                # Batches of different shapes cannot be joined, but they can run one after another with equal weights.
                whole = join(parts)
                passes.append(Pass(parts if whole is None else [whole], weight))
                by_rank = by_rank or [[] for _ in parts]
                for own_passes, part in zip(by_rank, parts, strict=True):
                    own_passes.append(Pass([part], weight))
        steps.append(passes)
        apart.append(by_rank if len(by_rank) > 1 else [])
    return steps, apart


# --- Dropout ---


def without_unjoinable_dropout(
    run: Callable[[Mapping[str, str] | None], tuple[_T, Mapping[str, str]]], off: Mapping[str, str] | None
) -> tuple[_T, Mapping[str, str] | None]:
    """Run repeatedly, until the reference drops the same elements as the ranks.

    If the masks of a module cannot be joined, everything after this module differs. Each run therefore finds only the
    first such modules.

    Args:
        run: `run(off)` runs the ranks and the reference without dropout in the modules `off` (with reasons). It returns a
            result, and the modules whose masks cannot be joined.
        off: The modules without dropout at first; None: dropout is off everywhere, so one run is enough.

    Returns:
        The result of the last run, and the modules without dropout.
    """
    while True:
        result, not_joined = run(off)
        if off is None or not not_joined:
            return result, off
        off = {**off, **not_joined}


# --- Clipping ---


@dataclass(frozen=True)
class Limit:
    """The clipping of the reference, by the same rule as `torch.nn.utils.clip_grad_norm_`.

    `own` has the parameters whose norm group has its own limit, `uncounted` those that are not in the norm, and
    `unclipped` those that are not divided.
    """

    max_norm: float = inf
    norm_type: float = 2.0
    own: Mapping[str, tuple[str, float]] = field(default_factory=dict)
    """By parameter: (norm group, limit)."""
    uncounted: frozenset[str] = frozenset()
    unclipped: frozenset[str] = frozenset()
    factors: Sequence[Mapping[str, float]] = ()
    """By step and parameter: the recorded divisors of the run, for clip methods other than "norm"."""

    def divisors(self, total: Tensors, step: int) -> tuple[float, dict[str, float]]:
        """Return (the norm of all gradients, the divisor of each gradient) of a step."""
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
    """Divide gradients by their divisors; gradients without a divisor stay unchanged."""
    return {name: value if divisors.get(name, 1.0) == 1.0 else value / divisors[name] for name, value in total.items()}


def norm_of(values: Sequence[Tensor], norm_type: float, known: Sequence[float] = ()) -> float:
    """Return the norm of all tensors together, computed in fp64. `known` are the norms of further tensors.

    On a CPU, torch's sum of millions of squares in fp32 has a relative error of 1e-4.
    """
    norms = [torch.linalg.vector_norm(value, norm_type, dtype=torch.float64).cpu() for value in values]
    norms += [torch.tensor(norm, dtype=torch.float64) for norm in known]
    return float(torch.linalg.vector_norm(torch.stack(norms), norm_type)) if norms else 0.0


# --- One process in plain torch ---


@dataclass
class OneProcess:
    """The reference of `colonnade.verify(engine)`.

    `loss_of(model, batch)` returns the loss: a mean, or (sum, count).
    """

    model: nn.Module
    loss_of: Callable[[nn.Module, Batch], Any]
    make_optimizer: Callable[[nn.Module], Any]
    limit: Limit | None = None
    dtype: torch.dtype | None = None
    """The dtype of the forward pass, if it is not that of the weights (autocast). An ulp is one of this dtype."""
    kept_in_eval: Mapping[str, bool] = field(default_factory=dict)
    """The modules that stay in evaluation mode."""
    dropping: RandomNumbers = field(default_factory=RandomNumbers)

    def run(
        self,
        start: Mapping[str, Tensor],
        steps: Sequence[Sequence[Pass]],
        apart: Sequence[Sequence[Sequence[Pass]]] = (),
        noise: torch.Generator | None = None,
        whole: bool = True,
    ) -> Iterator[Truth]:
        """Train, and yield each finished step.

        Args:
            start: The initial weights and buffers.
            steps: The passes of each step.
            apart: For each step, the passes on the batches of each data rank.
            noise: Moves weights and inputs by one ulp.
            whole: Also record the gradients of single passes.
        """
        self.begin(start, noise)
        if isinstance(self.dropping, ReplayedDraws):
            self.dropping.redraws = 0 if noise is None else noise.initial_seed() + 1
        optimizer = self.make_optimizer(self.model)
        room, before = RAW_BYTES if whole else 0, dict(start)
        for at, passes in enumerate(steps):
            truth = Truth(started=before)

            # The passes of the joined batch. Activations are compared in the first step only: later ones start from weights
            # that differ where that one does.
            self.dropping.begin_step(at)
            with watched(self.model, truth) if at == 0 else nullcontext():
                truth.loss, truth.total, truth.passes = self._gradients(passes, noise, room)
            room -= sum(_bytes(gradients) for gradients in truth.passes)

            # The batch of each data rank on its own, at the same weights: from its gradients a diagnosis finds out which ranks'
            # data is missing. These passes are extra, so they must not change running statistics.
            with kept_buffers(self.model), self.dropping.kept_host():
                for number, own_passes in enumerate(apart[at] if apart and room > 0 else ()):
                    self.dropping.begin_step(at, number)
                    truth.by_data_rank.append(self._gradients(own_passes, noise, 0)[1])
                    room -= _bytes(truth.total)

            # Clipping like in torch, on the gradients of the full model: no rank, stage or shard can be left out here.
            if self.limit is not None:
                truth.norm, divisors = self.limit.divisors(truth.total, at)
                truth.clipped = divided(truth.total, divisors)

            # The step of the optimizer, with gradients in the dtype and on the device of the parameters.
            gradients = truth.clipped or truth.total
            for name, parameter in self.model.named_parameters():
                found = gradients.get(name)
                parameter.grad = None if found is None else found.to(parameter.device, parameter.dtype, copy=True)
            optimizer.step()
            for name, parameter in self.model.named_parameters():
                parameter.grad = None
                truth.weights[name] = recorded(parameter)
            truth.buffers = {name: copied(buffer) for name, buffer in self.model.named_buffers()}
            before = {**truth.weights, **truth.buffers}
            yield truth

    def begin(self, start: Mapping[str, Tensor], noise: torch.Generator | None = None) -> None:
        """Load the initial weights, and set training or evaluation mode of each module."""
        load(self.model, start, noise, ulp=self.dtype)
        self.model.train()
        set_eval(self.model, self.kept_in_eval)

    def forward_only(self, item: Pass) -> None:
        """Run the first forward pass of a step, without backward."""
        self.dropping.begin_step(0)
        for batch in self._batches(item):
            self._loss(batch)

    def _gradients(self, passes: Sequence[Pass], noise: Any, room: int) -> tuple[float, Tensors, list[Tensors]]:
        """(mean loss, gradients, gradients of each pass). Losses with counts are divided once, by the sum of all counts."""
        by_pass: list[Tensors] = []
        total: Tensors = {}
        loss, counted = 0.0, 0.0
        keep = room >= len(passes) * sum(p.numel() * p.element_size() for p in self.model.parameters())
        for item in passes:
            gradients: Tensors = {}
            for batch in self._batches(item):
                value, count = self._loss(batch, noise)
                weight = item.weight / len(item.batches) if count is None else 1.0
                loss += float(value.detach()) * weight
                counted += float(count or 0.0)
                (value * weight).backward()
                _take(self.model, gradients)
            for name, value in gradients.items():
                # Kept terms must not change with the total, so the total is a tensor of its own.
                if name not in total:
                    total[name] = value.clone() if keep else value
                else:
                    value = value.to(total[name].device)
                    total[name] = total[name] + value if keep else total[name].add_(value)
            if keep:
                by_pass.append(gradients)
        if counted:
            for some in (total, *by_pass):
                for gradient in some.values():
                    gradient.div_(counted)
        return loss / (counted or 1.0), total, by_pass

    def _batches(self, item: Pass) -> Iterator[Batch]:
        """The batches of a pass. If there are several, each is that of one data rank, with that rank's dropout masks."""
        for number, batch in enumerate(item.batches):
            if len(item.batches) > 1:
                self.dropping.data_rank = number
            yield batch

    def _loss(self, batch: Batch, noise: Any = None) -> tuple[Any, Any]:
        device = next(self.model.parameters()).device
        batch = tree_map_only(Tensor, lambda leaf: moved_by_an_ulp(leaf, noise, self.dtype).to(device), batch)
        return split_loss(self.loss_of(self.model, batch))


def set_eval(model: nn.Module, kept_in_eval: Mapping[str, bool]) -> None:
    """Put some modules into evaluation mode, but not the modules inside them."""
    for name, module in model.named_modules():
        if kept_in_eval.get(name):
            module.training = False


def load(
    model: nn.Module,
    start: Mapping[str, Tensor | Stored],
    noise: torch.Generator | None = None,
    in_place: bool = False,
    rename: Callable[[str], str] = lambda name: name,
    ulp: torch.dtype | None = None,
) -> None:
    """Load weights and buffers by name.

    With `in_place`, tensors keep their dtype; otherwise they take the dtype of the loaded tensors.
    """
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if rename(name) in start:
                given = start[rename(name)]
                value = moved_by_an_ulp(given.tensor() if isinstance(given, Stored) else given, noise, ulp)
                if tensor.is_complex() and not value.is_complex():
                    value = torch.view_as_complex(value.contiguous())
                if in_place:
                    local_part(tensor).copy_(value)
                else:
                    tensor.data = value.to(tensor.device, copy=True)


def canonical_names(model: nn.Module, rename: Callable[[str], str] = lambda name: name) -> dict[str, str]:
    """Map every name of each parameter and buffer to its first name."""
    first: dict[int, str] = {}
    found: dict[str, str] = {}
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, tensor in named:
        found[rename(name)] = first.setdefault(id(tensor), rename(name))
    return found


def check_names(model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise if the reference is not the model of the run, with the same parameter names and shapes."""
    own = {name: tuple(p.shape) for name, p in model.named_parameters()}
    missing = [name for name in own if name not in shapes]
    extra = [name for name in shapes if name not in own]
    if missing or extra:
        reasons = [
            *([f"no rank has {listed(missing[:5])}"] if missing else []),
            *([f"the reference has no {listed(extra[:5])}"] if extra else []),
        ]
        hint = did_you_mean(extra[0], own) if extra else ""
        raise ParityError(
            f"the reference is not the full model of this run: {', and '.join(reasons)}.{hint} Pass reference=, a "
            "function that builds the unsharded model. Its parameters must have the names of the parallel model.",
            code="C100",
        )
    for name, shape in own.items():
        if shape != shapes[name]:
            raise ParityError(
                f"the reference has {name} of shape {shape}, but the full shape on the ranks is {shapes[name]}. "
                "Build the reference with the sizes of the full model.",
                code="C100",
            )


def same_optimizer(like: Any, groups: Groups, model: nn.Module) -> Any:
    """Make an optimizer for the reference, with the class and options of `like` and with parameter groups by name."""
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
    # A class whose constructor needs other arguments is copied without calling it. A scheduler may have replaced `step` of the
    # original, which must not step for the copy.
    twin = object.__new__(kind)
    vars(twin).update({key: value for key, value in vars(like).items() if key != "step"})
    twin.param_groups, twin.state = made, type(like.state)(dict)
    return twin


@contextmanager
def world_of_one(context: ParallelContext) -> Iterator[None]:
    """Turn the context (and the global one) into a world of one rank with the same config in the block.

    Layers that are built there are unsharded.
    """
    contexts = {id(some): some for some in (context, global_context)}.values()
    saved = [(some, dict(vars(some))) for some in contexts]
    try:
        for some, before in saved:
            vars(some).update(vars(ParallelContext()))
            some.config, some.device = before["config"], before["device"]
        yield
    finally:
        for some, before in saved:
            vars(some).clear()
            vars(some).update(before)


@contextmanager
def watched(model: nn.Module, truth: Truth) -> Iterator[None]:
    """Record the inputs and outputs of the first call of each module in the block."""
    room, into, copies = [ACTIVATION_BYTES * 4], truth.activations, CopiesOfTensors(ACTIVATION_BYTES * 4)

    def look_before(name: str, arguments: Any) -> None:
        tensors = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]
        if tensors and tensors[0].dim() and (not truth.rows or name in truth.rows):
            truth.rows[name] = truth.rows.get(name, 0) + len(tensors[0])
        if tensors and name not in truth.inputs:
            some = [copies.of(leaf) for leaf in tensors[:INPUTS]]
            known = [value for value in some if value is not None]
            truth.inputs[name] = known if len(known) == len(some) else []
            truth.events.append(("in", name))

    def look(name: str, output: Any) -> None:
        value = first_tensor(output)
        if value is not None and name not in into and (size := value.numel() * value.element_size()) <= room[0]:
            room[0] -= size
            into[name] = copied(value)
            copies.add(value, into[name])
            truth.events.append(("out", name))

    hooks: list[Any] = []
    for name, module in model.named_modules():
        hooks.append(module.register_forward_hook(lambda module, args, output, name=name: look(name, output)))
        before = module.register_forward_pre_hook(
            lambda module, args, kwargs, name=name: look_before(name, (args, kwargs)), with_kwargs=True
        )
        hooks.append(before)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def kept_buffers(model: nn.Module) -> Iterator[None]:
    """Restore the buffers of the model after the block."""
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]
    yield
    for buffer, value in before:
        buffer.copy_(value)


def moved_by_an_ulp(tensor: Tensor, noise: torch.Generator | None, dtype: torch.dtype | None = None) -> Tensor:
    """Move each element up or down at random by one ulp of its dtype, or of `dtype` if that is coarser."""
    if noise is None or not tensor.is_floating_point():
        return tensor
    eps = max(torch.finfo(some).eps for some in (tensor.dtype, dtype or tensor.dtype))
    tensor = tensor.to(noise.device)
    with _disable_current_modes():  # these random numbers are not the model's
        up = torch.randint(0, 2, tensor.shape, generator=noise, dtype=torch.int8, device=noise.device)
    return torch.where(up == 1, tensor + tensor * eps, tensor - tensor * eps)


def _take(model: nn.Module, into: Tensors) -> None:
    """Move the gradients out of the model, and add them to the gradients in `into`."""
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradient = parameter.grad.detach()
            gradient = recorded(gradient.to_dense() if gradient.is_sparse else gradient, copy=False)
            into[name] = into[name] + gradient.to(into[name].device) if name in into else gradient
            parameter.grad = None


def _bytes(tensors: Tensors) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
