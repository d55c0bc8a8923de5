"""Cases: one thing that differs, with all that is known about it. A hypothesis is a function of a case.

- `Factor` and `near`: a number read as a product of sizes ("4 is the size of DATA squared").
- `Groups`: the groups of the modes, each set of groups under one name.
- `Case`: a tensor. `GradientCase`: a gradient, with the raw gradients of each pass and rank, and what is owed.
- `NormCase` and `ClipCase`: the norm, and the clipped gradients.
"""

from __future__ import annotations

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
    HeldPart,
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
    """A product of powers of sizes: {"DATA": 1, "TENSOR": -1} is data size / tensor size."""

    value: float
    powers: tuple[tuple[str, float], ...]

    def __str__(self) -> str:
        above = [_power(name, power) for name, power in self.powers if power > 0]
        below = [_power(name, -power) for name, power in self.powers if power < 0]
        return " * ".join(above or ["1"]) + "".join(f" / {name}" for name in below)


def factors(sizes: Mapping[str, int]) -> list[Factor]:
    """Every size and its inverse, products and ratios of two, squares and roots, products of three; simple ones first."""
    names = [name for name, size in sizes.items() if size > 1]
    return [
        *_alone(sizes, names, (1, -1)),
        *_together(sizes, names, 2),
        *_alone(sizes, names, (2, -2, 0.5, -0.5)),
        *_together(sizes, names, 3),
    ]


def _alone(sizes: Mapping[str, int], names: Sequence[str], powers: Sequence[float]) -> list[Factor]:
    return [Factor(float(sizes[name]) ** power, ((name, power),)) for power in powers for name in names]


def _together(sizes: Mapping[str, int], names: Sequence[str], count: int) -> list[Factor]:
    found = []
    for some in combinations(names, count):
        for powers in product((1, -1), repeat=count):
            value = 1.0
            for name, power in zip(some, powers, strict=True):
                value *= float(sizes[name]) ** power
            if value != 1:
                found.append(Factor(value, tuple(zip(some, powers, strict=True))))
    return found


def near(value: float, sizes: Mapping[str, int], within: float) -> list[Factor]:
    """The factors that are as near to the value as can be told, the simplest kind of them only."""
    fitting = [factor for factor in factors(sizes) if abs(factor.value - value) <= within]
    simplest = min(map(_weight, fitting), default=0)
    return [factor for factor in fitting if _weight(factor) == simplest]


def _weight(factor: Factor) -> int:
    """A square is as simple as a product of two; roots come last."""
    if any(abs(power) < 1 for _, power in factor.powers):
        return 4
    return sum(int(abs(power)) for _, power in factor.powers)


def _power(name: str, power: float) -> str:
    text = f"size of {name}" if name != ACCUMULATION else ACCUMULATION
    if power == 1:
        return text
    return f"({text})²" if power == 2 else f"√({text})"


def is_loss_scale(value: float, within: float) -> bool:
    """Whether it is a large power of two, as loss scales are."""
    return value >= 256 and abs(value / 2 ** round(log2(value)) - 1) <= max(within, 1e-6)


# --- Groups and tensors ---

Candidate = Callable[[HeldPart], Tensor | None]
"""What a hypothesis expects a rank to hold (flat, double); None: it cannot say."""
_MODES_AT_ONCE = 3
_WHOLE = ("GLOBAL", "MODEL")
"""Modes of several axes: where a mode of one axis has the same ranks, that is what the user calls them."""


class Groups:
    """The groups of the modes, each set of groups under one name: that by which a sum is owed, if there is such a one."""

    def __init__(self, evidence: Evidence) -> None:
        owed = {mode for info in evidence.parameters.values() for mode, _, _ in info.owed}
        listed = {mode: sorted(tuple(group) for group in some) for mode, some in evidence.groups.items()}
        named = sorted(listed, key=lambda mode: (mode not in owed, mode not in evidence.distinct_data, mode in _WHOLE))
        self._name = {mode: next(one for one in named if listed[one] == listed[mode]) for mode in listed}
        self.of_mode = {mode: listed[mode] for mode in named if self._name[mode] == mode}
        for mode in [mode for mode in self.of_mode if mode not in owed and self._is_product(mode)]:
            del self.of_mode[mode]
        self.sizes = {mode: max(map(len, some), default=1) for mode, some in self.of_mode.items()}
        self.distinct = tuple(evidence.distinct_data)

    def name(self, mode: str) -> str:
        """The name under which the groups of a mode are known here."""
        return self._name.get(mode, mode)

    def _is_product(self, mode: str) -> bool:
        """Whether its groups are what other, smaller modes reach together: the whole world, say."""
        smaller = [
            other
            for other, some in self.of_mode.items()
            if other != mode and all(any(set(inner) < set(group) for group in self.of_mode[mode]) for inner in some)
        ]
        return bool(smaller) and all(self.joint(smaller, group[0]) == group for group in self.of_mode[mode])

    def joint(self, modes: Iterable[str], rank: int) -> tuple[int, ...]:
        """The ranks that groups of these modes reach from this one, step after step."""
        groups = [group for mode in modes for group in self.of_mode.get(mode, ())]
        reached, grew = {rank}, True
        while grew:
            more = {other for group in groups if reached & set(group) for other in group}
            grew = not more <= reached
            reached |= more
        return tuple(sorted(reached))

    def subsets(self) -> list[tuple[str, ...]]:
        """Sets of modes that reach different ranks: no mode, one, two, three; the smallest name for each."""
        some = [chosen for count in range(_MODES_AT_ONCE + 1) for chosen in combinations(self.of_mode, count)]
        seen: dict[tuple[tuple[int, ...], ...], tuple[str, ...]] = {}
        ranks = sorted({rank for groups in self.of_mode.values() for group in groups for rank in group})
        for chosen in some:
            seen.setdefault(tuple(self.joint(chosen, rank) for rank in ranks), chosen)
        return list(seen.values())


@dataclass(frozen=True, kw_only=True)
class Case:
    """A tensor that differs. `wrong` are the parts that do."""

    evidence: Evidence
    groups: Groups
    compared: Compared
    row: Row
    before: Tensor | None = None
    """The same tensor at the step before (or at the start), of the reference."""

    @cached_property
    def wrong(self) -> list[HeldPart]:
        """The parts that are outside the tolerance."""
        return [p for p in self.compared.found if in_units(distance(p, self.compared.truth), self.row.tolerance) > 1]

    @property
    def sizes(self) -> dict[str, int]:
        """Of the modes and of the accumulation."""
        return {**self.groups.sizes, ACCUMULATION: self.evidence.accumulation}

    def truth(self, part: HeldPart) -> Tensor | None:
        """What one process has where this rank's elements lie."""
        wanted = at_positions(self.compared.truth, part.positions)
        return wanted if wanted.numel() == part.value.numel() else None

    def residual(self, candidate: Candidate, factor: float = 1.0) -> float:
        """How far the wrong parts are from factor * candidate, in units of a tolerance that grows with the candidate."""
        worst = 0.0
        for part in self.wrong:
            expected = candidate(part)
            if expected is None or expected.numel() != part.value.numel():
                return inf
            size, wanted = abs(factor) * length(expected), length(self.compared.truth)
            allowed = self.row.tolerance * max(1.0, size / wanted if wanted else 1.0)
            left = length(flat(part.value) - factor * expected)
            worst = max(worst, in_units(left, allowed) if isfinite(left) else inf)
        return worst if self.wrong else inf

    def moved_to(self, whole: Tensor) -> Candidate:
        """Another whole tensor of the same shape, where a rank's elements lie."""

        def candidate(part: HeldPart) -> Tensor | None:
            return at_positions(whole, part.positions) if whole.numel() == self.compared.truth.numel() else None

        return candidate

    def within(self, elements: Tensor) -> Case:
        """The same case as if the tensor had these elements only."""
        before = None if self.before is None else flat(self.before)[elements]
        return replace(self, compared=_within(self.compared, elements), before=before)

    def fit(self, candidate: Candidate) -> tuple[float, float] | None:
        """The factor by which the wrong parts are the candidate (least squares), and how exactly it is known."""
        above, below = 0.0, 0.0
        for part in self.wrong:
            expected = candidate(part)
            if expected is None or expected.numel() != part.value.numel():
                return None
            above += float(flat(part.value) @ expected)
            below += float(expected @ expected)
        if below == 0 or not isfinite(above / below):
            return None
        factor = above / below
        return factor, 2 * self.row.tolerance * max(1.0, abs(factor)) / below**0.5


@dataclass(frozen=True, kw_only=True)
class GradientCase(Case):
    """A gradient that differs, with what it was made of."""

    name: str
    gradient: GradientEvidence
    step: StepEvidence
    at: int
    later: Compared | None = None
    """The gradient of the next step."""
    healthy: frozenset[str] = frozenset()
    """The parameters whose gradients of this step are right."""
    raw_scale: float = 1.0
    """A factor that raw gradients still lack, read off the parameters that are healthy."""

    @property
    def sizes(self) -> dict[str, int]:
        """Of the modes and of the accumulation; of a pipeline's micro-batches, where nothing else is accumulated."""
        passes = self.evidence.accumulation if self.evidence.accumulation > 1 else len(self.gradient.raw)
        return {**self.groups.sizes, ACCUMULATION: passes}

    @property
    def info(self) -> ParameterInfo:
        """Placement, ledger and what is owed."""
        return self.evidence.parameters.get(self.name, ParameterInfo())

    @property
    def owed(self) -> dict[str, float]:
        """Divisor by mode."""
        return {self.groups.name(mode): divisor for mode, _, divisor in self.info.owed}

    @property
    def everywhere(self) -> bool:
        """Whether every gradient of the step differs."""
        return not self.healthy

    def is_shared(self, mode: str) -> bool:
        """Whether a healthy parameter owes the same sum: a mistake of that sum would have touched it too."""
        mine = self.owed.get(mode)
        infos = [self.evidence.parameters[name] for name in self.healthy if name in self.evidence.parameters]
        return any(self.groups.name(other) == mode and by == mine for info in infos for other, _, by in info.owed)

    def is_replicated(self, mode: str) -> bool:
        """Whether the ranks of a mode hold the same elements."""
        held = {part.rank: part for part in self.compared.found}
        return all(
            other in held and same_places(held[other], part)
            for part in self.compared.found
            for other in self.groups.joint((mode,), part.rank)
        )

    @property
    def forward_is_right(self) -> bool:
        """Whether some rank knows the loss and all that do have the true one, or its mean."""
        found = [loss for loss in self.step.found_loss if loss is not None]
        allowed = Tolerance.for_run(self.evidence).of_size(abs(self.step.loss), self.step.loss_spread)
        return bool(found) and abs(sum(found) / len(found) - self.step.loss) <= allowed

    def differs_over(self, mode: str) -> bool:
        """Whether ranks of a mode that hold the same elements have raw gradients that differ."""
        apart = [
            length(mine - theirs) > self.row.tolerance
            for part in self.wrong
            for other in self.groups.joint((mode,), part.rank)
            if (mine := self.raw_at(part.rank, part)) is not None and (theirs := self.raw_at(other, part)) is not None
        ]
        return any(apart)

    def within(self, elements: Tensor) -> GradientCase:
        """The same case as if the parameter had these elements only."""
        gradient = replace(
            self.gradient,
            raw=[
                [part for one in some if (part := _part_within(one, elements)) is not None]
                for some in self.gradient.raw
            ],
            truth_of_passes=[flat(one)[elements] for one in self.gradient.truth_of_passes],
            truth_of_shards=[flat(one)[elements] for one in self.gradient.truth_of_shards],
            clipped=None,
        )
        return replace(super().within(elements), gradient=gradient, later=None)  # type: ignore[call-arg, return-value]

    @property
    def divisor(self) -> float:
        """By which the sum of raw gradients is to be divided."""
        return prod(self.owed.values())

    @cached_property
    def raws(self) -> dict[int, HeldPart]:
        """Each rank's raw gradient, summed over the passes (and scaled as the total is)."""
        return sum_of_passes(self.gradient.raw, self.raw_scale)

    def raw_at(self, rank: int, part: HeldPart) -> Tensor | None:
        """A rank's raw gradient at the places, in its own tensor, where `part` has its elements in this one's."""
        other = self.raws.get(rank)
        own = self.raws.get(
            part.rank, other
        )  # one that has no gradient holds the same elements as the others, or nobody's
        if other is None or own is None or other.value.numel() != own.value.numel():
            return None
        places = places_in(part, own)
        return None if places is None else flat(other.value)[places]

    def owed_raws(self, part: HeldPart) -> Tensor | None:
        """In a row each: the raw gradients of the ranks whose sum this one is owed, where `part` has its elements."""
        some = [self.raw_at(rank, part) for rank in self.groups.joint(tuple(self.owed), part.rank) if rank in self.raws]
        return None if not some or any(one is None for one in some) else torch.stack(some)  # type: ignore[arg-type]

    def of_pass(self, raw: Sequence[HeldPart]) -> GradientCase:
        """The same case as if the ranks had made this one pass."""
        return replace(self, gradient=replace(self.gradient, raw=[raw]))

    def raw_sum(self, modes: Sequence[str]) -> Candidate:
        """The sum of raw gradients over the ranks that these modes reach."""

        def candidate(part: HeldPart) -> Tensor | None:
            ranks = self.groups.joint(modes, part.rank)
            some = [self.raw_at(rank, part) for rank in ranks if rank in self.raws]
            if not some and self.raws:
                return torch.zeros(part.value.numel(), dtype=torch.float64)  # its passes did not come by here
            return None if not some or any(one is None for one in some) else torch.stack(some).sum(0)  # type: ignore[arg-type]

        return candidate

    @cached_property
    def due(self) -> Candidate:
        """What the sums and divisors that are owed make of the raw gradients."""
        total = self.raw_sum(tuple(self.owed))

        def candidate(part: HeldPart) -> Tensor | None:
            summed = total(part)
            return None if summed is None else summed / self.divisor

        return candidate

    @cached_property
    def backward_is_right(self) -> bool | None:
        """Whether the raw gradients, reduced as they should be, are the truth; None: not known."""
        if not self.raws:
            return None
        apart = 0.0
        for part in self.wrong:
            due, truth = self.due(part), self.truth(part)
            if due is None or truth is None:
                return None
            apart = max(apart, in_units(length(due - truth), self.row.tolerance))
        return apart <= 1

    @cached_property
    def reduction_is_right(self) -> bool | None:
        """Whether what was found is what the raw gradients give when reduced as owed; None: not known."""
        return self.residual(self.due) <= 1 if self.raws else None


def _within(compared: Compared, elements: Tensor) -> Compared:
    found = [part for one in compared.found if (part := _part_within(one, elements)) is not None]
    return replace(compared, truth=flat(compared.truth)[elements], found=found)


def _part_within(part: HeldPart, elements: Tensor) -> HeldPart | None:
    if part.positions is None:
        return HeldPart(part.rank, flat(part.value)[elements]) if part.value.numel() > int(elements.max()) else None
    places = part.positions.flatten()
    chosen = torch.isin(places, elements)
    if not bool(chosen.any()):
        return None
    return HeldPart(part.rank, flat(part.value)[chosen], torch.searchsorted(elements, places[chosen]))


def same_places(one: HeldPart, other: HeldPart) -> bool:
    """Whether two ranks hold the same elements."""
    if one.positions is None or other.positions is None:
        return one.positions is other.positions
    return torch.equal(one.positions.flatten(), other.positions.flatten())


def sum_of_passes(raw: Sequence[Sequence[HeldPart]], scale: float = 1.0) -> dict[int, HeldPart]:
    """Each rank's raw gradient over all passes; a rank whose passes do not lie at the same places is left out."""
    summed: dict[int, HeldPart] = {}
    odd = set()
    for some in raw:
        for part in some:
            value, before = flat(part.value) * scale, summed.get(part.rank)
            if before is not None and before.value.numel() != value.numel():
                odd.add(part.rank)
            elif before is not None:
                value = before.value + value
            summed[part.rank] = HeldPart(part.rank, value, part.positions)
    return {rank: part for rank, part in summed.items() if rank not in odd}


def places_in(part: HeldPart, holder: HeldPart) -> Tensor | None:
    """Where the elements of `part` lie in `holder`'s own order; None if it has not all of them."""
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


def raw_scale(evidence: Evidence, groups: Groups, step: StepEvidence, wrong: Collection[str]) -> float:
    """The factor that raw gradients lack to give the total, read off parameters that are healthy; 1 if none is."""
    ratios: list[float] = []
    for name, gradient in step.gradients.items():
        if name in wrong or not gradient.raw or not gradient.total.found or len(ratios) == 20:
            continue
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
            ratios.append(float(truth @ due) / float(due @ due))
    return median(ratios) if ratios else 1.0


# --- Norms and clipped gradients ---


@dataclass(frozen=True)
class NormCase:
    """A norm that differs: of everything, or of the parameters under a name."""

    evidence: Evidence
    groups: Groups
    step: StepEvidence
    at: int
    row: Row

    @property
    def found(self) -> dict[int, float]:
        """By rank."""
        values = self.step.found_norm if self.row.quantity == NORM else self.step.found_norms[self.row.name]
        return {rank: value for rank, value in enumerate(values) if value is not None}

    @cached_property
    def parts(self) -> dict[str, Sequence[HeldPart]]:
        """What the ranks hold of each gradient that counts."""
        name, some = self.row.name, self.step.gradients
        inside = [key for key in some if key == name or key.startswith(f"{name}.")]
        names = inside if self.row.quantity != NORM and inside else list(some)
        return {key: some[key].total.found for key in names}

    @property
    def truth(self) -> float:
        """What one process has."""
        return (self.step.norm if self.row.quantity == NORM else self.step.norms[self.row.name]) or 0.0

    @property
    def p(self) -> float:
        """The type of the norm."""
        return self.evidence.norm_type

    def power(self, part: HeldPart) -> float:
        """Sum of |x|^p of what a rank holds."""
        return float(flat(part.value).abs().pow(self.p).sum())

    @cached_property
    def by_rank(self) -> dict[int, float]:
        """Sum of |x|^p of all that each rank holds."""
        totals: dict[int, float] = {}
        for some in self.parts.values():
            for part in some:
                totals[part.rank] = totals.get(part.rank, 0.0) + self.power(part)
        return totals

    @cached_property
    def once(self) -> dict[str, float]:
        """Sum of |x|^p of each gradient, every element once."""
        wholes = {name: self.step.gradients[name].total.truth for name in self.parts}
        return {name: float(flat(whole).abs().pow(self.p).sum()) for name, whole in wholes.items()}

    @cached_property
    def weights(self) -> dict[str, float]:
        """The same of each weight, before the step."""
        before = self.evidence.steps[self.at - 1].weights if self.at else self.evidence.weights_at_start
        wholes = {name: before[name].truth if name in before else torch.zeros(1) for name in self.parts}
        return {name: float(flat(whole).abs().pow(self.p).sum()) for name, whole in wholes.items()}

    def residual(self, value: Callable[[int], float] | float) -> float:
        """How far the ranks' norms are from what a hypothesis says."""
        tolerance, worst = Tolerance.for_run(self.evidence), 0.0
        for rank, found in self.found.items():
            expected = value(rank) if callable(value) else value
            noise = self.row.tolerance * (expected / self.truth if self.truth else 1.0)
            worst = max(worst, in_units(abs(found - expected), max(tolerance.of_size(expected), noise)))
        return worst

    def root(self, power: float) -> float:
        """The norm of a sum of powers."""
        return max(power, 0.0) ** (1 / self.p)

    def is_split(self, name: str, mode: str) -> bool:
        """Whether ranks of a mode hold different elements of a gradient (or one holds none)."""
        parts = self.parts[name]
        held = {part.rank: part for part in parts}
        for part in parts:
            for rank in self.groups.joint((mode,), part.rank):
                if rank not in held or not same_places(held[rank], part):
                    return True
        return False


Coefficient = Callable[[str, int], float]
"""By parameter and rank."""


@dataclass(frozen=True)
class ClipCase:
    """All clipped gradients of a step; `rows` are those that differ."""

    evidence: Evidence
    groups: Groups
    step: StepEvidence
    at: int
    rows: tuple[Row, ...]

    @property
    def limit(self) -> float:
        """max_norm."""
        return self.evidence.max_norm if self.evidence.max_norm is not None else float("inf")

    @property
    def due(self) -> float:
        """The coefficient of one process."""
        return min(1.0, self.limit / ((self.step.norm or 0.0) + 1e-6))

    @cached_property
    def norms(self) -> NormCase:
        """What norms of parts are."""
        row = Row(NORM, "norm", self.at, "equal", 0.0, 0.0)
        return NormCase(self.evidence, self.groups, self.step, self.at, row)

    def residual(self, coefficient: Coefficient) -> float:
        """How far the clipped gradients that differ are from coefficient * gradient."""
        worst = 0.0
        for row in self.rows:
            gradient = self.step.gradients[row.name]
            before = {part.rank: part for part in gradient.total.found}
            for part in gradient.clipped.found if gradient.clipped is not None else ():
                value = self._before(part, before)
                if value is None:
                    return float("inf")
                share = coefficient(row.name, part.rank)
                allowed = row.tolerance * max(1.0, share / self.due)
                worst = max(worst, in_units(length(flat(part.value) - share * value), allowed))
        return worst

    def _before(self, part: HeldPart, before: dict[int, HeldPart]) -> Tensor | None:
        own = before.get(part.rank)
        if own is None or own.value.numel() != part.value.numel():
            return None
        return flat(own.value)

    def by(self, norm: float) -> float:
        """The coefficient that a norm gives."""
        return min(1.0, self.limit / (norm + 1e-6))
