"""Cases: a value that differs from the reference, with all known facts about it. A hypothesis is a function of a case.

- `Factor` and `near`: a number as a product of group sizes ("4 is the size of DATA squared").
- `Groups`: the process groups of the modes, each set of groups under one name.
- `Case`: a tensor. `GradientCase`: a gradient, with the local gradients (`raw`: of one rank and pass, before any
  reduction) and the required reductions.
- `NormCase` and `ClipCase`: the gradient norm, and the clipped gradients.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, product
from math import inf, isfinite, log2, prod
from statistics import median

import torch
from torch import Tensor

from colonnade.proof.compare import (
    NORM,
    Compared,
    Evidence,
    GradientEvidence,
    LocalValue,
    ParameterInfo,
    Row,
    StepEvidence,
    Tolerance,
    at_positions,
    distance,
    flat,
    in_units,
    length,
)

# --- A number as a product of sizes ---


ACCUMULATION = "accumulation"


@dataclass(frozen=True)
class Factor:
    """The value of a product of powers of mode sizes: {"DATA": 1, "TENSOR": -1} is data size / tensor size."""

    value: float
    powers: tuple[tuple[str, float], ...]

    def __str__(self) -> str:
        above = [_power(name, power) for name, power in self.powers if power > 0]
        below = [_power(name, -power) for name, power in self.powers if power < 0]
        return " * ".join(above or ["1"]) + "".join(f" / {name}" for name in below)


def factors(sizes: Mapping[str, int]) -> list[Factor]:
    """List the products of mode sizes that a mistake may multiply by, simple ones first.

    These are every size and its inverse, the products and ratios of two sizes, squares, square roots, and products of
    three.
    """
    names = [name for name, size in sizes.items() if size > 1]

    def single(*powers: float) -> list[Factor]:
        return [Factor(float(sizes[name]) ** power, ((name, power),)) for power in powers for name in names]

    def products(count: int) -> list[Factor]:
        found = []
        for some in combinations(names, count):
            for powers in product((1, -1), repeat=count):
                value = prod(float(sizes[name]) ** power for name, power in zip(some, powers, strict=True))
                if value != 1:
                    found.append(Factor(value, tuple(zip(some, powers, strict=True))))
        return found

    return [*single(1, -1), *products(2), *single(2, -2, 0.5, -0.5), *products(3)]


def near(value: float, sizes: Mapping[str, int], within: float) -> list[Factor]:
    """Return the factors whose distance from `value` is at most `within`, and of these only the simplest."""
    # Many products have the same value: in a layout of DATA 4 and TENSOR 2, 4 is also TENSOR squared. The simplest is likeliest.
    fitting = [factor for factor in factors(sizes) if abs(factor.value - value) <= within]
    simplest = min(map(_weight, fitting), default=0)
    return [factor for factor in fitting if _weight(factor) == simplest]


def _weight(factor: Factor) -> int:
    """The complexity of a factor: a square is as simple as a product of two, and roots come last."""
    if any(abs(power) < 1 for _, power in factor.powers):
        return 4
    return sum(int(abs(power)) for _, power in factor.powers)


def _power(name: str, power: float) -> str:
    text = f"size of {name}" if name != ACCUMULATION else ACCUMULATION
    if power == 1:
        return text
    return f"({text})²" if power == 2 else f"√({text})"


def digits(value: float) -> str:
    """Format a factor with enough digits that a factor other than 1 is never printed as "1"."""
    return next((text for n in (6, 9, 12, 17) if (text := f"{value:.{n}g}") != "1"), "1")


def either(products: Sequence[Factor]) -> str:
    """Format the products of sizes that a factor may stand for, in brackets: " (size of DATA or size of TENSOR)"."""
    return f" ({' or '.join(map(str, products))})" if products else ""


def is_loss_scale(value: float, within: float) -> bool:
    """Return whether a factor is a large power of two, as loss scales are."""
    return value >= 256 and abs(value / 2 ** round(log2(value)) - 1) <= max(within, 1e-6)


# --- Groups and tensors ---

Candidate = Callable[[LocalValue], Tensor | None]
"""The values that a hypothesis expects on a rank (flat, double); None: unknown."""
_MODES_AT_ONCE = 3
_WHOLE = ("GLOBAL", "MODEL")
"""Modes of several axes. If a mode of one axis has the same ranks, users know them by the name of that mode."""


class Groups:
    """The process groups of all modes, each distinct set of groups under one name.

    If several modes have the same groups, the name is that of the mode that placements use.
    """

    def __init__(self, evidence: Evidence) -> None:
        required = {mode for info in evidence.parameters.values() for mode, _, _ in info.required}
        listed = {mode: sorted(tuple(group) for group in some) for mode, some in evidence.groups.items()}

        # Of several modes with the same groups, users know the one that their placements name, then the one that shards data,
        # then any mode of one axis.
        named = sorted(
            listed, key=lambda mode: (mode not in required, mode not in evidence.distinct_data, mode in _WHOLE)
        )
        self._name = {mode: next(other for other in named if listed[other] == listed[mode]) for mode in listed}
        self.of_mode = {mode: listed[mode] for mode in named if self._name[mode] == mode}

        # A mode whose groups are what smaller modes reach together (the whole world, for example) says nothing that these do
        # not say better, unless a reduction over it is required.
        products = []
        for mode, groups in self.of_mode.items():
            smaller = [
                other
                for other, some in self.of_mode.items()
                if other != mode and all(any(set(inner) < set(group) for group in groups) for inner in some)
            ]
            if mode not in required and smaller and all(self.joint(smaller, group[0]) == group for group in groups):
                products.append(mode)
        for mode in products:
            del self.of_mode[mode]
        self.sizes = {mode: max(map(len, some), default=1) for mode, some in self.of_mode.items()}
        self.distinct = tuple(evidence.distinct_data)
        placements = " ".join(info.placement for info in evidence.parameters.values())
        self._placed = [mode for mode in listed if re.search(rf"\b{mode}\b", placements, re.IGNORECASE)]

    def spelled(self, factor: Factor) -> str:
        """Format a product of sizes. After each mode, name the other modes of placements with the same groups."""
        text = str(factor)
        for mode, _ in factor.powers:
            others = [other for other in self._placed if other != mode and self._name.get(other) == mode]
            text = text.replace(f"size of {mode}", " or ".join(f"size of {name}" for name in (mode, *others)))
        return text

    def name(self, mode: str) -> str:
        """Return the name under which this object lists the groups of a mode."""
        return self._name.get(mode, mode)

    def joint(self, modes: Iterable[str], rank: int) -> tuple[int, ...]:
        """Return the ranks that `rank` can reach through groups of these modes, including itself."""
        groups = [group for mode in modes for group in self.of_mode.get(mode, ())]
        reached, grew = {rank}, True
        while grew:
            more = {other for group in groups if reached & set(group) for other in group}
            grew = not more <= reached
            reached |= more
        return tuple(sorted(reached))

    def subsets(self) -> list[tuple[str, ...]]:
        """List sets of up to three modes. If several sets reach the same ranks, list only the smallest."""
        some = [chosen for count in range(_MODES_AT_ONCE + 1) for chosen in combinations(self.of_mode, count)]
        seen: dict[tuple[tuple[int, ...], ...], tuple[str, ...]] = {}
        ranks = sorted({rank for groups in self.of_mode.values() for group in groups for rank in group})
        for chosen in some:
            seen.setdefault(tuple(self.joint(chosen, rank) for rank in ranks), chosen)
        return list(seen.values())


@dataclass(frozen=True, kw_only=True)
class Case:
    """A tensor that differs from the reference on some ranks, as the input of a hypothesis."""

    evidence: Evidence
    groups: Groups
    compared: Compared
    row: Row
    before: Tensor | None = None
    """The reference tensor of the previous step (or of the start)."""

    @cached_property
    def wrong(self) -> list[LocalValue]:
        """The values of the ranks that differ from the reference by more than the tolerance."""
        return [p for p in self.compared.found if in_units(distance(p, self.compared.truth), self.row.tolerance) > 1]

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of the modes, and the number of accumulated passes."""
        return {**self.groups.sizes, ACCUMULATION: self.evidence.accumulation}

    def truth(self, part: LocalValue) -> Tensor | None:
        """Return the reference values of the elements in `part`, or None if their number differs."""
        wanted = at_positions(self.compared.truth, part.positions)
        return wanted if wanted.numel() == part.value.numel() else None

    def residual(self, candidate: Candidate, factor: float = 1.0) -> float:
        """Return the largest distance of a wrong rank from factor * candidate, in tolerances.

        The tolerance grows with the size of the candidate. Returns inf if the candidate is unknown on a rank.
        """
        worst = 0.0
        for part in self.wrong:
            expected = candidate(part)
            if expected is None or expected.numel() != part.value.numel():
                return inf
            # Rounding errors are proportional to the numbers, so larger expected values get a larger tolerance.
            size, wanted = abs(factor) * length(expected), length(self.compared.truth)
            allowed = self.row.tolerance * max(1.0, size / wanted if wanted else 1.0)
            left = length(flat(part.value) - factor * expected)
            worst = max(worst, in_units(left, allowed) if isfinite(left) else inf)
        return worst if self.wrong else inf

    def moved_to(self, whole: Tensor) -> Candidate:
        """Return a candidate that reads the elements of each rank from another full tensor of the same shape."""

        def candidate(part: LocalValue) -> Tensor | None:
            return at_positions(whole, part.positions) if whole.numel() == self.compared.truth.numel() else None

        return candidate

    def within(self, elements: Tensor) -> Case:
        """Return a copy of the case for a part of the tensor: the elements with these indices."""
        before = None if self.before is None else flat(self.before)[elements]
        return replace(self, compared=_within(self.compared, elements), before=before)

    def fit(self, candidate: Candidate) -> tuple[float, float] | None:
        """Fit the factor between the wrong values and a candidate by least squares.

        Returns (factor, the uncertainty of the factor), or None if the candidate is unknown or zero.
        """
        above, below = 0.0, 0.0
        for part in self.wrong:
            expected = candidate(part)
            if expected is None or expected.numel() != part.value.numel():
                return None
            above += float(flat(part.value) @ expected)
            below += float(expected @ expected)
        if below == 0 or not isfinite(above / below):
            return None
        # A change of the factor by this much moves the product by twice the tolerance.
        factor = above / below
        return factor, 2 * self.row.tolerance * max(1.0, abs(factor)) / below**0.5


@dataclass(frozen=True, kw_only=True)
class GradientCase(Case):
    """A gradient that differs from the reference, with the local gradients that were reduced to it."""

    name: str
    gradient: GradientEvidence
    step: StepEvidence
    at: int
    later: Compared | None = None
    """The gradient of the next step."""
    healthy: frozenset[str] = frozenset()
    """The parameters whose gradients in this step are right."""
    raw_scale: float = 1.0
    """The factor from reduced local gradients to the final gradients, inferred from the healthy parameters."""

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of the modes, and the number of passes.

        Passes are those of accumulation or, without accumulation, the micro-batches of a pipeline.
        """
        # Without accumulation, the passes of a step are the micro-batches of its pipeline.
        passes = self.evidence.accumulation if self.evidence.accumulation > 1 else len(self.gradient.raw)
        return {**self.groups.sizes, ACCUMULATION: passes}

    @property
    def info(self) -> ParameterInfo:
        """The placement, the ledger rows and the required reductions of the parameter."""
        return self.evidence.parameters.get(self.name, ParameterInfo())

    @property
    def required(self) -> dict[str, float]:
        """The divisor of each required reduction, by mode."""
        return {self.groups.name(mode): divisor for mode, _, divisor in self.info.required}

    @property
    def everywhere(self) -> bool:
        """Whether all gradients of the step differ from the reference."""
        return not self.healthy

    def shared_with(self, mode: str) -> str | None:
        """Return a parameter with a right gradient that the same handler reduces over this mode; None if there is none.

        A mistake in that handler would have made the gradient of that parameter wrong too.
        """
        divisor, own = self.required.get(mode), {line.rsplit(" by ")[-1] for line in self.info.ledger}
        for name in sorted(self.healthy & self.evidence.parameters.keys()):
            info = self.evidence.parameters[name]
            is_same = any(self.groups.name(other) == mode and by == divisor for other, _, by in info.required)
            if is_same and (not own or not info.ledger or own & {line.rsplit(" by ")[-1] for line in info.ledger}):
                return name
        return None

    def is_replicated(self, mode: str) -> bool:
        """Return whether all ranks of a group of this mode store the same elements of the parameter."""
        held = {part.rank: part for part in self.compared.found}
        return all(
            other in held and same_places(held[other], part)
            for part in self.compared.found
            for other in self.groups.joint((mode,), part.rank)
        )

    @property
    def forward_is_right(self) -> bool:
        """Whether the mean of the ranks' losses equals the loss of the reference; False if no rank has a loss."""
        found = [loss for loss in self.step.found_loss if loss is not None]
        allowed = Tolerance.for_run(self.evidence).of_size(abs(self.step.loss), self.step.loss_spread)
        return bool(found) and abs(sum(found) / len(found) - self.step.loss) <= allowed

    def differs_over(self, mode: str) -> bool:
        """Return whether the ranks of a mode have different local gradients for the same elements."""
        return any(
            length(a - b) > self.row.tolerance
            for part in self.wrong
            for other in self.groups.joint((mode,), part.rank)
            if (a := self.raw_at(part.rank, part)) is not None and (b := self.raw_at(other, part)) is not None
        )

    def within(self, elements: Tensor) -> GradientCase:
        """Return a copy of the case for a part of the parameter: the elements with these indices."""
        gradient = replace(
            self.gradient,
            raw=[[part for x in some if (part := _part_within(x, elements)) is not None] for some in self.gradient.raw],
            truth_of_passes=[flat(x)[elements] for x in self.gradient.truth_of_passes],
            truth_of_data_ranks=[flat(x)[elements] for x in self.gradient.truth_of_data_ranks],
            clipped=None,
        )
        return replace(super().within(elements), gradient=gradient, later=None)  # type: ignore[call-arg, return-value]

    @property
    def divisor(self) -> float:
        """The product of the divisors of all required reductions."""
        return prod(self.required.values())

    @cached_property
    def raws(self) -> dict[int, LocalValue]:
        """The local gradient of each rank: the sum over its passes, times `raw_scale`."""
        return sum_of_passes(self.gradient.raw, self.raw_scale)

    def raw_at(self, rank: int, part: LocalValue) -> Tensor | None:
        """Return the local gradient of another rank, for the elements that `part` has; None if unknown.

        The elements are matched by their indices in the tensor of each rank.
        """
        other = self.raws.get(rank)
        # A rank without a gradient stores the same elements as the others, or none.
        own = self.raws.get(part.rank, other)
        if other is None or own is None or other.value.numel() != own.value.numel():
            return None
        # `part` may be a slice of the rank's tensor (ZeRO). Its indices there are also those in the tensors of other ranks.
        places = places_in(part, own)
        return None if places is None else flat(other.value)[places]

    def required_raws(self, part: LocalValue) -> Tensor | None:
        """Stack the local gradients of the ranks of the required reductions for the elements of `part`, one rank per row.

        Returns None if the gradient of one of these ranks is unknown.
        """
        some = [
            self.raw_at(rank, part) for rank in self.groups.joint(tuple(self.required), part.rank) if rank in self.raws
        ]
        return None if not some or any(x is None for x in some) else torch.stack(some)  # type: ignore[arg-type]

    def of_pass(self, raw: Sequence[LocalValue]) -> GradientCase:
        """Return a copy of the case in which the step has only one pass, with these local gradients."""
        return replace(self, gradient=replace(self.gradient, raw=[raw]))

    def raw_sum(self, modes: Sequence[str]) -> Candidate:
        """Return the candidate "sum of local gradients over all ranks that these modes reach"."""

        def candidate(part: LocalValue) -> Tensor | None:
            ranks = self.groups.joint(modes, part.rank)
            some = [self.raw_at(rank, part) for rank in ranks if rank in self.raws]
            if not some and self.raws:
                return torch.zeros(part.value.numel(), dtype=torch.float64)  # no pass of these ranks used it
            return None if not some or any(x is None for x in some) else torch.stack(some).sum(0)  # type: ignore[arg-type]

        return candidate

    @cached_property
    def due(self) -> Candidate:
        """The candidate "local gradients after all required reductions", which is the correct gradient."""
        total = self.raw_sum(tuple(self.required))

        def candidate(part: LocalValue) -> Tensor | None:
            summed = total(part)
            return None if summed is None else summed / self.divisor

        return candidate

    @cached_property
    def backward_is_right(self) -> bool | None:
        """Whether the local gradients, correctly reduced, equal the reference gradient; None if they are unknown."""
        if not self.raws:
            return None
        error = 0.0
        for part in self.wrong:
            due, truth = self.due(part), self.truth(part)
            if due is None or truth is None:
                return None
            error = max(error, in_units(length(due - truth), self.row.tolerance))
        return error <= 1

    @cached_property
    def local_factor(self) -> float | None:
        """The factor between the correctly reduced local gradients of every pass and the gradients of the reference.

        None if the passes have no common factor, or if their gradients are unknown.
        """
        truths, above, below = self.gradient.truth_of_passes, 0.0, 0.0
        if not self.wrong or not self.gradient.raw or len(self.gradient.raw) != len(truths):
            return None
        pairs: list[tuple[Tensor, Tensor]] = []
        for raw, truth in zip(self.gradient.raw, truths, strict=True):
            for part in self.wrong:
                due = self.of_pass(raw).due(part)
                wanted = at_positions(truth, part.positions)
                if due is None or len(due) != len(wanted):
                    return None
                pairs.append((due, wanted))
                above, below = above + float(due @ wanted), below + float(wanted @ wanted)
        if below == 0:
            return None
        # A script may scale gradients after the backward pass, so those of a pass may be larger than the total.
        factor = above / below
        size = max(length(wanted) for _, wanted in pairs) / (length(self.compared.truth) or 1.0)
        allowed = self.row.tolerance * max(1.0, abs(factor)) * max(1.0, size)
        return factor if all(length(due - factor * wanted) <= allowed for due, wanted in pairs) else None

    @cached_property
    def reduction_is_right(self) -> bool | None:
        """Whether the gradient of each rank equals its local gradients after the required reductions.

        None if the local gradients are unknown. They may be wrong themselves.
        """
        return self.residual(self.due) <= 1 if self.raws else None


def _within(compared: Compared, elements: Tensor) -> Compared:
    found = [part for x in compared.found if (part := _part_within(x, elements)) is not None]
    return replace(compared, truth=flat(compared.truth)[elements], found=found)


def _part_within(part: LocalValue, elements: Tensor) -> LocalValue | None:
    if part.positions is None:
        return LocalValue(part.rank, flat(part.value)[elements]) if part.value.numel() > int(elements.max()) else None
    places = part.positions.flatten()
    chosen = torch.isin(places, elements)
    if not bool(chosen.any()):
        return None
    return LocalValue(part.rank, flat(part.value)[chosen], torch.searchsorted(elements, places[chosen]))


def same_places(a: LocalValue, b: LocalValue) -> bool:
    """Return whether two ranks store the same elements of a tensor."""
    if a.positions is None or b.positions is None:
        return a.positions is b.positions
    return torch.equal(a.positions.flatten(), b.positions.flatten())


def sum_of_passes(raw: Sequence[Sequence[LocalValue]], scale: float = 1.0) -> dict[int, LocalValue]:
    """Sum the local gradients of each rank over its passes; leaves out ranks whose passes have different shapes."""
    summed: dict[int, LocalValue] = {}
    odd = set()
    for some in raw:
        for part in some:
            value, before = flat(part.value) * scale, summed.get(part.rank)
            if before is not None and before.value.numel() != value.numel():
                odd.add(part.rank)
            elif before is not None:
                value = before.value + value
            summed[part.rank] = LocalValue(part.rank, value, part.positions)
    return {rank: part for rank, part in summed.items() if rank not in odd}


def places_in(part: LocalValue, holder: LocalValue) -> Tensor | None:
    """Return the indices of the elements of `part` in the tensor of `holder`; None if `holder` lacks some of them."""
    if part.positions is None:
        return torch.arange(part.value.numel()) if holder.positions is None else None
    wanted = part.positions.flatten()
    if holder.positions is None:
        return wanted
    held = holder.positions.flatten()
    if torch.equal(held, wanted):
        return torch.arange(len(held))
    if not len(held):
        return None
    order = held.argsort()
    at = torch.searchsorted(held[order], wanted).clamp(max=len(held) - 1)
    return order[at] if torch.equal(held[order[at]], wanted) else None


_SAME_DIRECTION = 0.03
"""The largest relative distance of two gradients in the same direction: more than the rounding of bf16."""


def raw_scale(evidence: Evidence, groups: Groups, step: StepEvidence, wrong: Collection[str]) -> float:
    """Return the factor between reduced local gradients and final gradients, measured on up to 20 right gradients.

    Returns 1 if these parameters have different factors.
    """
    ratios: list[float] = []
    for name, gradient in step.gradients.items():
        if name in wrong or not gradient.raw or not gradient.total.found or len(ratios) == 20:
            continue
        # The row only completes the case: the factor does not depend on a tolerance.
        row = Row("gradient", name, None, "equal", 0.0, 0.0)
        case = GradientCase(
            evidence=evidence,
            groups=groups,
            compared=gradient.total,
            row=row,
            name=name,
            gradient=gradient,
            step=step,
            at=0,
        )
        part = gradient.total.found[0]
        due, truth = case.due(part), case.truth(part)
        if due is not None and truth is not None and float(due @ due) > 0:
            ratio = float(truth @ due) / float(due @ due)
            # A script may add something to gradients, or clear them between passes. Then there is no such factor.
            if length(truth - ratio * due) <= _SAME_DIRECTION * length(truth):
                ratios.append(ratio)
    usual = median(ratios) if ratios else 1.0
    return usual if all(abs(ratio - usual) <= _SAME_DIRECTION * abs(usual) for ratio in ratios) else 1.0


# --- Norms and clipped gradients ---


@dataclass(frozen=True)
class NormCase:
    """A norm that differs from the reference: of all gradients, or of the gradients of one part of the model."""

    evidence: Evidence
    groups: Groups
    step: StepEvidence
    at: int
    row: Row

    @property
    def found(self) -> dict[int, float]:
        """The norm that each rank reported."""
        values = self.step.found_norm if self.row.quantity == NORM else self.step.found_norms[self.row.name]
        return {rank: value for rank, value in enumerate(values) if value is not None}

    @cached_property
    def parts(self) -> dict[str, Sequence[LocalValue]]:
        """The values of the ranks, for each gradient that counts in the norm."""
        name, gradients = self.row.name, self.step.gradients
        inside = [key for key in gradients if key == name or key.startswith(f"{name}.")]
        names = inside if self.row.quantity != NORM and inside else list(gradients)
        return {key: gradients[key].total.found for key in names}

    @property
    def truth(self) -> float:
        """The norm in the reference."""
        return (self.step.norm if self.row.quantity == NORM else self.step.norms[self.row.name]) or 0.0

    @property
    def p(self) -> float:
        """The order p of the p-norm."""
        return self.evidence.norm_type

    def power(self, part: LocalValue) -> float:
        """Return the sum of |x|^p over the elements that one rank stores."""
        return float(flat(part.value).abs().pow(self.p).sum())

    @cached_property
    def by_rank(self) -> dict[int, float]:
        """The sum of |x|^p over all gradients that count, for each rank."""
        totals: dict[int, float] = {}
        for some in self.parts.values():
            for part in some:
                totals[part.rank] = totals.get(part.rank, 0.0) + self.power(part)
        return totals

    @cached_property
    def once(self) -> dict[str, float]:
        """The sum of |x|^p of each reference gradient, in which every element counts once."""
        wholes = {name: self.step.gradients[name].total.truth for name in self.parts}
        return {name: float(flat(whole).abs().pow(self.p).sum()) for name, whole in wholes.items()}

    @cached_property
    def weights(self) -> dict[str, float]:
        """The sum of |x|^p of each reference weight before the step."""
        before = self.evidence.steps[self.at - 1].weights if self.at else self.evidence.weights_at_start
        wholes = {name: before[name].truth if name in before else torch.zeros(1) for name in self.parts}
        return {name: float(flat(whole).abs().pow(self.p).sum()) for name, whole in wholes.items()}

    def residual(self, value: Callable[[int], float] | float) -> float:
        """Return the largest distance between the norm of a rank and the norm that a hypothesis expects, in tolerances.

        `value` is the expected norm, or a function that returns the norm for a rank.
        """
        tolerance, worst = Tolerance.for_run(self.evidence), 0.0
        for rank, found in self.found.items():
            expected = value(rank) if callable(value) else value
            # The noise of the gradients moves a wrong norm in proportion to its size.
            noise = self.row.tolerance * (expected / self.truth if self.truth else 1.0)
            worst = max(worst, in_units(abs(found - expected), max(tolerance.of_size(expected), noise)))
        return worst

    def root(self, power: float) -> float:
        """Return the norm for a sum of |x|^p."""
        return max(power, 0.0) ** (1 / self.p)

    def is_sharded(self, name: str, mode: str) -> bool:
        """Return whether a gradient is sharded over a mode: its ranks store different elements, or some store none."""
        by_rank = {part.rank: part for part in self.parts[name]}
        return any(
            rank not in by_rank or not same_places(by_rank[rank], part)
            for part in self.parts[name]
            for rank in self.groups.joint((mode,), part.rank)
        )


Coefficient = Callable[[str, int], float]
"""The clip coefficient that a hypothesis expects: a function of (parameter, rank)."""


@dataclass(frozen=True)
class ClipCase:
    """All clipped gradients of a step. `rows` has the rows of the gradients that differ from the reference.

    Hypotheses assume one clip coefficient for all gradients, `by(norm)`.
    """

    evidence: Evidence
    groups: Groups
    step: StepEvidence
    at: int
    rows: tuple[Row, ...]

    @property
    def limit(self) -> float:
        """The `max_norm` of the run; inf without a limit."""
        return self.evidence.max_norm if self.evidence.max_norm is not None else float("inf")

    @property
    def due(self) -> float:
        """The clip coefficient of the reference."""
        return min(1.0, self.limit / ((self.step.norm or 0.0) + 1e-6))

    @cached_property
    def norms(self) -> NormCase:
        """A `NormCase` of all gradients in this step, for hypotheses that need the norm of some ranks or parameters."""
        row = Row(NORM, "norm", self.at, "equal", 0.0, 0.0)
        return NormCase(self.evidence, self.groups, self.step, self.at, row)

    def residual(self, coefficient: Coefficient) -> float:
        """Return the largest distance of a wrong clipped gradient from coefficient * gradient, in tolerances.

        `coefficient` is a function of (parameter, rank).
        """
        worst = 0.0
        for row in self.rows:
            gradient = self.step.gradients[row.name]
            unclipped = {part.rank: part for part in gradient.total.found}
            for part in gradient.clipped.found if gradient.clipped is not None else ():
                before = unclipped.get(part.rank)
                if before is None or before.value.numel() != part.value.numel():
                    return inf
                factor = coefficient(row.name, part.rank)
                allowed = row.tolerance * max(1.0, factor / self.due)
                worst = max(worst, in_units(length(flat(part.value) - factor * flat(before.value)), allowed))
        return worst

    def by(self, norm: float) -> float:
        """Return the clip coefficient for a norm."""
        return min(1.0, self.limit / (norm + 1e-6))
