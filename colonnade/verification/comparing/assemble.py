"""From what the ranks noted and what one process gave to `Evidence`. Plain functions on plain data."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from colonnade.errors import listed
from colonnade.verification.comparing.compare import distance
from colonnade.verification.comparing.evidence import (
    Compared,
    Evidence,
    GradientEvidence,
    ParameterInfo,
    Part,
    StepEvidence,
)
from colonnade.verification.comparing.tolerance import length
from colonnade.verification.runs.masks import Dropped
from colonnade.verification.runs.record import Loss, Piece, Record, StepRecord
from colonnade.verification.runs.reference import Spread, Truth, norm_of

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


def assemble(
    records: Sequence[Record],
    truth: Sequence[Truth],
    spreads: Sequence[Spread],
    start: Mapping[str, Tensor],
    names: Names,
    terms: int,
    notes: Sequence[str] = (),
    masks_apart: Mapping[str, tuple[int, ...]] | None = None,
) -> Evidence:
    """The evidence. `spreads`: by step, how far the reference moves."""
    about = records[0].about
    side_by_side = _SideBySide(records, names, terms)
    return Evidence(
        world_size=len(records),
        groups=about["groups"],
        distinct_data=about["distinct_data"],
        parameters=_parameters(records, names),
        weights_at_start={
            name: Compared(start[name], side_by_side.held(name, lambda record: record.start))
            for name in side_by_side.names(start)
        },
        steps=[
            side_by_side.step(at, one, spread)
            for at, (one, spread) in enumerate(zip(truth, spreads, strict=True))
            if all(at < len(record.steps) for record in records)
        ],
        dtype=about["dtype"],
        accumulation=about["accumulation"],
        max_norm=about["max_norm"],
        norm_type=about["norm_type"],
        notes=list(
            dict.fromkeys(
                [
                    *(note for record in records for note in record.notes),
                    *notes,
                    *_not_stepped(records, names),
                    *_not_cut(records),
                ]
            )
        ),
        masks_apart=masks_apart or {},
        resting_apart=_resting_apart(records),
        cut_apart=side_by_side.cut_apart(truth[0].activations) if truth else (),
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
        stage = record.about.get("coordinates", {}).get("pipeline", 0)
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


def _resting_apart(records: Sequence[Record]) -> dict[str, tuple[int, ...]]:
    """Of modules that train on some ranks: the ranks on which they are in evaluation mode, if there are any."""
    rests: dict[str, dict[bool, list[int]]] = {}
    for record in records:
        for name, value in record.resting.items():
            rests.setdefault(name, {}).setdefault(value, []).append(record.rank)
    return {name: tuple(ranks[True]) for name, ranks in rests.items() if len(ranks) > 1}


def dropped_by(records: Sequence[Record], off: Collection[str]) -> Dropped:
    """What the ranks dropped. Ranks see the same share of the data that differ in no axis by which batches are cut."""
    shares: dict[Any, list[int]] = {}
    for record in records:
        at = record.about["coordinates"]
        cut = tuple(at[axis.name] for axis in record.about["axes"] if axis.distinct and not axis.may_repeat)
        shares.setdefault(cut, []).append(record.rank)
    steps = [
        {record.rank: record.steps[at].masks for record in records}
        for at in range(min(len(record.steps) for record in records))
    ]
    nowhere = {*off, *(name for record in records for name in record.about["zeroed"])}
    return Dropped(steps, records[0].about["groups"], [shares[key] for key in sorted(shares)], nowhere)


class _SideBySide:
    """Looks up what the ranks hold of each tensor of the reference."""

    def __init__(self, records: Sequence[Record], names: Names, terms: int) -> None:
        self.records, self.terms = records, terms
        self.local: list[dict[str, str]] = [
            {names.get(name, name): name for name in reversed(list(record.tensors))} for record in records
        ]
        self.axes = records[0].about["axes"]

    def names(self, known: Iterable[str]) -> list[str]:
        return [name for name in known if any(name in local for local in self.local)]

    def held(self, name: str, read: Any) -> list[Part]:
        """What each rank has of a weight or buffer."""
        found = []
        for record, local in zip(self.records, self.local, strict=True):
            mine = local.get(name)
            if mine is not None and mine in (tensors := read(record)):
                found.append(Part(record.rank, tensors[mine], record.tensors[mine].positions))
        return found

    def step(self, at: int, truth: Truth, spread: Spread) -> StepEvidence:
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

    def _compared(self, truth: Tensor, found: list[Part], spread: Spread, kind: str, name: str) -> Compared:
        return Compared(truth, found, spread.tensors.get((kind, name), 0.0), self.terms)

    def _gradient(self, name: str, at: int, truth: Truth, spread: Spread) -> GradientEvidence:
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

    def _pieces(self, name: str, at: int, kind: str) -> list[Part]:
        found = []
        for record, local in zip(self.records, self.local, strict=True):
            mine, step = local.get(name, ""), record.steps[at]
            pieces: Sequence[Piece] = getattr(step, kind).get(mine, ())
            divisor = 1.0
            if kind == "clipped" and not pieces and step.norm is not None:
                pieces, divisor = step.total.get(mine, ()), step.divisors.get(mine, 1.0)
            for piece in pieces:
                value = piece.value if divisor == 1.0 else piece.value / divisor
                found.append(Part(record.rank, value, piece.positions))
        return found

    def _raw(self, name: str, at: int) -> list[list[Part]]:
        passes: dict[int, list[Part]] = {}
        for record, local in zip(self.records, self.local, strict=True):
            mine = local.get(name, "")
            for number, value in record.steps[at].raw.get(mine, {}).items():
                passes.setdefault(number, []).append(Part(record.rank, value, record.tensors[mine].positions))
        return [passes[number] for number in sorted(passes)]

    def _losses(self, steps: Sequence[StepRecord]) -> list[float | None]:
        """Of each rank: the mean over those that see other data and are else like it."""
        mine = [mean_of(step.losses) for step in steps]
        found: list[float | None] = []
        for rank in range(len(steps)):
            alike = [each for other, each in enumerate(mine) if self._same_but_data(rank, other)]
            known = [each for each in alike if each is not None]
            found.append((mean_of(known) or (None, None))[0] if len(known) == len(alike) else None)
        return found

    def _same_but_data(self, rank: int, other: int) -> bool:
        here, there = (self.records[each].about["coordinates"] for each in (rank, other))
        return all(here[axis.name] == there[axis.name] for axis in self.axes if not axis.distinct)

    def _norms(self, truth: Truth, steps: Sequence[StepRecord]) -> dict[str, float]:
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
        kind = self.records[0].about["norm_type"]
        return {slot: norm_of(gradients, kind) for slot, gradients in slots.items() if slot in steps[0].norms}

    def _activations(self, seen: Sequence[Mapping[str, Tensor]], truth: Truth, spread: Spread) -> dict[str, Compared]:
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

    def _rows_of(self, record: Record, mine: Tensor, truth: Tensor) -> Part | None:
        """Its rows of the batch, and its tokens of the sequences; None: cut in another way."""
        if mine.shape == truth.shape:
            return Part(record.rank, mine)
        axes = [axis for axis in self.axes if axis.distinct and axis.size > 1]
        for chosen in ([axis for axis in axes if not axis.may_repeat], axes):
            places = torch.arange(truth.numel()).view(truth.shape)
            for axis in chosen:
                if places.dim() <= axis.dim or places.shape[axis.dim] % axis.size:
                    break
                places = places.chunk(axis.size, axis.dim)[record.about["coordinates"][axis.name]]
            if places.shape == mine.shape:
                return Part(record.rank, mine, places)
        return None


def _in_another_order(parts: Sequence[Part], whole: Tensor) -> bool:
    """Whether the parts have the tokens of the whole at other places: sequences need not be cut into blocks."""
    if whole.dim() < 3 or any(part.positions is None for part in parts):
        return False
    mine = torch.cat([part.value.double().norm(dim=-1).flatten() for part in parts]).sort().values
    theirs = whole.double().norm(dim=-1).flatten().sort().values
    return len(mine) == len(theirs) and bool((mine - theirs).norm() <= 1e-6 * theirs.norm())


def _differs(compared: Compared) -> bool:
    return any(distance(part, compared.truth) > 1e-3 * length(compared.truth) for part in compared.found)


def _cover(parts: Sequence[Part], whole: Tensor) -> bool:
    """Whether the parts together have all elements."""
    if any(part.positions is None for part in parts):
        return True
    seen = torch.zeros(whole.numel(), dtype=torch.bool)
    for part in parts:
        if part.positions is not None:
            seen[part.positions.reshape(-1)] = True
    return bool(parts) and bool(seen.all())


def mean_of(losses: Sequence[Loss | None]) -> Loss | None:
    """Of losses with counts, the mean over all; of plain means, their mean."""
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
