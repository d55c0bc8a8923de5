"""A number as a product of sizes: what a factor of 4 can mean in a layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from math import log2

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
