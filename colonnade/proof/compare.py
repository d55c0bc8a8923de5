"""From records to a report: evidence, tolerance, rows and the table. What differs is a row here; why is for diagnose.py.

In the order in which data goes through this file:

1. `assemble` puts what the ranks noted (`Record`) beside what one process gave (`TrueRun`): the `Evidence`, plain data
   that needs no process group.
2. `Tolerance` says how far a run may be from one process by rounding alone.
3. `compare` makes a `Row` of each compared thing, in the order in which a step makes these things.
4. `Report` is what a user gets: rows, findings, notes.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import inf, isfinite, nan, sqrt
from statistics import median
from typing import Any

import torch
from torch import Tensor

from colonnade.errors import listed
from colonnade.proof.dropout_masks import Dropped
from colonnade.proof.record import Loss, Piece, Record, RecordedStep
from colonnade.proof.reference import RoundingSpread, TrueRun, Truth, norm_of

# --- Evidence: what the ranks did and what one process did, side by side ---


@dataclass(frozen=True)
class HeldPart:
    """What one rank holds of a whole tensor. `positions` are the places of its elements in the flat whole; None: all, in order."""

    rank: int
    value: Tensor
    positions: Tensor | None = None


@dataclass(frozen=True)
class Compared:
    """One tensor (or number) of the reference, and what the ranks hold of it.

    `spread` is how far the reference moves (2-norm) when its weights are changed by one ulp: the noise that rounding alone makes.
    `terms` is how many terms each element sums, at most.
    """

    truth: Tensor
    found: Sequence[HeldPart]
    spread: float = 0.0
    terms: int = 1


@dataclass(frozen=True)
class GradientEvidence:
    """A parameter's gradient in one step: after all handlers, and what it was made of."""

    total: Compared
    """After the handlers, before clipping."""
    raw: Sequence[Sequence[HeldPart]] = ()
    """For each pass (micro-batch) of the step: what each rank's backward gave, before anything was reduced."""
    truth_of_passes: Sequence[Tensor] = ()
    """For each pass: the reference's gradient of that pass, weighted as in the total, so that these add up to it."""
    truth_of_shards: Sequence[Tensor] = ()
    """For each share of the batch that ranks see apart: the reference's gradient of the mean over that share alone."""
    clipped: Compared | None = None


@dataclass(frozen=True)
class StepEvidence:
    """One step of both runs. Numbers of the ranks are by rank; None: that rank has none (an earlier pipeline stage, say)."""

    loss: float
    found_loss: Sequence[float | None]
    gradients: Mapping[str, GradientEvidence]
    weights: Mapping[str, Compared]
    buffers: Mapping[str, Compared] = field(default_factory=dict)
    activations: Mapping[str, Compared] = field(default_factory=dict)
    """By name of the module, in the order of the reference's forward pass."""
    recomputed: Mapping[str, Compared] = field(default_factory=dict)
    """What modules gave that ran again during the backward pass: it must be what they gave the first time."""
    norm: float | None = None
    found_norm: Sequence[float | None] = ()
    norms: Mapping[str, float] = field(default_factory=dict)
    """By group, layer or parameter, as `engine.grad_norms()` names them."""
    found_norms: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    loss_spread: float = 0.0


@dataclass(frozen=True)
class ParameterInfo:
    """What the run says of a parameter: its placement, and the ledger's lines for it."""

    placement: str = "replicated"
    ledger: Sequence[str] = ()
    owed: Sequence[tuple[str, tuple[int, ...], float]] = ()
    """(mode, ranks, divisor) of each sum that its gradient owes, on the first rank that holds it."""
    tied: Sequence[str] = ()
    """The other names of the same weight."""


@dataclass(frozen=True)
class Evidence:
    """The whole comparison. `groups` are the groups of every mode with more than one rank in a group."""

    world_size: int
    groups: Mapping[str, Sequence[Sequence[int]]]
    distinct_data: Sequence[str]
    """The modes whose ranks see distinct data."""
    parameters: Mapping[str, ParameterInfo]
    weights_at_start: Mapping[str, Compared]
    steps: Sequence[StepEvidence]
    dtype: str = "float64"
    accumulation: int = 1
    max_norm: float | None = None
    norm_type: float = 2.0
    notes: Sequence[str] = ()
    """What was changed for the comparison: dropout set to 0, say."""
    eval_apart: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """By module that trains on some ranks only: the ranks on which it is in evaluation mode."""
    cut_apart: Sequence[str] = ()
    """The modes of which each rank took its part of a batch of its own, where all should cut the same one."""
    masks_apart: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Of each module that drops: the ranks that drop other elements of what they hold alike."""


# --- Assembling it ---


Names = Mapping[str, str]
"""Each name that a tensor has, to the one that the reference calls it by."""


def whole_tensors(records: Sequence[Record], names: Names) -> dict[str, Tensor]:
    """The weights and buffers that the ranks started with, put together; of copies, the first rank's."""
    found: dict[str, Tensor] = {}
    for record in reversed(records):
        for name, value in record.start.items():
            note, key = record.tensors[name], names.get(name, name)
            if note.positions is None:
                found[key] = value
                continue
            if key not in found:
                found[key] = torch.zeros(note.shape, dtype=value.dtype)
            found[key].view(-1)[note.positions.flatten()] = value.reshape(-1)
    return found


def whole_shapes(records: Sequence[Record], names: Names) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter of the run, by its name in the reference."""
    return {
        names.get(name, name): note.shape
        for record in records
        for name, note in record.tensors.items()
        if note.is_parameter
    }


def assemble(records: Sequence[Record], truth: TrueRun) -> Evidence:
    """The evidence: the notes of all ranks beside what one process gave."""
    run, side_by_side = records[0].run, _SideBySide(records, truth.names, truth.terms)
    notes = [
        *(note for record in records for note in record.notes),
        *truth.notes,
        *_not_stepped(records, truth.names),
        *_not_cut(records),
    ]
    return Evidence(
        world_size=len(records),
        groups=run.groups,
        distinct_data=run.distinct_data,
        parameters=_parameters(records, truth.names),
        weights_at_start={
            name: Compared(truth.start[name], side_by_side.held(name, lambda record: record.start))
            for name in side_by_side.names(truth.start)
        },
        steps=[
            side_by_side.step(at, one, spread)
            for at, (one, spread) in enumerate(zip(truth.steps, truth.spreads, strict=True))
            if all(at < len(record.steps) for record in records)
        ],
        dtype=run.dtype,
        accumulation=run.accumulation,
        max_norm=run.max_norm,
        norm_type=run.norm_type,
        notes=list(dict.fromkeys(notes)),
        masks_apart=truth.masks_apart,
        eval_apart=_eval_apart(records),
        cut_apart=side_by_side.cut_apart(truth.steps[0].activations) if truth.steps else (),
    )


def _not_stepped(records: Sequence[Record], names: Names) -> list[str]:
    """A warning of parameters that get a gradient, which is compared like any other, and that no optimizer steps on."""
    stepped = {names.get(name, name) for record in records for _, group in record.groups for name in group}
    trained = dict.fromkeys(
        names.get(name, name)
        for record in records
        for name, note in record.tensors.items()
        if note.is_parameter and note.trained
    )
    left = [name for name in trained if name not in stepped]
    if not left or not stepped:
        return []
    more = f" and {len(left) - 5} more" if len(left) > 5 else ""
    return [
        f"warning: no group of the optimizer has {listed(left[:5])}{more}: the gradient is compared, and nobody steps on it. "
        f"If that is meant, freeze it: requires_grad_(False)"
    ]


def _not_cut(records: Sequence[Record]) -> list[str]:
    """A warning of pipeline stages that all hold the same parameters, none of them tied: each rank has the whole model."""
    stages: dict[int, set[str]] = {}
    for record in records:
        stage = record.run.coordinates.get("pipeline", 0)
        untied = {name for name, note in record.tensors.items() if note.is_parameter and "Tied(" not in note.placement}
        stages.setdefault(stage, set()).update(untied)
    (first, *others) = stages.values()
    if not others or not first or any(other != first for other in others):
        return []
    shown = sorted(first)
    return [
        f"warning: all {len(stages)} pipeline stages hold {listed(shown[:3])}{', ...' if len(shown) > 3 else ''}: if each rank "
        f"has built the whole model, a step runs {len(stages)} models one after another. Cut it before initialize(): "
        f"model = colonnade.split(model, num_stages={len(stages)})"
    ]


def _eval_apart(records: Sequence[Record]) -> dict[str, tuple[int, ...]]:
    """The modules that train on some ranks only, with the ranks on which they are in evaluation mode."""
    rests: dict[str, dict[bool, list[int]]] = {}
    for record in records:
        for name, value in record.ran_in_eval.items():
            rests.setdefault(name, {}).setdefault(value, []).append(record.rank)
    return {name: tuple(ranks[True]) for name, ranks in rests.items() if len(ranks) > 1}


def dropped_by(records: Sequence[Record], off: Collection[str]) -> Dropped:
    """What the ranks dropped. Ranks see the same share of the data that differ in no axis by which batches are cut."""
    shares: dict[Any, list[int]] = {}
    for record in records:
        at = record.run.coordinates
        cut = tuple(at[axis.name] for axis in record.run.axes or () if axis.distinct and not axis.may_repeat)
        shares.setdefault(cut, []).append(record.rank)
    steps = [
        {record.rank: record.steps[at].masks for record in records}
        for at in range(min(len(record.steps) for record in records))
    ]
    nowhere = {*off, *(name for record in records for name in record.run.zeroed)}
    return Dropped(steps, records[0].run.groups, [shares[key] for key in sorted(shares)], nowhere)


class _SideBySide:
    """Finds what the ranks hold of each tensor of the reference, by its name there."""

    def __init__(self, records: Sequence[Record], names: Names, terms: int) -> None:
        self.records, self.terms = records, terms
        self.local: list[dict[str, str]] = [
            {names.get(name, name): name for name in reversed(list(record.tensors))} for record in records
        ]
        self.axes = records[0].run.axes or ()

    def names(self, known: Iterable[str]) -> list[str]:
        return [name for name in known if any(name in local for local in self.local)]

    def held(self, name: str, read: Any) -> list[HeldPart]:
        """What each rank has of a weight or buffer."""
        found = []
        for record, local in zip(self.records, self.local, strict=True):
            mine = local.get(name)
            if mine is not None and mine in (tensors := read(record)):
                found.append(HeldPart(record.rank, tensors[mine], record.tensors[mine].positions))
        return found

    def step(self, at: int, truth: Truth, spread: RoundingSpread) -> StepEvidence:
        steps = [record.steps[at] for record in self.records]
        return StepEvidence(
            loss=truth.loss,
            found_loss=self._losses(steps),
            gradients={
                name: found
                for name in truth.weights
                if (found := self._gradient(name, at, truth, spread)).total.found or name in truth.total
            },
            weights={
                name: self._compared(
                    value, self.held(name, lambda record: record.steps[at].weights), spread, "weights", name
                )
                for name, value in truth.weights.items()
            },
            buffers={
                name: self._compared(
                    value, self.held(name, lambda record: record.steps[at].buffers), spread, "buffers", name
                )
                for name, value in truth.buffers.items()
                if name in self.names(truth.buffers)
            },
            activations=self._activations([step.activations for step in steps], truth, spread),
            recomputed=self._activations([step.recomputed for step in steps], truth, spread),
            norm=truth.norm,
            found_norm=[step.norm for step in steps] if any(step.norm is not None for step in steps) else (),
            norms=self._norms(truth, steps),
            found_norms={key: [step.norms.get(key) for step in steps] for step in steps[:1] for key in step.norms},
            loss_spread=spread.loss,
        )

    def _compared(self, truth: Tensor, found: list[HeldPart], spread: RoundingSpread, kind: str, name: str) -> Compared:
        return Compared(truth, found, spread.tensors.get((kind, name), 0.0), self.terms)

    def _gradient(self, name: str, at: int, truth: Truth, spread: RoundingSpread) -> GradientEvidence:
        zeros = torch.zeros_like(truth.weights[name])
        total, clipped = (self._pieces(name, at, kind) for kind in ("total", "clipped"))
        whole = self._compared(truth.total.get(name, zeros), total, spread, "total", name)
        return GradientEvidence(
            total=whole,
            raw=self._raw(name, at),
            truth_of_passes=[one.get(name, zeros) for one in truth.passes],
            truth_of_shards=[one.get(name, zeros) for one in truth.shards],
            clipped=self._compared(truth.clipped.get(name, zeros), clipped, spread, "clipped", name)
            if truth.clipped and clipped
            else None,
        )

    def _pieces(self, name: str, at: int, kind: str) -> list[HeldPart]:
        found = []
        for record, local in zip(self.records, self.local, strict=True):
            mine, step = local.get(name, ""), record.steps[at]
            pieces: Sequence[Piece] = getattr(step, kind).get(mine, ())
            divisor = 1.0
            if kind == "clipped" and not pieces and step.norm is not None:
                pieces, divisor = step.total.get(mine, ()), step.divisors.get(mine, 1.0)
            for piece in pieces:
                value = piece.value if divisor == 1.0 else piece.value / divisor
                found.append(HeldPart(record.rank, value, piece.positions))
        return found

    def _raw(self, name: str, at: int) -> list[list[HeldPart]]:
        passes: dict[int, list[HeldPart]] = {}
        for record, local in zip(self.records, self.local, strict=True):
            mine = local.get(name, "")
            for number, value in record.steps[at].raw.get(mine, {}).items():
                passes.setdefault(number, []).append(HeldPart(record.rank, value, record.tensors[mine].positions))
        return [passes[number] for number in sorted(passes)]

    def _losses(self, steps: Sequence[RecordedStep]) -> list[float | None]:
        """By rank: the mean loss over the ranks that see other data and are like it in everything else."""
        mine = [mean_of(step.losses) for step in steps]
        found: list[float | None] = []
        for rank in range(len(steps)):
            alike = [each for other, each in enumerate(mine) if self._same_but_data(rank, other)]
            known = [each for each in alike if each is not None]
            found.append((mean_of(known) or (None, None))[0] if len(known) == len(alike) else None)
        return found

    def _same_but_data(self, rank: int, other: int) -> bool:
        here, there = (self.records[each].run.coordinates for each in (rank, other))
        return all(here[axis.name] == there[axis.name] for axis in self.axes if not axis.distinct)

    def _norms(self, truth: Truth, steps: Sequence[RecordedStep]) -> dict[str, float]:
        """The norm of each slot, from the gradients of the reference."""
        if truth.norm is None:
            return {}
        slots: dict[str, list[Tensor]] = {}
        for name, gradient in truth.total.items():
            for record, local in zip(self.records, self.local, strict=True):
                slot = record.tensors[local[name]].slot if name in local else None
                if slot is not None:
                    slots.setdefault(slot, []).append(gradient)
                    break
        kind = self.records[0].run.norm_type
        return {slot: norm_of(gradients, kind) for slot, gradients in slots.items() if slot in steps[0].norms}

    def _activations(
        self, seen: Sequence[Mapping[str, Tensor]], truth: Truth, spread: RoundingSpread
    ) -> dict[str, Compared]:
        """Where a rank's output is whole, or its rows of the joined batch; parts cut in other ways are left out."""
        found = {}
        staged = any(local.keys() != self.local[0].keys() for local in self.local)
        for name, value in truth.activations.items():
            if not name and staged:
                continue  # a stage is not the model
            parts = []
            for record, outputs in zip(self.records, seen, strict=True):
                mine = outputs.get(name)
                if mine is not None:
                    parts.append(self._rows_of(record, mine, value))
            known = [part for part in parts if part is not None]
            if len(known) == len(parts) and _cover(known, value):  # else some did not run it, or cut it in another way
                compared = self._compared(value, known, spread, "activations", name)
                if not (_differs(compared) and _in_another_order(known, value)):
                    found[name] = compared
        return found

    def cut_apart(self, truth: Mapping[str, Tensor]) -> list[str]:
        """The axes along which all that ranks hold is shorter by their size once more than a part of the joined batch."""
        found = []
        for axis in self.axes:
            lengths = [
                (mine.shape[axis.dim], truth[name].shape[axis.dim])
                for record in self.records
                for name, mine in record.steps[0].activations.items()
                if name in truth and mine.dim() == truth[name].dim() > axis.dim
            ]
            cut = axis.may_repeat and axis.distinct and axis.size > 1 and axis.dim > 0 and lengths
            if cut and all(mine * axis.size**2 == whole for mine, whole in lengths):
                found.append(axis.name.upper())
        return found

    def _rows_of(self, record: Record, mine: Tensor, truth: Tensor) -> HeldPart | None:
        """Its rows of the batch, and its tokens of the sequences; None: cut in another way."""
        if mine.shape == truth.shape:
            return HeldPart(record.rank, mine)
        axes = [axis for axis in self.axes if axis.distinct and axis.size > 1]
        for chosen in ([axis for axis in axes if not axis.may_repeat], axes):
            places = torch.arange(truth.numel()).view(truth.shape)
            for axis in chosen:
                if places.dim() <= axis.dim or places.shape[axis.dim] % axis.size:
                    break
                places = places.chunk(axis.size, axis.dim)[record.run.coordinates[axis.name]]
            if places.shape == mine.shape:
                return HeldPart(record.rank, mine, places)
        return None


def _in_another_order(parts: Sequence[HeldPart], whole: Tensor) -> bool:
    """Whether the parts have the tokens of the whole at other places: sequences need not be cut into blocks."""
    if whole.dim() < 3 or any(part.positions is None for part in parts):
        return False
    mine = torch.cat([part.value.double().norm(dim=-1).flatten() for part in parts]).sort().values
    theirs = whole.double().norm(dim=-1).flatten().sort().values
    return len(mine) == len(theirs) and bool((mine - theirs).norm() <= 1e-6 * theirs.norm())


def _differs(compared: Compared) -> bool:
    return any(distance(part, compared.truth) > 1e-3 * length(compared.truth) for part in compared.found)


def _cover(parts: Sequence[HeldPart], whole: Tensor) -> bool:
    """Whether the parts together have all elements."""
    if any(part.positions is None for part in parts):
        return True
    seen = torch.zeros(whole.numel(), dtype=torch.bool)
    for part in parts:
        if part.positions is not None:
            seen[part.positions.reshape(-1)] = True
    return bool(parts) and bool(seen.all())


def mean_of(losses: Sequence[Loss | None]) -> Loss | None:
    """The mean of losses: weighed by their counts where all have one, else of plain means."""
    known = [loss for loss in losses if loss is not None]
    if not known or len(known) < len(losses):
        return None
    counts = [count for _, count in known if count is not None]
    total = sum(counts, 0.0)
    if len(counts) == len(known):
        summed = sum(mean * count for mean, count in zip((mean for mean, _ in known), counts, strict=True))
        return summed / (total or 1.0), total
    return sum(mean for mean, _ in known) / len(known), None


def _parameters(records: Sequence[Record], names: Names) -> dict[str, ParameterInfo]:
    found: dict[str, ParameterInfo] = {}
    tied: dict[str, set[str]] = {}
    for record in records:
        for name, note in record.tensors.items():
            if note.is_parameter:
                key = names.get(name, name)
                tied.setdefault(key, set()).update(note.names)
                found.setdefault(key, ParameterInfo(note.placement, note.ledger, note.owed))
    return {key: replace(info, tied=sorted(tied[key] - {key})) for key, info in found.items()}


# --- Tolerance ---
#
# How far a parallel run may be from one process by rounding alone. Derived, never guessed for a model.
#
#     tolerance = 8 * (spread + |truth| * (u * sqrt(additions) + v * sqrt(terms)))
#
# in the 2-norm of the whole tensor, where
#
# - `spread` is how far the reference itself moves when its weights are changed by one ulp with random signs: what the
#   model makes of rounding errors, layer by layer. A healthy parallel run adds its terms in another order, which is a
#   change of that size and no larger. A tensor's own spread comes from two or three runs only, so a lucky small one is
#   raised to what is usual among its like (`typical_spread`).
# - `u` is the rounding error of the run's dtype (half its eps) and `additions` is how many values of that dtype are added
#   one after another: one for each rank and each micro-batch. Errors of random sign grow with the root.
# - `v` is the rounding error of the dtype in which products are summed inside a kernel (fp32 for half types) and `terms`
#   is how many there are in an element: the tokens of the batch, for a weight's gradient.
# - 8 turns a standard deviation into a bound that thousands of tensors keep: small tensors have few elements, so their
#   noise does not average out.
#
# In fp64 that is about 1e-14 of the truth: a factor of 1.001 is outside by ten orders of magnitude. In bf16 it is some
# percent, so that a factor of 2 is seen there, but not one of 1.01; that is why fp64 is the default.


_BOUND = 8.0
_SUMMED_IN = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


@dataclass(frozen=True)
class Tolerance:
    """The rounding of one run: `of` gives the bound for one tensor or number."""

    dtype: torch.dtype
    additions: int = 1

    @classmethod
    def for_run(cls, evidence: Evidence) -> Tolerance:
        """With the run's dtype, and an addition for each rank and each pass."""
        return cls(getattr(torch, evidence.dtype), max(1, evidence.world_size * evidence.accumulation))

    def of(self, compared: Compared, typical: float = 0.0) -> float:
        """The bound on |found - truth|, 2-norm. `typical` is `typical_spread` of the quantity. Whole numbers: 0."""
        if not compared.truth.is_floating_point():
            return 0.0
        return self.of_size(length(compared.truth), compared.spread, compared.terms, typical)

    def of_size(self, size: float, spread: float = 0.0, terms: int = 1, typical: float = 0.0) -> float:
        """The bound for a tensor (or a number) of this length."""
        summed_in = _SUMMED_IN.get(self.dtype, self.dtype)
        relative = _rounding(self.dtype) * sqrt(self.additions) + _rounding(summed_in) * sqrt(max(terms, 1))
        return _BOUND * (max(spread, typical * size) + size * relative)


def typical_spread(some: Iterable[Compared]) -> float:
    """The median of spread / length: what rounding usually does to a tensor of this kind."""
    shares = [one.spread / size for one in some if one.truth.is_floating_point() and (size := length(one.truth)) > 0]
    return median(shares) if shares else 0.0


def length(tensor: Tensor) -> float:
    """The 2-norm, in double."""
    return float(tensor.detach().double().norm())


def _rounding(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2


# --- Rows ---

WEIGHTS_AT_START, LOSS, ACTIVATION, RECOMPUTED = "weights at start", "loss", "activation", "recomputed activation"
GRADIENT, NORM, NORMS, CLIPPED = "gradient", "norm", "norm of a part", "clipped gradient"
WEIGHTS, BUFFER, MASKS, MODE = "weights", "buffer", "dropout masks", "evaluation mode"


def compare(evidence: Evidence) -> list[Row]:
    """A row for everything that was recorded, in the order in which a step makes it."""
    tolerance = Tolerance.for_run(evidence)
    rows = list(_tensors(WEIGHTS_AT_START, None, evidence.weights_at_start, tolerance))
    rows += [Row(MODE, name, None, "differs", inf, 0.0, ranks) for name, ranks in evidence.eval_apart.items()]
    for name, ranks in evidence.masks_apart.items():
        rows.append(Row(MASKS, name, None, "differs" if ranks else "equal", inf if ranks else 0.0, 0.0, ranks))
    for at, step in enumerate(evidence.steps):
        # The loss is compared first and listed later: where it is right, an activation that differs is a part of a sum.
        loss = _loss(at, step, tolerance)
        # A module may run on those ranks only whose samples take it. What the others' output would be is not known.
        everywhere = {name: one for name, one in step.activations.items() if not uncovered(one)}
        rows += _without_parts(
            list(_tensors(ACTIVATION, at, everywhere, tolerance)),
            loss.ok and any(one is not None for one in step.found_loss),
        )
        rows.append(loss)
        rows += _recomputed(at, step, tolerance)
        rows += _tensors(GRADIENT, at, {name: one.total for name, one in step.gradients.items()}, tolerance)
        rows += _norms(at, step, tolerance)
        clipped = {name: one.clipped for name, one in step.gradients.items() if one.clipped is not None}
        rows += _tensors(CLIPPED, at, clipped, tolerance)
        rows += _tensors(WEIGHTS, at, step.weights, tolerance)
        rows += _tensors(BUFFER, at, step.buffers, tolerance)
    return rows


def compare_tensor(compared: Compared, allowed: float, quantity: str, name: str, step: int | None) -> Row:
    """One tensor: the worst rank's distance from the truth, and what no rank holds."""
    worst: dict[int, float] = {}
    for part in compared.found:
        error = in_units(distance(part, compared.truth), allowed)
        worst[part.rank] = max(worst.get(part.rank, 0.0), error)
    wrong = tuple(rank for rank, error in worst.items() if error > 1)
    error = max(worst.values(), default=0.0)
    status, detail = "equal" if error <= 1 else "differs", ""
    if not isfinite(length(compared.truth)):
        status, detail, error = "not finite", "in one process too", inf
    elif any(not _is_finite(part) for part in compared.found):
        wrong = tuple(part.rank for part in compared.found if not _is_finite(part))
        status, error = "not finite", inf
    elif left := uncovered(compared):
        status, error = "missing", inf
        detail = "no rank has it" if left == compared.truth.numel() else f"no rank has {left} of its elements"
    elif (
        wrong
        and len(wrong) < len(worst)
        and (apart := _replicas_apart(compared.found, compared.truth.numel(), allowed))
    ):
        detail = f"replicas differ: ranks {apart}"
    return Row(quantity, name, step, status, error, allowed, wrong, detail)


def distance(part: HeldPart, truth: Tensor) -> float:
    """2-norm of what the rank holds minus the truth at the same places; infinite if the shapes do not fit."""
    wanted = at_positions(truth, part.positions)
    if wanted.numel() != part.value.numel():
        return inf
    apart = length(flat(part.value) - wanted)
    return apart if isfinite(apart) else inf


def flat(tensor: Tensor) -> Tensor:
    """The elements in double, in one dimension."""
    return tensor.detach().double().flatten()


def at_positions(whole: Tensor, positions: Tensor | None) -> Tensor:
    """The elements of a whole tensor that a rank holds, in one row."""
    return flat(whole) if positions is None else flat(whole)[positions.flatten()]


def uncovered(compared: Compared) -> int:
    """How many elements of the truth no rank holds."""
    if any(part.positions is None for part in compared.found):
        return 0
    seen = torch.zeros(compared.truth.numel(), dtype=torch.bool)
    for part in compared.found:
        assert part.positions is not None
        seen[part.positions.flatten()] = True
    return int((~seen).sum())


def differing_elements(compared: Compared, allowed: float) -> Tensor | None:
    """The places of elements that are wrong on some rank, if a part of them is and the others are right; else None."""
    wrong = torch.zeros(compared.truth.numel(), dtype=torch.bool)
    for part in compared.found:
        truth = at_positions(compared.truth, part.positions)
        if truth.numel() != part.value.numel():
            return None
        places = torch.arange(len(truth)) if part.positions is None else part.positions.flatten()
        wrong[places[(flat(part.value) - truth).abs() > allowed]] = True
    return wrong.nonzero().flatten() if 0 < int(wrong.sum()) < len(wrong) else None


def in_units(error: float, allowed: float) -> float:
    """The error in units of the tolerance."""
    if error == 0:
        return 0.0
    return error / allowed if allowed > 0 else inf


def _replicas_apart(found: Sequence[HeldPart], size: int, allowed: float) -> list[int]:
    """The ranks whose elements differ from those of the first rank that holds them too."""
    first = torch.full((size,), nan, dtype=torch.float64)
    apart = []
    for part in found:
        places = torch.arange(part.value.numel()) if part.positions is None else part.positions.flatten()
        before, value = first[places], flat(part.value)
        both = ~before.isnan()
        if in_units(length((value - before)[both]), allowed) > 1:
            apart.append(part.rank)
        first[places[~both]] = value[~both]
    return apart


def _is_finite(part: HeldPart) -> bool:
    return not part.value.is_floating_point() or bool(part.value.isfinite().all())


def _tensors(quantity: str, step: int | None, some: Mapping[str, Compared], tolerance: Tolerance) -> Iterator[Row]:
    typical = typical_spread(some.values())
    for name, compared in some.items():
        yield compare_tensor(compared, tolerance.of(compared, typical), quantity, name, step)


def _recomputed(at: int, step: StepEvidence, tolerance: Tolerance) -> Iterator[Row]:
    """What a rank's modules give when they run again, against what they gave it the first time, right or wrong."""
    typical = typical_spread(step.recomputed.values())
    for name, again in step.recomputed.items():
        allowed = tolerance.of(again, typical)
        first = {part.rank: part for part in step.activations[name].found} if name in step.activations else {}
        errors = {
            part.rank: in_units(distance(HeldPart(part.rank, part.value), first[part.rank].value), allowed)
            for part in again.found
            if part.rank in first
        }
        wrong = tuple(rank for rank, error in errors.items() if error > 1)
        status = "differs" if wrong else "equal"
        yield Row(RECOMPUTED, name, at, status, max(errors.values(), default=0.0), allowed, wrong)


def _without_parts(rows: Sequence[Row], loss_is_right: bool) -> list[Row]:
    """A layer may give a part of a sum that its caller adds up: it is no mistake if the caller, or the loss, is right."""
    right = {row.name for row in rows if row.ok}
    found = []
    for row in rows:
        parents = ["", *(row.name[:at] for at, letter in enumerate(row.name) if letter == ".")]
        if row.status == "differs" and (
            loss_is_right or any(parent in right for parent in parents if parent != row.name)
        ):
            row = replace(row, status="equal", error=0.0, ranks=(), detail="as what is made of it")
        found.append(row)
    return found


def _loss(at: int, step: StepEvidence, tolerance: Tolerance) -> Row:
    """Equal if every rank has the loss of the whole batch, or if the ranks' own losses have that mean."""
    allowed = tolerance.of_size(abs(step.loss), step.loss_spread)
    found = {rank: value for rank, value in enumerate(step.found_loss) if value is not None}
    mean = sum(found.values()) / len(found) if found else step.loss
    row = _number(LOSS, "loss", at, step.loss, found, allowed)
    if row.status == "differs" and in_units(abs(mean - step.loss), allowed) <= 1:
        return Row(LOSS, "loss", at, "equal", in_units(abs(mean - step.loss), allowed), allowed, (), "as a mean")
    return row


def _norms(at: int, step: StepEvidence, tolerance: Tolerance) -> Iterator[Row]:
    """The norms move at most as far as the gradients do (triangle inequality)."""
    noise = {name: one.total.spread for name, one in step.gradients.items()}
    everything = sqrt(sum(value**2 for value in noise.values()))
    if step.norm is not None and any(value is not None for value in step.found_norm):
        yield _number(NORM, "norm", at, step.norm, _by_rank(step.found_norm), tolerance.of_size(step.norm, everything))
    for name, truth in step.norms.items():
        inside = [value for parameter, value in noise.items() if parameter == name or parameter.startswith(f"{name}.")]
        spread = sqrt(sum(value**2 for value in inside)) if inside else everything
        found = _by_rank(step.found_norms.get(name, ()))
        if found:
            yield _number(NORMS, name, at, truth, found, tolerance.of_size(truth, spread))


def _by_rank(values: Sequence[float | None]) -> dict[int, float]:
    return {rank: value for rank, value in enumerate(values) if value is not None}


def _number(quantity: str, name: str, at: int, truth: float, found: Mapping[int, float], allowed: float) -> Row:
    if not isfinite(truth):
        return Row(quantity, name, at, "not finite", inf, allowed, (), "in one process too")
    broken = tuple(rank for rank, value in found.items() if not isfinite(value))
    if broken:
        return Row(quantity, name, at, "not finite", inf, allowed, broken)
    errors = {rank: in_units(abs(value - truth), allowed) for rank, value in found.items()}
    worst = max(errors.values(), default=0.0)
    wrong = tuple(rank for rank, error in errors.items() if error > 1)
    shown = sorted({found[rank] for rank in wrong})[:4]
    digits = next((n for n in (6, 9, 12) if all(f"{value:.{n}g}" != f"{truth:.{n}g}" for value in shown)), 17)
    detail = f"{', '.join(f'{value:.{digits}g}' for value in shown)}, not {truth:.{digits}g}"
    return Row(quantity, name, at, "differs" if wrong else "equal", worst, allowed, wrong, detail if wrong else "")


# --- The report ---


_SHOWN = 40
"""Rows of a printed table that differ; the rest is counted. JSON has all of them."""


@dataclass(frozen=True)
class Row:
    """One compared thing: a parameter's gradient in a step, say. `error` is the worst, in units of the tolerance."""

    quantity: str
    name: str
    step: int | None
    status: str
    error: float
    tolerance: float
    ranks: tuple[int, ...] = ()
    """The ranks on which it differs from one process."""
    detail: str = ""

    @property
    def ok(self) -> bool:
        """Whether it is equal to one process."""
        return self.status == "equal"


@dataclass(frozen=True)
class Finding:
    """One mistake: its name (a key of `CAUSES`), what it touches, and a sentence that says what and where to look."""

    cause: str
    parameters: tuple[str, ...]
    step: int | None
    sentence: str
    factor: float | None = None


@dataclass(frozen=True)
class Report:
    """Whether a parallel run equals one process, and if not, why. `print` it, or read it as JSON."""

    findings: Sequence[Finding] = ()
    rows: Sequence[Row] = ()
    notes: Sequence[str] = field(default=())

    @property
    def ok(self) -> bool:
        """Whether everything that was compared is equal within its tolerance."""
        return not self.findings and all(row.ok for row in self.rows)

    @property
    def causes(self) -> list[str]:
        """The keys of the findings, first things first."""
        return [finding.cause for finding in self.findings]

    def to_json(self) -> str:
        """Everything, as one JSON object. Numbers that JSON has no word for are strings."""
        whole = {
            "ok": self.ok,
            "findings": [asdict(finding) for finding in self.findings],
            "rows": [asdict(row) for row in self.rows],
            "notes": list(self.notes),
        }
        return json.dumps(_plain(whole), indent=1)

    def __str__(self) -> str:
        verdict = "equal to one process" if self.ok else "NOT equal to one process"
        parts = [verdict, *_sentences(self.findings), "", _table(self.rows)]
        return "\n".join([*parts, *(f"note: {note}" for note in self.notes)])


def _sentences(findings: Sequence[Finding]) -> Iterable[str]:
    for at, finding in enumerate(findings, 1):
        step = "" if finding.step is None else f" (step {finding.step})"
        yield f"{at}. {finding.cause}{step}: {finding.sentence}"


def _table(rows: Sequence[Row]) -> str:
    """What differs, worst first; what is equal in one line for each quantity and step."""
    wrong = sorted((row for row in rows if not row.ok), key=lambda row: (row.step or 0, -row.error))
    lines: list[tuple[str, ...]] = [("compared", "step", "name", "status", "error / tolerance", "ranks")]
    lines += [_line(row) for row in wrong[:_SHOWN]]
    if len(wrong) > _SHOWN:
        lines.append(("", "", f"... and {len(wrong) - _SHOWN} more that differ", "", "", ""))
    lines += _folded([row for row in rows if row.ok])
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def _line(row: Row) -> tuple[str, ...]:
    status = f"{row.status} ({row.detail})" if row.detail else row.status
    return row.quantity, _step(row.step), row.name, status, f"{row.error:.3g}", short_ranks(row.ranks)


def _folded(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    alike: dict[tuple[str, int | None], list[Row]] = {}
    for row in rows:
        alike.setdefault((row.quantity, row.step), []).append(row)
    return [
        (
            quantity,
            _step(step),
            some[0].name if len(some) == 1 else f"{len(some)} of them",
            "equal",
            f"{max(row.error for row in some):.3g}",
            "",
        )
        for (quantity, step), some in alike.items()
    ]


def short_ranks(ranks: Sequence[int]) -> str:
    """Ranks as text; the first and the last of many."""
    ranks = list(ranks)
    if not ranks:
        return ""
    return str(ranks) if len(ranks) <= 8 else f"[{ranks[0]}, {ranks[1]}, ... {ranks[-1]}] ({len(ranks)})"


def _step(step: int | None) -> str:
    return "" if step is None else str(step)


def _plain(value: object) -> object:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return str(value) if isinstance(value, float) and not isfinite(value) else value
