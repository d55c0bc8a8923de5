"""Programs: how a parameter starts, as steps that each element takes by itself, so that any part can be made alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from colonnade.parallel.meta import counter
from colonnade.parallel.meta.tape import Entry, Tape, covers_memory, is_expanded, memory_of

_EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_FILLS = {
    "zero_": 0.0,
    "zeros": 0.0,
    "zeros_like": 0.0,
    "new_zeros": 0.0,
    "ones": 1.0,
    "ones_like": 1.0,
    "new_ones": 1.0,
}
_DRAWS = {"uniform_": "uniform", "rand": "uniform", "rand_like": "uniform"}
_DRAWS |= {"normal_": "normal", "randn": "normal", "randn_like": "normal"}
_POINTWISE = {
    "mul",
    "div",
    "add",
    "sub",
    "rsub",
    "neg",
    "abs",
    "pow",
    "sqrt",
    "exp",
    "log",
    "clamp",
    "clamp_min",
    "clamp_max",
}
_POINTWISE |= {"erfinv", "erf", "tanh", "sigmoid", "reciprocal", "square", "sin", "cos"}
_COPIES = {"clone", "_to_copy", "copy_", "cat", "stack"}


class Strided(NamedTuple):
    """How the elements of a tensor lie in memory."""

    size: tuple[int, ...]
    offset: int
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> Strided:
        return cls(tuple(tensor.size()), int(tensor.storage_offset()), tuple(tensor.stride()))

    def holds(self, positions: Tensor) -> Tensor:
        """Whether each position in memory is an element of it."""
        left, inside = positions - self.offset, torch.ones_like(positions, dtype=torch.bool)
        for size, stride in sorted(zip(self.size, self.stride, strict=True), key=lambda pair: -pair[1]):
            if size > 1:
                at = left.div(stride, rounding_mode="floor")
                inside &= (at >= 0) & (at < size)
                left = left - at * stride
        return inside & (left == 0)


@dataclass(frozen=True)
class Step:
    """ "uniform" (low, high), "normal" (mean, std), "fill" (value), or "call": a function of each element alone.

    `region`: the places in memory that it is for; None for all. `source`: the memory that was drawn.
    """

    kind: str
    values: tuple[Any, ...]
    region: Strided | None = None
    call: Callable[[Tensor], Tensor] | None = field(default=None, compare=False)
    source: int | None = field(default=None, compare=False)

    def __str__(self) -> str:
        return f"{self.kind}{self.values}{'' if self.region is None else ' in a part'}"

    def apply(self, values: Tensor, positions: Tensor, key: int) -> Tensor:
        """The values after this step, whatever its region."""
        if self.call is not None:
            return self.call(values.clone())
        if self.kind == "fill":
            return torch.full_like(values, *self.values)
        return {"uniform": counter.uniform, "normal": counter.normal}[self.kind](key, positions, *self.values)


@dataclass(frozen=True)
class Program:
    """The steps, and how the tensor's elements lie in the memory that regions speak of; None: as in its own.

    `moved`: elements do not lie where they lay in the memory that was drawn.
    """

    steps: tuple[Step, ...] = ()
    cut: Strided | None = None
    moved: bool = field(default=False, compare=False)

    def __str__(self) -> str:
        return ", ".join(map(str, self.steps))

    @property
    def has_regions(self) -> bool:
        return any(step.region is not None for step in self.steps)

    def then(self, step: Step, tensor: Tensor) -> Program | None:
        """With one more step, on a tensor that may be a part of the memory."""
        if covers_memory(tensor):
            return Program((step,)) if step.kind != "call" else replace(self, steps=(*self.steps, step))
        return None if self.cut else replace(self, steps=(*self.steps, replace(step, region=Strided.of(tensor))))

    def copied(self, source: Tensor) -> Program | None:
        """That of a copy of `source`, all or some of the tensor's memory."""
        if is_expanded(source):
            return None
        if source.is_contiguous() and covers_memory(source):
            return self
        if self.cut is not None:
            return None
        return Program(self.steps, Strided.of(source) if self.has_regions else None, moved=True)

    def values(self, positions: Tensor, places: Tensor, key: Callable[[int | None], int]) -> Tensor:
        """In float64, for elements at `positions` of the whole parameter, that regions know as `places`."""
        values = torch.zeros_like(positions, dtype=torch.float64)
        for step in self.steps:
            changed = step.apply(values, positions, key(step.source))
            values = changed if step.region is None else torch.where(step.region.holds(places), changed, values)
        return values


def program_of(tape: Tape, tensor: Tensor) -> Program | None:
    """The program of a tensor of the meta device; None where its elements do not start each by itself."""
    known: dict[int, Program | None] = {}
    for at in tape.needed_for(tensor):
        entry = tape.entries[at]
        after = _after(entry, known) if len(entry.outputs) == 1 else None
        known |= {memory_of(made): after for made in entry.outputs}
    program = known.get(memory_of(tensor), Program())
    return program.copied(tensor) if program is not None and not covers_memory(tensor) else program


def drawn(entry: Entry) -> Step | None:
    """The step of an operation that draws uniform or normal numbers."""
    if entry.name not in _DRAWS:
        return None
    (made,) = entry.outputs
    if made.is_complex():
        return None
    given = entry.args[1:]
    values = (*given, *(0.0, 1.0)[len(given) :]) if entry.name.endswith("_") else (0.0, 1.0)
    return Step(_DRAWS[entry.name], values, source=memory_of(made))


def _after(entry: Entry, known: dict[int, Program | None]) -> Program | None:
    """The program of what an operation gives, by those of what it takes."""
    name, (made,) = entry.name, entry.outputs
    before = known.get(memory_of(made), Program())
    if name in _EMPTY:
        return Program()
    if name in _COPIES:
        return _copied(entry, known)
    if name.rstrip("_") in _POINTWISE and isinstance(entry.args[0], Tensor):
        source, *others = entry.inputs
        taken = None if others else known.get(memory_of(source))
        if taken is not None and not name.endswith("_"):
            taken = taken.copied(source)
        return taken.then(_call(entry), made) if taken is not None else None
    step = drawn(entry)
    if name in _FILLS:
        step = Step("fill", (_FILLS[name],))
    elif name in ("fill_", "full", "full_like", "new_full") and isinstance(entry.args[-1], (int, float)):
        step = Step("fill", (float(entry.args[-1]),))
    return before.then(step, made) if step is not None and before is not None else None


def _call(entry: Entry) -> Step:
    rest, kwargs = entry.args[1:], dict(entry.kwargs)
    return Step("call", (entry.name, *rest, *kwargs.items()), call=lambda values: entry.func(values, *rest, **kwargs))


def _copied(entry: Entry, known: dict[int, Program | None]) -> Program | None:
    (made,) = entry.outputs
    sources: Sequence[Tensor] = entry.inputs[1:] if entry.name == "copy_" else entry.inputs
    programs = [known.get(memory_of(source)) for source in sources]
    (source, *others), (program, *_) = sources, programs
    first = None if program is None else program.copied(source)
    if not made.dtype.is_floating_point:  # values are rounded here, and programs do not round
        return None
    if first is None or not covers_memory(made) or made.numel() != sum(source.numel() for source in sources):
        return None
    if not others:
        return first
    # Parts that start alike, such as experts, are one: as long as none of them is there twice.
    apart = len({memory_of(source) for source in sources}) == len(sources)
    if not apart or first.has_regions or any(program != first for program in programs):
        return None
    return Program(tuple(replace(step, source=None) for step in first.steps), moved=True)
