"""From records to a report: evidence, tolerance, rows and the table. diagnose.py explains the rows that differ.

Data passes through this file in this order:

1. `assemble` combines the records of the ranks (`Record`) with the reference (`TrueRun`) to the `Evidence`, plain data
   that needs no process group.
2. `Tolerance` is the largest difference that rounding alone can cause.
3. `compare` makes a `Row` of each compared value, in the order in which a step computes them.
4. `Report` is the result for the user: rows, findings, notes.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import permutations
from math import inf, isfinite, nan, sqrt
from statistics import median
from typing import Any

import torch
from torch import Tensor

from colonnade.errors import listed
from colonnade.proof.random_numbers import LOOP, DrawsOfRanks, Replays
from colonnade.proof.record import BatchAxis, Event, Loss, Piece, Record, RecordedStep, StateName
from colonnade.proof.reference import RoundingSpread, TrueRun, Truth, norm_of
from colonnade.proof.sketch import SUMS, Block

# --- Evidence: the values of the ranks and of the reference, side by side ---


@dataclass(frozen=True)
class LocalValue:
    """The elements of a tensor on one rank.

    `positions`: their indices in the flattened full tensor; None: all elements.
    """

    rank: int
    value: Tensor
    positions: Tensor | None = None


@dataclass(frozen=True)
class Compared:
    """A tensor (or number) of the reference, and the values that the ranks have for it.

    `spread` is the effect of rounding: the distance (2-norm) by which the reference changes if its weights change by
    one ulp. `terms` is an upper bound on the number of terms that are summed for an element.
    """

    truth: Tensor
    found: Sequence[LocalValue]
    spread: float = 0.0
    terms: int = 1


@dataclass(frozen=True)
class GradientEvidence:
    """The gradient of one parameter in one step, in the reference and on the ranks, before and after the handlers."""

    total: Compared
    """The gradient after the handlers and before clipping."""
    raw: Sequence[Sequence[LocalValue]] = ()
    """For each pass (micro-batch) of the step: the local gradients of the ranks, before any reduction."""
    truth_of_passes: Sequence[Tensor] = ()
    """For each pass: the reference gradient, weighted such that the gradients of all passes add up to the total."""
    truth_of_data_ranks: Sequence[Tensor] = ()
    """For each data rank: the reference gradient of the mean over that rank's batch."""
    clipped: Compared | None = None
    held: bool = False
    """Whether a wrapper accumulates the gradient without reducing it."""


@dataclass(frozen=True)
class Unplaced:
    """Values that cannot be compared, because it is unknown which elements of the reference tensor they are."""

    shape: tuple[int, ...]
    """The shape on the first rank."""
    of_truth: tuple[int, ...]

    def __str__(self) -> str:
        return f"shape {self.shape} on a rank, {self.of_truth} in a single process"


@dataclass(frozen=True)
class ForwardEvidence:
    """The inputs and outputs of modules in the first forward pass, of the reference and of the ranks."""

    events: Sequence[Event] = ()
    """("in" or "out", module), in the order of the reference's forward pass."""
    inputs: Mapping[str, Sequence[Compared | Unplaced]] = field(default_factory=dict)
    """For each module: its inputs."""
    unplaced: Mapping[str, Unplaced] = field(default_factory=dict)
    """For each module: the outputs that cannot be compared."""
    tokens: Mapping[str, tuple[int, Mapping[int, tuple[int, ...]]]] = field(default_factory=dict)
    """For each module whose output is sharded along one dimension: the size of this dimension, and each rank's indices."""
    rows: tuple[str, int, tuple[int, ...]] | None = None
    """(the first module, its rows in the reference, its rows on each data rank), over all of its calls; None: unknown."""


@dataclass(frozen=True)
class StepEvidence:
    """One step of the reference and of the ranks.

    Numbers of the ranks are listed by rank; None for a rank without the number (an earlier pipeline stage has no loss).
    """

    loss: float
    found_loss: Sequence[float | None]
    gradients: Mapping[str, GradientEvidence]
    weights: Mapping[str, Compared]
    buffers: Mapping[str, Compared] = field(default_factory=dict)
    activations: Mapping[str, Compared] = field(default_factory=dict)
    """The outputs of modules, in the order of the reference's forward pass."""
    recomputed: Mapping[str, Compared] = field(default_factory=dict)
    """The outputs of modules that were recomputed in the backward pass; they must equal the first outputs."""
    norm: float | None = None
    found_norm: Sequence[float | None] = ()
    norms: Mapping[str, float] = field(default_factory=dict)
    """The norms of norm groups, with the names of `engine.grad_norms()`."""
    found_norms: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    loss_spread: float = 0.0
    forward: ForwardEvidence = ForwardEvidence()
    changed: Mapping[str, Compared] = field(default_factory=dict)
    """Weights and buffers at the start of the step, if they changed since the previous step on a rank or in the reference."""
    changed_on: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """For each weight, buffer or tensor of the optimizer's state: the ranks that changed it between the steps."""
    changed_in_reference: frozenset[str] = frozenset()
    in_eval: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """For each module that is in training mode on some ranks only: the ranks on which it is in evaluation mode."""
    options: Mapping[str, Mapping[float, tuple[int, ...]]] = field(default_factory=dict)
    """For each option of the optimizer (with its parameter group) that differs between ranks: the ranks, by value."""
    evaluations: Sequence[int] = ()
    """For each rank: the number of forward passes without gradients since the previous step."""
    passes: tuple[int, int] | None = None
    """The number of backward passes on every rank and in the reference; None: not known, or not the same on the ranks."""
    root_losses: bool = False
    """Whether the losses are the values on which `backward` was called, because the script reports none."""


@dataclass(frozen=True)
class ParameterInfo:
    """The placement of a parameter, its ledger rows and its required reductions."""

    placement: str = "replicated"
    ledger: Sequence[str] = ()
    required: Sequence[tuple[str, tuple[int, ...], float]] = ()
    """(mode, ranks, divisor) of each reduction that its gradient requires, on the first rank that stores it."""
    tied: Sequence[str] = ()
    """The other names of the same weight."""


@dataclass(frozen=True)
class Evidence:
    """All data of a comparison.

    `groups` has the process groups by mode, for modes with groups of several ranks. `max_norm` and `norm_type` are the
    clip limit of all gradients together, which `ClipCase` reads.
    """

    world_size: int
    groups: Mapping[str, Sequence[Sequence[int]]]
    distinct_data: Sequence[str]
    """The modes whose ranks see distinct data."""
    parameters: Mapping[str, ParameterInfo]
    weights_at_start: Mapping[str, Compared]
    steps: Sequence[StepEvidence]
    state_at_start: Mapping[str, Compared] = field(default_factory=dict)
    """The optimizer's state before the first step, as "key of parameter". A rank without it has zeros."""
    dtype: str = "float64"
    accumulation: int = 1
    max_norm: float | None = None
    norm_type: float = 2.0
    notes: Sequence[str] = ()
    """Changes that were made for the comparison, such as dropout set to 0."""
    sliced_differently: Sequence[str] = ()
    """The modes whose ranks sliced different batches, although all should slice the same batch."""
    differing_draws: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """For each module with random operators: the ranks whose numbers differ although they have the same activation."""
    redrawn: Mapping[str, str] = field(default_factory=dict)
    """For each module whose random numbers the single process could not repeat: the reason."""
    host: Mapping[str, str] = field(default_factory=dict)
    """For each module that draws different numbers from Python's or NumPy's generator than the ranks: the reason."""
    same_host: bool = True
    """Whether all ranks drew the same numbers from Python's and NumPy's generators."""


# --- Assembling it ---


Names = Mapping[str, str]
"""The name in the reference of each name that a tensor has on a rank."""


def full_tensors(records: Sequence[Record], names: Names) -> dict[str, Tensor]:
    """Join the initial weights and buffers of the ranks to full tensors, by name in the reference.

    Of replicas, the first rank counts. Tensors that were recorded as sketches are left out.
    """
    found: dict[str, Tensor] = {}
    # In reverse order, so that of replicas the first rank is the last to write.
    for record in reversed(records):
        for name, value in record.start.items():
            note, key = record.tensors[name], names.get(name, name)
            if name in record.run.sketched:
                continue
            if note.positions is None:
                found[key] = value
                continue
            if key not in found:
                found[key] = torch.zeros(note.shape, dtype=value.dtype)
            found[key].view(-1)[note.positions.flatten()] = value.reshape(-1)
    return found


def full_shapes(records: Sequence[Record], names: Names) -> dict[str, tuple[int, ...]]:
    """Return the full shape of every parameter of the run, by name in the reference."""
    return {
        names.get(name, name): note.shape
        for record in records
        for name, note in record.tensors.items()
        if note.is_parameter
    }


def assemble(records: Sequence[Record], truth: TrueRun) -> Evidence:
    """Combine the records of all ranks and of the reference into an `Evidence` object."""
    run, side_by_side = records[0].run, _SideBySide(records, truth.names, truth.terms)
    notes = [
        *(note for record in records for note in record.notes),
        *truth.notes,
        *notes_of_equal_draws(truth.replays),
        *warn_of_parameters_without_optimizer(records, truth.names),
        *warn_of_equal_stages(records),
    ]
    return Evidence(
        world_size=len(records),
        groups=run.groups,
        distinct_data=run.distinct_data,
        parameters=_parameters(records, truth.names),
        weights_at_start={
            name: Compared(truth.start[name], side_by_side.local_values(name, lambda record: record.start))
            for name in side_by_side.names(truth.start)
        },
        steps=[
            side_by_side.step(at, step, spread)
            for at, (step, spread) in enumerate(zip(truth.steps, truth.spreads, strict=True))
            if all(at < len(record.steps) for record in records)
        ],
        state_at_start=side_by_side.state_at_start(truth.state),
        dtype=run.dtype,
        accumulation=run.accumulation,
        max_norm=run.max_norm,
        norm_type=run.norm_type,
        notes=list(dict.fromkeys(notes)),
        differing_draws=truth.replays.differing,
        redrawn=truth.replays.redrawn,
        host=drawn_on_host(records, truth.host),
        same_host=all(record.run.host == run.host for record in records),
        sliced_differently=side_by_side.sliced_differently(truth.steps[0].activations) if truth.steps else (),
    )


def warn_of_parameters_without_optimizer(records: Sequence[Record], names: Names) -> list[str]:
    """Return a warning if trained parameters are in no parameter group of the optimizer."""
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
        (
            f"warning: {listed(left[:5])}{more} are in no parameter group of the optimizer. Their gradients are "
            "compared, but no step uses them. If this is intended, freeze these parameters with requires_grad_(False)"
        )
    ]


def warn_of_equal_stages(records: Sequence[Record]) -> list[str]:
    """Return a warning if all pipeline stages have the same untied parameters: each stage then has the full model."""
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
        (
            f"warning: all {len(stages)} pipeline stages have the parameters "
            f"{listed(shown[:3])}{', ...' if len(shown) > 3 else ''}. If each stage is the full model, a step runs "
            f"{len(stages)} models one after another. Split the model before initialize(): model = "
            f"colonnade.split(model, num_stages={len(stages)})"
        )
    ]


def notes_of_equal_draws(replays: Replays) -> list[str]:
    """Return a note for each module whose shards get equal random numbers on several ranks."""
    return [
        f"{f'module {name}' if name else 'the model'}: ranks {short_ranks(ranks)} draw the same random numbers for different shards "
        f"of one tensor, for dropout for example. In a single process they are independent: give each of these ranks a seed of "
        f"its own there, and restore the generator of each rank after a resume"
        for name, ranks in replays.equal_shards.items()
    ]


def drawn_on_host(records: Sequence[Record], truth: Mapping[str, Sequence[int]]) -> dict[str, str]:
    """Return the modules whose draws from Python's or NumPy's generator differ between the ranks and the single process.

    The values are the reasons, as text.
    """
    return {
        name: "it draws from Python's random module or from numpy.random, whose numbers are not repeated"
        for name in dict.fromkeys(name for record in records for name in record.run.host)
        if any(record.run.host.get(name) != truth.get(name) for record in records if name in record.run.host)
    }


def drawn_by(records: Sequence[Record], off: Collection[str] | None) -> DrawsOfRanks:
    """Collect the random numbers of the ranks.

    Ranks count as having the same batch unless an axis between them shards batches.
    """
    by_data_rank: dict[Any, list[int]] = {}
    for record in records:
        at = record.run.coordinates
        data_rank = tuple(at[axis.name] for axis in record.run.axes or () if axis.distinct and not axis.may_repeat)
        by_data_rank.setdefault(data_rank, []).append(record.rank)
    steps = [
        {record.rank: record.steps[at].draws for record in records}
        for at in range(min(len(record.steps) for record in records))
    ]
    nowhere = None if off is None else {*off, *(name for record in records for name in record.run.zeroed)}
    return DrawsOfRanks(steps, records[0].run.groups, [by_data_rank[key] for key in sorted(by_data_rank)], nowhere)


def sketched_blocks(records: Sequence[Record], names: Names) -> dict[str, list[Block | None]]:
    """Return the distinct blocks that the ranks have sketched of each tensor, in rank order, by name in the reference."""
    found: dict[str, list[Block | None]] = {}
    for record in records:
        for name, block in record.run.sketched.items():
            blocks = found.setdefault(names.get(name, name), [])
            if block not in blocks:
                blocks.append(block)
    return found


class _SideBySide:
    """Finds the values of the ranks for each tensor of the reference, by the tensor's name in the reference."""

    def __init__(self, records: Sequence[Record], names: Names, terms: int) -> None:
        self.records, self.terms = records, terms
        self.local: list[dict[str, str]] = [
            {names.get(name, name): name for name in reversed(list(record.tensors))} for record in records
        ]
        self.axes = records[0].run.axes or ()
        self._places: dict[Any, Tensor] = {}
        self._known_cuts: set[tuple[tuple[int, str], ...]] = set()
        """Shardings, as (dimension, axis) pairs, that some output of a module has been found to have."""
        self._blocks = sketched_blocks(records, names)

    def positions(self, record: Record, name: str, key: str, own: Tensor | None) -> Tensor | None:
        """Return the positions of a rank's elements in the reference.

        For a sketched tensor, the reference may be a sketch of each shard.
        """
        if key not in record.run.sketched:
            return own
        blocks = self._blocks[name]
        at = blocks.index(record.run.sketched[key])
        return None if len(blocks) == 1 else torch.arange(at * SUMS, (at + 1) * SUMS)

    def names(self, known: Iterable[str]) -> list[str]:
        return [name for name in known if any(name in local for local in self.local)]

    def local_values(self, name: str, read: Any) -> list[LocalValue]:
        """Return the elements of a weight or buffer on each rank."""
        found = []
        for record, local in zip(self.records, self.local, strict=True):
            key = local.get(name)
            if key is not None and key in (tensors := read(record)):
                positions = self.positions(record, name, key, record.tensors[key].positions)
                found.append(LocalValue(record.rank, tensors[key], positions))
        return found

    def state_at_start(self, truth: Mapping[StateName, Tensor] | None) -> dict[str, Compared]:
        """The optimizer's state before the first step. A rank that has none for a parameter gets zeros."""
        if truth is None or any(record.state is None for record in self.records):
            return {}
        here = [{own: name for name, own in local.items()} for local in self.local]
        known = dict(truth)
        for record, by_own in zip(self.records, here, strict=True):
            for (key, own), value in (record.state or {}).items():
                shape = record.tensors[own].shape if value.dim() and own not in record.run.sketched else value.shape
                known.setdefault((key, by_own[own]), torch.zeros(shape))
        found: dict[str, Compared] = {}
        for (key, name), whole in known.items():

            def state(record: Record, key: str = key, whole: Tensor = whole) -> dict[str, Tensor]:
                empty = (
                    {} if record.run.has_engine else record.start
                )  # ZeRO spreads the state of replicas over their ranks
                zeros = {
                    own: torch.zeros_like(value) if whole.dim() else torch.zeros(()) for own, value in empty.items()
                }
                return zeros | {own: value for (of, own), value in (record.state or {}).items() if of == key}

            parts = self.local_values(name, state)
            parts = parts if whole.dim() else [LocalValue(part.rank, part.value) for part in parts]
            found[f"{key} of {name}"] = Compared(whole, parts)
        return found

    def step(self, at: int, truth: Truth, spread: RoundingSpread) -> StepEvidence:
        steps = [record.steps[at] for record in self.records]

        # The loss of a rank: the mean over the ranks that differ from it only in axes that shard batches.
        losses = [mean_of(step.losses) for step in steps]
        at_axes = [
            [record.run.coordinates[axis.name] for axis in self.axes if not axis.distinct] for record in self.records
        ]
        found_loss: list[float | None] = []
        for own in at_axes:
            some = [loss for loss, other in zip(losses, at_axes, strict=True) if other == own]
            mean = mean_of(some)
            found_loss.append(None if mean is None else mean[0])
        counts = {len(step.losses) for step in steps if step.losses}
        is_counted = len(counts) == 1 and truth.losses and not any(record.run.has_engine for record in self.records)
        return StepEvidence(
            passes=(counts.pop(), len(truth.losses)) if is_counted else None,
            loss=truth.loss,
            found_loss=found_loss,
            gradients={
                name: found
                for name in truth.weights
                if (found := self._gradient(name, at, truth, spread)).total.found or name in truth.total
            },
            weights={
                name: self._compared(
                    value, self.local_values(name, lambda record: record.steps[at].weights), spread, "weights", name
                )
                for name, value in truth.weights.items()
            },
            buffers={
                name: self._compared(
                    value, self.local_values(name, lambda record: record.steps[at].buffers), spread, "buffers", name
                )
                for name, value in truth.buffers.items()
                if name in self.names(truth.buffers)
            },
            activations=(activations := self._activations([step.activations for step in steps], truth, spread))[0],
            recomputed=self._activations([step.recomputed for step in steps], truth, spread)[0],
            forward=self._forward(steps, truth, *activations[1:]),
            norm=truth.norm,
            found_norm=[step.norm for step in steps] if any(step.norm is not None for step in steps) else (),
            norms=self._norms(truth, steps),
            found_norms={key: [step.norms.get(key) for step in steps] for step in steps[:1] for key in step.norms},
            loss_spread=spread.loss,
            root_losses=not any(record.run.has_engine for record in self.records),
            options=self._options(at),
            evaluations=[step.evaluations for step in steps],
            **self._between_steps(at, truth, spread),
        )

    def _between_steps(self, at: int, truth: Truth, spread: RoundingSpread) -> dict[str, Any]:
        """The weights, buffers, state and modes that changed since the previous step."""
        on_ranks: dict[str, list[int]] = {}
        modes: dict[str, dict[bool, list[int]]] = {}
        for record, local in zip(self.records, self.local, strict=True):
            here, step = {own: name for name, own in local.items()}, record.steps[at]
            for name in step.changed:
                on_ranks.setdefault(here.get(name, name), []).append(record.rank)
            for key, name in step.changed_state:
                on_ranks.setdefault(f"{key} of {here.get(name, name)}", []).append(record.rank)
            for name, in_eval in step.in_eval.items():
                modes.setdefault(name, {}).setdefault(in_eval, []).append(record.rank)

        # A tensor that did not change has its value of the end of the previous step.
        def started(record: Record) -> Mapping[str, Tensor]:
            before = record.steps[at - 1] if at else None
            return {
                **(record.start if before is None else {**before.weights, **before.buffers}),
                **record.steps[at].changed,
            }

        compared = {
            name: self._compared(
                truth.changed.get(name, truth.started.get(name, torch.zeros(()))),
                self.local_values(name, started),
                spread,
                "changed" if name in truth.changed else "weights",
                name,
            )
            for name in dict.fromkeys([*on_ranks, *truth.changed])
            if name in truth.changed or name in truth.started
        }
        return {
            "changed": {name: entry for name, entry in compared.items() if entry.found},
            "changed_on": {name: tuple(ranks) for name, ranks in on_ranks.items()},
            "changed_in_reference": frozenset(
                [*truth.changed, *(f"{key} of {name}" for key, name in truth.changed_state)]
            ),
            "in_eval": {name: tuple(ranks[True]) for name, ranks in modes.items() if len(ranks) > 1},
        }

    def _options(self, at: int) -> dict[str, dict[float, tuple[int, ...]]]:
        """The options of the optimizer that differ between ranks with the same parameters in a group."""
        found: dict[str, dict[float, tuple[int, ...]]] = {}
        for number, (_, names) in enumerate(self.records[0].groups):
            by_key: dict[str, dict[float, tuple[int, ...]]] = {}
            for record in self.records:
                options = record.steps[at].options
                if number < min(len(record.groups), len(options)) and record.groups[number][1] == names:
                    for key, value in options[number].items():
                        ranks = by_key.setdefault(key, {})
                        ranks[value] = (*ranks.get(value, ()), record.rank)
            many = len(self.records[0].groups) > 1
            for key, ranks in by_key.items():
                if len(ranks) > 1:
                    found[f"{key} of parameter group {number}" if many else key] = ranks
        return found

    def _compared(
        self, truth: Tensor, found: list[LocalValue], spread: RoundingSpread, kind: str, name: str
    ) -> Compared:
        return Compared(truth, found, spread.tensors.get((kind, name), 0.0), self.terms)

    def _gradient(self, name: str, at: int, truth: Truth, spread: RoundingSpread) -> GradientEvidence:
        zeros = torch.zeros_like(truth.weights[name])
        total, stepped, clipped = (self._pieces(name, at, kind) for kind in ("total", "stepped", "clipped"))
        whole = self._compared(truth.total.get(name, zeros), total, spread, "total", name)

        # An optimizer may reduce gradients inside step(). They are compared at the end of the step if they are wrong before and
        # the step changes them; the reference steps without reductions.
        if stepped and (not total or _error(whole) > 1e-6):
            kind = "stepped" if name in truth.stepped else "total"
            after = self._compared(getattr(truth, kind).get(name, zeros), stepped, spread, kind, name)
            if not total or _error(after) < _error(whole):
                whole = after
        keys = [local.get(name) for local in self.local]
        return GradientEvidence(
            total=whole,
            raw=self._raw(name, at),
            truth_of_passes=[gradients.get(name, zeros) for gradients in truth.passes],
            truth_of_data_ranks=[gradients.get(name, zeros) for gradients in truth.by_data_rank],
            clipped=self._compared(truth.clipped.get(name, zeros), clipped, spread, "clipped", name)
            if truth.clipped and clipped
            else None,
            held=any(key in record.steps[at].held for key, record in zip(keys, self.records, strict=True)),
        )

    def _pieces(self, name: str, at: int, kind: str) -> list[LocalValue]:
        found = []
        for record, local in zip(self.records, self.local, strict=True):
            key, step = local.get(name, ""), record.steps[at]
            pieces: Sequence[Piece] = getattr(step, kind).get(key, ())
            divisor = 1.0
            # Clipped gradients are rarely recorded themselves: an engine steps with the divisor, and never writes them.
            if kind == "clipped" and not pieces and step.norm is not None:
                pieces, divisor = step.total.get(key, ()), step.divisors.get(key, 1.0)
            for piece in pieces:
                value = piece.value if divisor == 1.0 else piece.value / divisor
                found.append(LocalValue(record.rank, value, self.positions(record, name, key, piece.positions)))
        return found

    def _raw(self, name: str, at: int) -> list[list[LocalValue]]:
        passes: dict[int, list[LocalValue]] = {}
        for record, local in zip(self.records, self.local, strict=True):
            key = local.get(name, "")
            for number, value in record.steps[at].raw.get(key, {}).items():
                positions = self.positions(record, name, key, record.tensors[key].positions)
                passes.setdefault(number, []).append(LocalValue(record.rank, value, positions))
        return [passes[number] for number in sorted(passes)]

    def _norms(self, truth: Truth, steps: Sequence[RecordedStep]) -> dict[str, float]:
        """The norm of each norm group (slot), from the gradients of the reference."""
        if truth.norm is None:
            return {}
        kind = self.records[0].run.norm_type
        slots: dict[str, list[float]] = {}
        for name, gradient in truth.total.items():
            for record, local in zip(self.records, self.local, strict=True):
                slot = record.tensors[local[name]].slot if name in local else None
                if slot is not None:
                    slots.setdefault(slot, []).append(truth.lengths.get(name) or norm_of([gradient], kind))
                    break
        return {slot: norm_of([], kind, norms) for slot, norms in slots.items() if slot in steps[0].norms}

    def _activations(
        self, seen: Sequence[Mapping[str, Tensor]], truth: Truth, spread: RoundingSpread
    ) -> tuple[dict[str, Compared], dict[str, Unplaced], dict[str, Tokens]]:
        """Three results: the module outputs that can be compared, those that cannot be compared, and the indices of outputs
        sharded along a dimension.
        """
        found: dict[str, Compared] = {}
        unplaced: dict[str, Unplaced] = {}
        tokens: dict[str, Tokens] = {}
        is_staged = any(local.keys() != self.local[0].keys() for local in self.local)
        for name, value in truth.activations.items():
            if not name and is_staged:
                continue  # the output of a stage is not that of the model
            outputs = [(record, some[name]) for record, some in zip(self.records, seen, strict=True) if name in some]
            compared = self._placed(outputs, value, spread, name)
            if isinstance(compared, Compared):
                found[name] = compared
            elif compared is not None:
                unplaced[name] = compared
            if (indices := _tokens_of(outputs, value)) is not None:
                tokens[name] = indices
        return found, unplaced, tokens

    def _forward(
        self,
        steps: Sequence[RecordedStep],
        truth: Truth,
        unplaced: Mapping[str, Unplaced],
        tokens: Mapping[str, Tokens],
    ) -> ForwardEvidence:
        # The input of a stage is not that of the model, and torch's stages run on made-up inputs to find out shapes.
        is_staged = any(local.keys() != self.local[0].keys() for local in self.local)
        inputs: dict[str, list[Compared | Unplaced]] = {}
        for name, values in truth.inputs.items():
            if not name and is_staged:
                continue
            some = [
                (record, step.inputs[name])
                for record, step in zip(self.records, steps, strict=True)
                if name in step.inputs
            ]
            if not some or not values or any(len(own) != len(values) for _, own in some):
                continue
            placed = [
                self._placed([(record, own[at]) for record, own in some], value, RoundingSpread(), name)
                for at, value in enumerate(values)
            ]
            inputs[name] = [entry for entry in placed if entry is not None]

        # Ranks that differ in other axes than those that shard the rows of a batch have the same rows.
        rows = None
        if len(truth.rows) == 1 and not is_staged:
            (first,) = truth.rows
            own = [
                step.rows.get(first)
                for record, step in zip(self.records, steps, strict=True)
                if all(record.run.coordinates[axis.name] == 0 for axis in self.axes if not axis.distinct or axis.dim)
            ]
            if all(count is not None for count in own):
                rows = (first, truth.rows[first], tuple(count for count in own if count is not None))
        return ForwardEvidence(truth.events, inputs, unplaced, tokens, rows)

    def _placed(
        self, values: Sequence[tuple[Record, Tensor]], truth: Tensor, spread: RoundingSpread, name: str
    ) -> Compared | Unplaced | None:
        """Put the values of the ranks at their places in the reference value; None if some rows ran on no rank."""
        if not values:
            return None
        parts = [self._place_output(record, value, truth) for record, value in values]
        known = [part for part in parts if part is not None]
        compared = self._compared(truth, known, spread, "activations", name)
        if known and len(known) == len(parts):
            if uncovered(compared):
                return None  # not run by ranks whose rows are missing

            # Sequences need not be sharded into blocks. If the ranks have the tokens of the reference at other places, the
            # places are unknown, and the output cannot be compared.
            is_wrong = any(distance(part, truth) > 1e-3 * length(truth) for part in known)
            if not is_wrong or truth.dim() <= 2 or any(part.positions is None for part in known):
                return compared
            if not _same_slices(known, truth):
                return compared
            return Unplaced(tuple(values[0][1].shape), tuple(truth.shape))

        # Any other sharding (of channels, or without a batch dimension) is not known. If the usual one, in blocks, gives the
        # values of the reference, it is the sharding; otherwise values and sharding cannot be told apart, unless another value
        # of the step is sharded in the same dimensions, none of which are channels.
        supposed = None
        for cut, part in self._in_blocks(values, truth):
            if all(distance(one, truth) <= 1e-6 * length(truth) for one in part):
                self._known_cuts.add(cut)
                return self._compared(truth, part, spread, "activations", name)
            if cut in self._known_cuts and all(dim < truth.dim() - 1 for dim, _ in cut):
                supposed = supposed or part
        if supposed is not None and not _same_slices(supposed, truth):
            return self._compared(truth, supposed, spread, "activations", name)
        return Unplaced(tuple(values[0][1].shape), tuple(truth.shape))

    def _in_blocks(
        self, values: Sequence[tuple[Record, Tensor]], truth: Tensor
    ) -> Iterator[tuple[tuple[tuple[int, str], ...], list[LocalValue]]]:
        """Treat the values as blocks along the dimensions in which they are shorter than the reference; one result, with its
        (dimension, axis) pairs, for each choice of axes.
        """
        shape = values[0][1].shape
        if len(shape) != truth.dim() or any(value.shape != shape for _, value in values):
            return
        shorter = [dim for dim in range(truth.dim()) if shape[dim] != truth.shape[dim]]
        axes = [axis for axis in self.axes if axis.size > 1]
        for chosen in permutations(axes, len(shorter)) if shorter else ():
            if all(shape[dim] * axis.size == truth.shape[dim] for dim, axis in zip(shorter, chosen, strict=True)):
                cut = list(zip(shorter, chosen, strict=True))
                blocks = [LocalValue(record.rank, value, self._block(record, truth, cut)) for record, value in values]
                yield tuple((dim, axis.name) for dim, axis in cut), blocks

    def _block(self, record: Record, truth: Tensor, cut: Sequence[tuple[int, BatchAxis]]) -> Tensor:
        """The indices of a rank's block of a tensor, which is sharded along dimensions over axes. Many tensors share them."""
        at = tuple((dim, axis.size, record.run.coordinates[axis.name]) for dim, axis in cut)
        key = (tuple(truth.shape), at)
        if key not in self._places:
            places = torch.arange(truth.numel()).view(truth.shape)
            for dim, size, number in at:
                places = places.chunk(size, dim)[number]
            self._places[key] = places
        return self._places[key]

    def _place_output(self, record: Record, output: Tensor, truth: Tensor) -> LocalValue | None:
        """Locate the output of a rank: its rows of the global batch and its tokens of the sequences.

        None if it is sharded in any other way.
        """
        if output.shape == truth.shape:
            return LocalValue(record.rank, output)
        axes = [axis for axis in self.axes if axis.distinct and axis.size > 1]
        for chosen in ([axis for axis in axes if not axis.may_repeat], axes):
            shape, cut = list(truth.shape), list[tuple[int, BatchAxis]]()
            for axis in chosen:
                if len(shape) <= axis.dim or shape[axis.dim] % axis.size:
                    break
                shape[axis.dim] //= axis.size
                cut.append((axis.dim, axis))
            if shape == list(output.shape):
                return LocalValue(record.rank, output, self._block(record, truth, cut))
        return None

    def sliced_differently(self, truth: Mapping[str, Tensor]) -> list[str]:
        """Return the axes along which the ranks cut their batches from different full batches.

        The activation of a rank is then shorter than the full one by the square of the axis size.
        """
        found = []
        for axis in self.axes:
            lengths = [
                (output.shape[axis.dim], truth[name].shape[axis.dim])
                for record in self.records
                for name, output in record.steps[0].activations.items()
                if name in truth and output.dim() == truth[name].dim() > axis.dim
            ]
            is_sliced = axis.may_repeat and axis.distinct and axis.size > 1 and axis.dim > 0 and lengths
            if is_sliced and all(size * axis.size**2 == full for size, full in lengths):
                found.append(axis.name.upper())
        return found


Tokens = tuple[int, Mapping[int, tuple[int, ...]]]
"""The size of a dimension, and the indices along it that each rank has."""
_MOST_TOKENS, _MOST_ELEMENTS = 4096, 1 << 20


def _tokens_of(values: Sequence[tuple[Record, Tensor]], truth: Tensor) -> Tokens | None:
    """The indices of each rank's slices in the reference, if a value is sharded along one dimension that is not the last."""
    if not values:
        return None
    shape = values[0][1].shape
    shorter = [dim for dim in range(truth.dim()) if len(shape) == truth.dim() and shape[dim] != truth.shape[dim]]
    if len(shorter) != 1 or shorter[0] == truth.dim() - 1 or any(value.shape != shape for _, value in values):
        return None
    (dim,) = shorter
    if truth.shape[dim] > _MOST_TOKENS or truth.numel() > _MOST_ELEMENTS:
        return None
    whole, found = truth.double().movedim(dim, 0).flatten(1), {}
    if len(whole.unique(dim=0)) < len(whole):
        return None  # equal slices have no place of their own
    for record, value in values:
        apart = torch.cdist(value.double().movedim(dim, 0).flatten(1), whole)
        nearest, at = apart.min(1)
        if not bool((nearest <= 1e-6 * whole.norm(dim=1)[at]).all()):
            return None
        found[record.rank] = tuple(at.tolist())
    return len(whole), found


def _same_slices(parts: Sequence[LocalValue], truth: Tensor) -> bool:
    """Whether the slices along the last dimension (tokens) have the lengths of those of the reference, in any order."""
    tokens = torch.cat([part.value.double().norm(dim=-1).flatten() for part in parts]).sort().values
    wanted = truth.double().norm(dim=-1).flatten().sort().values
    return len(tokens) == len(wanted) and bool((tokens - wanted).norm() <= 1e-6 * wanted.norm())


def _error(compared: Compared) -> float:
    """The largest relative distance of a rank."""
    size = length(compared.truth) or 1.0
    return max((distance(part, compared.truth) / size for part in compared.found), default=inf)


def mean_of(losses: Sequence[Loss | None]) -> Loss | None:
    """Return the mean of losses, weighted by their counts if all losses have a count; None if a loss is missing."""
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
                found.setdefault(key, ParameterInfo(note.placement, note.ledger, note.required))
    return {key: replace(info, tied=sorted(tied[key] - {key})) for key, info in found.items()}


# --- Tolerance ---
#
# The largest difference that rounding alone can cause between a parallel run and the reference. It is derived, not tuned:
#
#     tolerance = 8 * (spread + |truth| * (u * sqrt(additions) + v * sqrt(terms)))
#
# in the 2-norm of the whole tensor, where
#
# - `spread` is the distance by which the reference moves if its weights change by one ulp with random signs: the growth
#   of rounding errors in the model, layer by layer. A healthy parallel run adds its terms in another order, which is a
#   change of that size and no larger. The spread of a single tensor comes from two or three runs only, so one that is
#   small by chance is raised to the usual value of similar tensors (`typical_spread`).
# - `u` is the rounding error of the run's dtype (half its eps) and `additions` is the number of values of that dtype that
#   are added one after another: one for each rank and each micro-batch. Errors of random sign grow with the square root.
# - `v` is the rounding error of the dtype in which products are summed inside a kernel (fp32 for half types) and `terms`
#   is their number in an element: the tokens of the batch, for a weight's gradient.
# - 8 turns a standard deviation into a bound that holds for thousands of tensors: small tensors have few elements, so
#   their noise does not average out.
#
# In fp64 the tolerance is about 1e-14 of the truth: a factor of 1.001 exceeds it by ten orders of magnitude. In bf16 it is
# a few percent, so a factor of 2 is seen there, but not one of 1.01; therefore fp64 is the default.


_BOUND = 8.0
_SUMMED_IN = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


@dataclass(frozen=True)
class Tolerance:
    """The tolerance of a run, from its dtype and its number of additions.

    `of` is the bound for one tensor or number.
    """

    dtype: torch.dtype
    additions: int = 1
    only_rounding: bool = False
    """In half precision, rounding may change decisions such as a top-k, so without random numbers any spread is accepted."""

    @classmethod
    def for_run(cls, evidence: Evidence) -> Tolerance:
        """Return the tolerance for the dtype of a run, with one addition for each rank and each pass."""
        dtype = getattr(torch, evidence.dtype)
        only_rounding = dtype in _SUMMED_IN and not evidence.redrawn and not evidence.host
        return cls(dtype, max(1, evidence.world_size * evidence.accumulation), only_rounding)

    def hides_errors(self, spread: float, size: float, everything: float) -> bool:
        """Return whether the tolerance is too wide to detect a wrong factor; see the function `hides_errors`."""
        return not self.only_rounding and hides_errors(spread, size, everything, self.dtype)

    def of(self, compared: Compared, typical: float = 0.0) -> float:
        """Return the largest |found - truth| (2-norm) that rounding explains; 0 for integers.

        `typical` is the `typical_spread` of tensors of the same kind.
        """
        if not compared.truth.is_floating_point():
            return 0.0
        return self.of_size(length(compared.truth), compared.spread, compared.terms, typical)

    def of_size(self, size: float, spread: float = 0.0, terms: int = 1, typical: float = 0.0) -> float:
        """Return the bound for a tensor with the 2-norm `size`, or for a number of this absolute value."""
        summed_in = _SUMMED_IN.get(self.dtype, self.dtype)
        relative = _rounding(self.dtype) * sqrt(self.additions) + _rounding(summed_in) * sqrt(max(terms, 1))
        return _BOUND * (max(spread, typical * size) + size * relative)


_VISIBLE, _CHAOS = 1e-5, 8192.0


def hides_errors(spread: float, size: float, everything: float, dtype: torch.dtype) -> bool:
    """Return whether perturbed runs differ so much that the tolerance is too wide to detect a wrong factor.

    `spread` is compared with the `size` of the value, and with `everything`, the size of all values of this kind in the
    step. The second comparison excludes values that consist of rounding errors, such as the gradient of a bias before a
    batch norm.
    """
    # 8 * 1e-5 leaves a factor of 1.001 visible. Rounding stays below it in fp64: 8192 eps are 2e-12. In fp32 these are 1e-3,
    # which leaves a factor of 1.01. In half precision 1 / 16 is the last share that leaves a factor of 1/2.
    rounding = _CHAOS * torch.finfo(dtype).eps
    share = min(1 / 16, max(_VISIBLE, rounding))
    return spread > share * size and spread > min(share, rounding) * everything


def typical_spread(some: Iterable[Compared]) -> float:
    """Return the median of spread / length over tensors of one kind: the usual effect of rounding on them."""
    ratios = [
        entry.spread / size for entry in some if entry.truth.is_floating_point() and (size := length(entry.truth)) > 0
    ]
    return median(ratios) if ratios else 0.0


def length(tensor: Tensor) -> float:
    """Return the 2-norm, computed in double."""
    return float(tensor.detach().double().norm())


def _rounding(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2


# --- Rows ---

WEIGHTS_AT_START, STATE_AT_START = "weights at start", "optimizer state at start"
LOSS, ACTIVATION, RECOMPUTED = "loss", "activation", "recomputed activation"
GRADIENT, NORM, NORMS, CLIPPED = "gradient", "norm", "norm of a part", "clipped gradient"
_REPLICAS_DIFFER = "replicas differ: ranks"
_IN_BOTH = "in a single process too"
UNCERTAIN = "uncertain"
"""The status of a value that changes between runs of the single process, so that it cannot be compared."""
WEIGHTS, BUFFER, RANDOM, MODE = "weights", "buffer", "random numbers", "evaluation mode"
STARTED, STATE, OPTION = "start of the step", "optimizer state at the start of the step", "option of the optimizer"


def compare(evidence: Evidence) -> list[Row]:
    """Compare every recorded value; returns one row each, in the order in which a step computes the values."""
    tolerance = Tolerance.for_run(evidence)
    rows = list(_tensors(WEIGHTS_AT_START, None, evidence.weights_at_start, tolerance))
    rows += _tensors(STATE_AT_START, None, evidence.state_at_start, tolerance)
    for name, ranks in evidence.differing_draws.items():
        rows.append(Row(RANDOM, name, None, "differs" if ranks else "equal", inf if ranks else 0.0, 0.0, ranks))
    rounding_only = set[str]()
    for at, step in enumerate(evidence.steps):
        # What changed between the steps.
        rows += [Row(MODE, name, at, "differs", inf, 0.0, ranks) for name, ranks in step.in_eval.items()]
        rows += _tensors(STARTED, at, step.changed, tolerance)
        for name, ranks in step.changed_on.items():
            if name not in step.changed and len(ranks) < evidence.world_size:
                others = tuple(rank for rank in range(evidence.world_size) if rank not in ranks)
                wrong = others if name in step.changed_in_reference else ranks
                rows.append(Row(STATE, name, at, "differs", inf, 0.0, wrong))

        # A module may run only on the ranks whose samples use it; its output for the other samples is unknown.
        everywhere = {name: entry for name, entry in step.activations.items() if not uncovered(entry)}
        outputs = list(_tensors(ACTIVATION, at, everywhere, tolerance))

        # The output of a module may be a partial sum that its caller reduces. That is no mistake if the output of the caller
        # is right, or the loss.
        loss = _loss(at, step, tolerance, max(abs(step.loss) for step in evidence.steps))
        loss_is_right = loss.ok and any(loss is not None for loss in step.found_loss)
        right = {row.name for row in outputs if row.ok}
        for row in outputs:
            callers = {"", *(row.name[:dot] for dot, letter in enumerate(row.name) if letter == ".")} - {row.name}
            if row.status == "differs" and (loss_is_right or callers & right):
                row = replace(row, status="equal", error=0.0, ranks=(), detail="a partial sum that is reduced later")
            rows.append(row)
        rows.append(loss)
        rows += _recomputed(at, step, tolerance)
        rows += _tensors(GRADIENT, at, {name: gradient.total for name, gradient in step.gradients.items()}, tolerance)
        rows += _norms(at, step, tolerance)
        clipped = {name: gradient.clipped for name, gradient in step.gradients.items() if gradient.clipped is not None}
        rows += _tensors(CLIPPED, at, clipped, tolerance)
        # A step that uses signs of gradients moves a weight at random whose gradient is a rounding error.
        lengths = {name: length(gradient.total.truth) for name, gradient in step.gradients.items()}
        least = _CHAOS * torch.finfo(tolerance.dtype).eps * sqrt(sum(size**2 for size in lengths.values()))
        rounding_only |= {name for name, size in lengths.items() if size <= least}
        # Whatever numbers a run draws, replicas of a weight are equal after the step.
        weights = list(_tensors(WEIGHTS, at, step.weights, tolerance, rounding_only))
        for number, row in enumerate(weights):
            compared = step.weights[row.name]
            allowed = tolerance.of(replace(compared, spread=0.0))
            if row.status == UNCERTAIN and (apart := _replicas_apart(compared.found, compared.truth.numel(), allowed)):
                detail = f"{_REPLICAS_DIFFER} {apart}"
                weights[number] = replace(row, status="differs", tolerance=allowed, ranks=tuple(apart), detail=detail)
        rows += weights
        if loss.status == "differs" and step.root_losses:
            followers = [row for row in rows if row.step == at and row.quantity in (GRADIENT, CLIPPED, WEIGHTS)]
            if scale := _scale_of_loss(evidence, step) if all(row.ok for row in followers) and step.gradients else "":
                rows[rows.index(loss)] = replace(loss, status="equal", error=0.0, ranks=(), detail=scale)
        for name, by_value in step.options.items() if not all(row.ok for row in weights) else ():
            shown = " and ".join(f"{value:g} on {_these(ranks)}" for value, ranks in by_value.items())
            rows.append(Row(OPTION, name, at, "differs", inf, 0.0, min(by_value.values(), key=len), shown))
        rows += _tensors(BUFFER, at, step.buffers, tolerance)

        # A script may skip a step whose values are not finite. If the weights then agree, it did so in both runs.
        if all(row.ok for row in weights) and weights:
            rows = [
                replace(row, status="equal", error=0.0, ranks=(), detail="not finite in both runs, which skip it")
                if row.step == at and row.status == "not finite" and row.detail == _IN_BOTH
                else row
                for row in rows
            ]

    # Differences after a module that drew other numbers than on the ranks may come from these numbers, also if they lead to the
    # same decision in all runs of the single process. In the loop, a draw has an effect only if the perturbed runs differ, unless
    # all ranks drew the same numbers outside of torch: then the perturbed runs did so as well.
    modules = {*evidence.redrawn, *evidence.host} - {LOOP}
    if not modules and (not evidence.host or not evidence.same_host):
        return rows
    order = [row.name for row in rows if row.quantity == ACTIVATION and row.step == 0]
    first = next((at for at, name in enumerate(order) if name in modules), len(order)) if modules else 0
    certain = {(ACTIVATION, name) for name in order[:first]}
    certain |= {
        (row.quantity, row.name)
        for row in rows
        if row.quantity in (WEIGHTS_AT_START, STATE_AT_START, RECOMPUTED, RANDOM, MODE, STATE)
    }
    return [
        replace(row, status=UNCERTAIN)
        if row.status == "differs"
        and (row.quantity, row.name) not in certain
        and not (row.quantity == WEIGHTS and row.detail.startswith(_REPLICAS_DIFFER))
        else row
        for row in rows
    ]


def why_uncertain(evidence: Evidence, rows: Sequence[Row]) -> str:
    """Return a sentence with the reason why values cannot be compared; empty if all of them can."""
    some = [row for row in rows if row.status == UNCERTAIN]
    if not some:
        return ""
    shown = ", ".join(dict.fromkeys(f"{row.quantity} {row.name}".strip() for row in some[:3]))
    more = f" and {len(some) - 3} more" if len(some) > 3 else ""
    # Draws of the loop may be those of the batches, which are replaced, so a module is likelier.
    reasons = sorted([*evidence.redrawn.items(), *evidence.host.items()], key=lambda reason: reason[0] == LOOP)
    if any(name != LOOP for name, _ in reasons):
        reasons = [reason for reason in reasons if reason[0] != LOOP]
    named = [f"{name if name == LOOP else f'module {name}' if name else 'the model'}: {why}" for name, why in reasons]
    if named:
        return (
            f"{shown}{more} may differ because of random numbers that a single process cannot repeat. The "
            "comparison could miss an error there, for example a factor of 2. These numbers are drawn in "
            f"{'; in '.join(named[:3])}. Turn them off for the comparison, or draw them with torch, one for each "
            "row of the batch."
        )
    return (
        f"{shown}{more} differ between runs of the single process by a large part of their value. The comparison "
        "could miss an error there, for example a factor of 2. All random numbers that were seen could be "
        "repeated. Look for a generator outside of torch (numpy.random.default_rng, for example). Also look for "
        "decisions that change with rounding (a top-k, a sort)."
    )


def needed_as_a_whole(rows: Iterable[Row], sketched: Collection[str], names: Names) -> list[str]:
    """Return the sketched tensors (by name on the ranks) whose elements the diagnosis needs."""
    wrong = [row for row in rows if not row.ok and row.status != UNCERTAIN]
    # Norms and clipping depend on all gradients.
    if any(row.quantity in (NORM, NORMS, CLIPPED) for row in wrong):
        return sorted(sketched)
    return [name for name in sorted(sketched) if names.get(name, name) in {row.name for row in wrong}]


def notes_of_rows(rows: Sequence[Row]) -> list[str]:
    """Return notes on differences that have no effect on training."""
    scaled = next((row for row in rows if row.quantity == LOSS and row.ok and "times the loss" in row.detail), None)
    return (
        [f"the value that backward() starts from is {scaled.detail}, so it counts as a scale of the loss"]
        if scaled
        else []
    )


def compare_tensor(compared: Compared, allowed: float, quantity: str, name: str, step: int | None) -> Row:
    """Return the row of a tensor: the largest distance of a rank from the reference, and elements that no rank stores."""
    worst: dict[int, float] = {}
    for part in compared.found:
        error = in_units(distance(part, compared.truth), allowed)
        worst[part.rank] = max(worst.get(part.rank, 0.0), error)
    wrong = tuple(rank for rank, error in worst.items() if error > 1)
    error = max(worst.values(), default=0.0)

    # NaN comes first, because distances mean nothing then, and missing elements before the error of those that are there.
    status, detail = "equal" if error <= 1 else "differs", ""
    if not isfinite(length(compared.truth)):
        status, detail, error = "not finite", _IN_BOTH, inf
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
        detail = f"{_REPLICAS_DIFFER} {apart}"
    return Row(quantity, name, step, status, error, allowed, wrong, detail)


def distance(part: LocalValue, truth: Tensor) -> float:
    """Return the 2-norm of (values of a rank - reference at the same elements); inf if the shapes do not match."""
    wanted = at_positions(truth, part.positions)
    if wanted.numel() != part.value.numel():
        return inf
    apart = length(flat(part.value) - wanted)
    return apart if isfinite(apart) else inf


def flat(tensor: Tensor) -> Tensor:
    """Flatten a tensor to one dimension, in double."""
    return tensor.detach().double().flatten()


def at_positions(whole: Tensor, positions: Tensor | None) -> Tensor:
    """Return the elements of a full tensor at these flat positions (None: all), as a one-dimensional fp64 tensor."""
    return flat(whole) if positions is None else flat(whole)[positions.flatten()]


def uncovered(compared: Compared) -> int:
    """Return the number of elements that no rank stores."""
    if any(part.positions is None for part in compared.found):
        return 0
    seen = torch.zeros(compared.truth.numel(), dtype=torch.bool)
    for part in compared.found:
        assert part.positions is not None
        seen[part.positions.flatten()] = True
    return int((~seen).sum())


def differing_elements(compared: Compared, allowed: float) -> Tensor | None:
    """Return the flat indices of elements that differ on some rank; None if all elements differ, or none."""
    wrong = torch.zeros(compared.truth.numel(), dtype=torch.bool)
    for part in compared.found:
        truth = at_positions(compared.truth, part.positions)
        if truth.numel() != part.value.numel():
            return None
        places = torch.arange(len(truth)) if part.positions is None else part.positions.flatten()
        wrong[places[(flat(part.value) - truth).abs() > allowed]] = True
    return wrong.nonzero().flatten() if 0 < int(wrong.sum()) < len(wrong) else None


def in_units(error: float, allowed: float) -> float:
    """Return error / allowed, the error in units of the tolerance."""
    if error == 0:
        return 0.0
    return error / allowed if allowed > 0 else inf


def _replicas_apart(found: Sequence[LocalValue], size: int, allowed: float) -> list[int]:
    """The ranks whose elements differ from those of the first rank that stores them."""
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


def _is_finite(part: LocalValue) -> bool:
    return not part.value.is_floating_point() or bool(part.value.isfinite().all())


def _tensors(
    quantity: str,
    step: int | None,
    some: Mapping[str, Compared],
    tolerance: Tolerance,
    rounding_only: Collection[str] = (),
) -> Iterator[Row]:
    typical = typical_spread(some.values())
    everything = sqrt(sum(length(compared.truth) ** 2 for compared in some.values() if compared.spread))
    for name, compared in some.items():
        row = compare_tensor(compared, tolerance.of(compared, typical), quantity, name, step)
        is_hidden = tolerance.hides_errors(compared.spread, length(compared.truth), everything)
        is_hidden = is_hidden and name not in rounding_only
        yield replace(row, status=UNCERTAIN) if is_hidden and row.status in ("equal", "differs") else row


def _recomputed(at: int, step: StepEvidence, tolerance: Tolerance) -> Iterator[Row]:
    """Compare the recomputed outputs of each rank's modules with the first outputs on the same rank, whether these are right or
    wrong.
    """
    typical = typical_spread(step.recomputed.values())
    for name, again in step.recomputed.items():
        if tolerance.hides_errors(again.spread, length(again.truth), 0.0):
            again = replace(again, spread=0.0)  # a rank recomputes with the same random numbers
        allowed = tolerance.of(again, typical)
        first = {part.rank: part for part in step.activations[name].found} if name in step.activations else {}
        errors = {
            part.rank: in_units(distance(LocalValue(part.rank, part.value), first[part.rank].value), allowed)
            for part in again.found
            if part.rank in first
        }
        wrong = tuple(rank for rank, error in errors.items() if error > 1)
        status = "differs" if wrong else "equal"
        yield Row(RECOMPUTED, name, at, status, max(errors.values(), default=0.0), allowed, wrong)


def _loss(at: int, step: StepEvidence, tolerance: Tolerance, largest: float) -> Row:
    """The row of the loss: equal if every rank has the loss of the global batch, or if the mean of the ranks' losses
    equals it.
    """
    allowed = tolerance.of_size(abs(step.loss), step.loss_spread)
    found = {rank: value for rank, value in enumerate(step.found_loss) if value is not None}
    mean = sum(found.values()) / len(found) if found else step.loss
    row = _number(LOSS, "loss", at, step.loss, found, allowed)
    if found and tolerance.hides_errors(step.loss_spread, abs(step.loss), largest):
        return replace(row, status=UNCERTAIN)
    if row.status == "differs" and in_units(abs(mean - step.loss), allowed) <= 1:
        return Row(LOSS, "loss", at, "equal", in_units(abs(mean - step.loss), allowed), allowed, (), "as a mean")
    return row


def _scale_of_loss(evidence: Evidence, step: StepEvidence) -> str:
    """The factor of the loss, if it is the size of a group: a scale that the script removes from the gradients."""
    found = [value for value in step.found_loss if value is not None]
    factor = sum(found) / len(found) / step.loss if found and step.loss else 0.0
    sizes = {evidence.world_size, *(len(group) for groups in evidence.groups.values() for group in groups)}
    for size in sorted(sizes - {1}):
        for value in (float(size), 1 / size):
            if abs(factor - value) <= max(1e-9, 2 * step.loss_spread / abs(step.loss)) * value:
                return f"{value:g} times the loss of a single process, while every gradient and weight agrees"
    return ""


def _norms(at: int, step: StepEvidence, tolerance: Tolerance) -> Iterator[Row]:
    """The rows of the norms. By the triangle inequality, norms move at most as far as the gradients do."""
    noise = {name: gradient.total.spread for name, gradient in step.gradients.items()}
    everything = sqrt(sum(value**2 for value in noise.values()))
    if step.norm is not None and any(value is not None for value in step.found_norm):
        row = _number(NORM, "norm", at, step.norm, _by_rank(step.found_norm), tolerance.of_size(step.norm, everything))
        is_hidden = tolerance.hides_errors(everything, step.norm, step.norm)
        yield replace(row, status=UNCERTAIN) if is_hidden else row
    for name, truth in step.norms.items():
        inside = [value for parameter, value in noise.items() if parameter == name or parameter.startswith(f"{name}.")]
        spread = sqrt(sum(value**2 for value in inside)) if inside else everything
        found = _by_rank(step.found_norms.get(name, ()))
        if found:
            row = _number(NORMS, name, at, truth, found, tolerance.of_size(truth, spread))
            is_hidden = tolerance.hides_errors(spread, truth, step.norm or truth)
            yield replace(row, status=UNCERTAIN) if is_hidden else row


def _by_rank(values: Sequence[float | None]) -> dict[int, float]:
    return {rank: value for rank, value in enumerate(values) if value is not None}


def _number(quantity: str, name: str, at: int, truth: float, found: Mapping[int, float], allowed: float) -> Row:
    if not isfinite(truth):
        return Row(quantity, name, at, "not finite", inf, allowed, (), _IN_BOTH)
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
"""The number of differing rows in a printed table; the others are only counted. JSON has all rows."""


@dataclass(frozen=True)
class Row:
    """One compared value, such as the gradient of a parameter in a step.

    `error` is the largest error of a rank, in units of the tolerance.
    """

    quantity: str
    name: str
    step: int | None
    status: str
    error: float
    tolerance: float
    ranks: tuple[int, ...] = ()
    """The ranks on which the value differs from the reference."""
    detail: str = ""

    @property
    def ok(self) -> bool:
        """Whether the value equals the reference within the tolerance."""
        return self.status == "equal"


@dataclass(frozen=True)
class Finding:
    """One mistake: its cause (a key of `CAUSES`), the affected parameters, and the sentence of the report."""

    cause: str
    parameters: tuple[str, ...]
    step: int | None
    sentence: str
    factor: float | None = None


@dataclass(frozen=True)
class Report:
    """The result of a comparison with a single process: rows, findings and notes. Print it, or call `to_json`."""

    findings: Sequence[Finding] = ()
    rows: Sequence[Row] = ()
    notes: Sequence[str] = field(default=())
    uncertain: str = ""
    """The reason why the run cannot be compared, if values change between runs of the single process."""

    @property
    def ok(self) -> bool:
        """Whether all compared values are equal within their tolerance."""
        return not self.findings and not self.uncertain and all(row.ok for row in self.rows)

    @property
    def is_uncertain(self) -> bool:
        """Whether all compared values match, but some values could not be compared."""
        return bool(self.uncertain) and not self.findings

    @property
    def causes(self) -> list[str]:
        """The causes of the findings, in the order in which a step computes the values."""
        return [finding.cause for finding in self.findings]

    def to_json(self) -> str:
        """Return all rows, findings and notes as one JSON object. Infinity and NaN are strings."""
        whole = {
            "ok": self.ok,
            "uncertain": self.uncertain,
            "findings": [asdict(finding) for finding in self.findings],
            "rows": [asdict(row) for row in self.rows],
            "notes": list(self.notes),
        }
        return json.dumps(_plain(whole), indent=1)

    def __str__(self) -> str:
        verdict = "matches a single-process run" if self.ok else "does NOT match a single-process run"
        if self.is_uncertain:
            verdict = "cannot tell whether the run matches a single-process run"
        lines = [verdict, *([self.uncertain] if self.uncertain else [])]
        for at, finding in enumerate(self.findings, 1):
            step = "" if finding.step is None else f" (step {finding.step})"
            lines.append(f"{at}. {finding.cause}{step}: {finding.sentence}")
        return "\n".join([*lines, "", _table(self.rows), *(f"note: {note}" for note in self.notes)])


def _table(rows: Sequence[Row]) -> str:
    """Differing rows, largest error first; then one line for all equal rows of a quantity and step."""
    wrong = sorted((row for row in rows if not row.ok), key=lambda row: (row.step or 0, -row.error))
    lines: list[tuple[str, ...]] = [("compared", "step", "name", "status", "error / tolerance", "ranks")]
    lines += [_line(row) for row in wrong[:_SHOWN]]
    if len(wrong) > _SHOWN:
        lines.append(("", "", f"... and {len(wrong) - _SHOWN} more that differ", "", "", ""))
    equal: dict[tuple[str, int | None], list[Row]] = {}
    for row in rows:
        if row.ok:
            equal.setdefault((row.quantity, row.step), []).append(row)
    for (quantity, step), some in equal.items():
        name, error = some[0].name if len(some) == 1 else f"{len(some)} of them", max(row.error for row in some)
        lines.append((quantity, _step(step), name, "equal", f"{error:.3g}", ""))
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def _line(row: Row) -> tuple[str, ...]:
    status = f"{row.status} ({row.detail})" if row.detail else row.status
    return row.quantity, _step(row.step), row.name, status, f"{row.error:.3g}", short_ranks(row.ranks)


def short_ranks(ranks: Sequence[int]) -> str:
    """Format a list of ranks; of a long list, only the first two ranks and the last one."""
    ranks = list(ranks)
    if not ranks:
        return ""
    return str(ranks) if len(ranks) <= 8 else f"[{ranks[0]}, {ranks[1]}, ... {ranks[-1]}] ({len(ranks)})"


def _these(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {short_ranks(ranks)}"


def _step(step: int | None) -> str:
    return "" if step is None else str(step)


def _plain(value: object) -> object:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return str(value) if isinstance(value, float) and not isfinite(value) else value
