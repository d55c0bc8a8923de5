"""Every compared thing against one process: its status and its worst error in units of the tolerance."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf, isfinite, nan, sqrt

import torch
from torch import Tensor

from colonnade.verification.comparing.evidence import Compared, Evidence, Part, StepEvidence
from colonnade.verification.comparing.report import Row
from colonnade.verification.comparing.tolerance import Tolerance, length, typical_spread

WEIGHTS_AT_START, LOSS, ACTIVATION, RECOMPUTED = "weights at start", "loss", "activation", "recomputed activation"
GRADIENT, NORM, NORMS, CLIPPED = "gradient", "norm", "norm of a part", "clipped gradient"
WEIGHTS, BUFFER, MASKS, MODE = "weights", "buffer", "dropout masks", "evaluation mode"


def compare(evidence: Evidence) -> list[Row]:
    """A row for everything that was recorded, in the order in which a step makes it."""
    tolerance = Tolerance.for_run(evidence)
    rows = list(_tensors(WEIGHTS_AT_START, None, evidence.weights_at_start, tolerance))
    rows += [Row(MODE, name, None, "differs", inf, 0.0, ranks) for name, ranks in evidence.resting_apart.items()]
    for name, ranks in evidence.masks_apart.items():
        rows.append(Row(MASKS, name, None, "differs" if ranks else "equal", inf if ranks else 0.0, 0.0, ranks))
    for at, step in enumerate(evidence.steps):
        loss = _loss(at, step, tolerance)
        rows += _without_parts(
            list(_tensors(ACTIVATION, at, _made_everywhere(step.activations), tolerance)),
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


def distance(part: Part, truth: Tensor) -> float:
    """2-norm of what the rank holds minus the truth at the same places; infinite if the shapes do not fit."""
    wanted = at_positions(truth, part.positions)
    if wanted.numel() != part.value.numel():
        return inf
    apart = length(flat(part.value) - wanted)
    return apart if isfinite(apart) else inf


def flat(tensor: Tensor) -> Tensor:
    """In double and in one row."""
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


def _replicas_apart(found: Sequence[Part], size: int, allowed: float) -> list[int]:
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


def _is_finite(part: Part) -> bool:
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
            part.rank: in_units(distance(Part(part.rank, part.value), first[part.rank].value), allowed)
            for part in again.found
            if part.rank in first
        }
        wrong = tuple(rank for rank, error in errors.items() if error > 1)
        status = "differs" if wrong else "equal"
        yield Row(RECOMPUTED, name, at, status, max(errors.values(), default=0.0), allowed, wrong)


def _made_everywhere(activations: Mapping[str, Compared]) -> dict[str, Compared]:
    """A module may run on the ranks only whose samples take it: what the others' would be is not known."""
    return {name: one for name, one in activations.items() if not uncovered(one)}


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
