"""Recipes: how each parameter of a model starts, under the name that it has in the whole model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from colonnade.context.random import derive_seed
from colonnade.errors import PlacementError
from colonnade.parallel.meta import Start, counter, start_of
from colonnade.parallel.meta.program import Program, Strided, drawn, program_of
from colonnade.parallel.meta.tape import Entry, Tape, elements_in_memory, memory_of

_ON_CPU, _ELSEWHERE = 1 << 16, 1 << 20
"""How many elements are made at once: so few that they take little memory, and on the CPU stay in its cache."""


@dataclass(frozen=True, eq=False)
class Recipe:
    """What decides the values of a parameter: a program, or without one everything that was done, done again."""

    name: str
    tape: Tape
    tensor: Tensor
    program: Program | None
    owners: Mapping[int, str]
    """The name that numbers follow from, by the memory they were drawn into."""

    def __str__(self) -> str:
        if self.program is not None:
            return str(self.program)
        return ", ".join(self.tape.entries[at].name for at in self.tape.needed_for(self.tensor))

    @torch.no_grad()
    def fill(self, local: Tensor, start: Sequence[int], shape: Sequence[int], offset: Sequence[int], seed: int) -> None:
        """Give `local` its values: the part of the tensor from `start` on, at `offset` of the whole parameter of `shape`."""
        if self.program is None:
            whole = self.tape.replay(self.tensor, self._drawing(seed, math.prod(shape)))
            parts = (slice(at, at + size) for at, size in zip(start, local.shape, strict=True))
            local.copy_(whole[tuple(parts)])
            return
        strided = self.program.cut or Strided.of(self.tensor)
        first = strided.offset + sum(at * stride for at, stride in zip(start, strided.stride, strict=True))
        strides = counter.row_strides(shape)
        before = sum(at * stride for at, stride in zip(offset, strides, strict=True))
        flat = local.view(-1) if local.is_contiguous() else local.new_empty(local.numel())
        step = _ON_CPU if local.device.type == "cpu" else _ELSEWHERE
        for chunk in range(0, local.numel(), step):
            index = torch.arange(chunk, min(chunk + step, local.numel()), device=local.device)
            positions = counter.positions_in(index, local.shape, before, strides)
            has = self.program.has_regions
            places = counter.positions_in(index, local.shape, first, strided.stride) if has else positions
            values = self.program.values(positions, places, lambda source: self._key(seed, source))
            flat[chunk : chunk + len(index)] = values
        if not local.is_contiguous():
            local.copy_(flat.view(local.shape))

    def _key(self, seed: int, source: int | None, *more: object) -> int:
        return derive_seed(seed, self.name if source is None else self.owners[source], *more)

    def _drawing(self, seed: int, numel: int) -> Any:
        """Does an operation again, with random numbers that do not depend on the layout."""
        seen: set[int] = set()

        def run(entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not entry.is_random:
                return entry.func(*args, **kwargs)
            made, step = entry.outputs[0], drawn(entry)
            key = self._key(seed, memory_of(made))
            if key in seen or elements_in_memory(made) != numel:  # not the whole parameter: told apart by its turn
                key = self._key(seed, memory_of(made), entry.draws)
            seen.add(key)
            if step is None:
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(key)
                    return entry.func(*args, **kwargs)
            result = args[0] if entry.name.endswith("_") else torch.empty(made.shape, dtype=made.dtype)
            places = counter.positions_in(torch.arange(made.numel()), *Strided.of(made))
            return result.copy_(step.apply(torch.empty(0), places, key).view(made.shape))

        return run


def recipes_of(stages: Iterable[nn.Module], prefix: str = "") -> dict[int, Recipe]:
    """For each parameter (by id) that is on the meta device, how it starts.

    `stages` are those of a split model, or one model. `prefix` tells apart models whose parameters have the same names.
    """
    found = list(_on_meta(list(stages), prefix))
    owners: dict[int, str] = {}
    for name, _, start in found:
        owners.setdefault(memory_of(start.tensor), name)
    recipes = {}
    for name, parameter, start in found:
        entries = [start.tape.entries[at] for at in start.tape.needed_for(start.tensor)]
        sources = {memory_of(entry.outputs[0]) for entry in entries if entry.is_random}
        names = {owners.setdefault(source, name) for source in sources}
        program = program_of(start.tape, start.tensor)
        if program is not None and not program.steps:
            raise PlacementError(
                f"{name} was never given values inside meta_init(). Initialise it there (torch.nn.init.normal_(parameter), "
                f"say), or build its module `with torch.device('cpu'):`."
            )
        if program is not None and program.moved and names - {name}:
            program = None  # copied from another parameter, and not as that one lies
        if program is not None and program.cut is not None and program.cut.size != parameter.shape:
            program = None
        recipes[id(parameter)] = Recipe(name, start.tape, start.tensor, program, owners)
    return recipes


def _on_meta(stages: Sequence[nn.Module], prefix: str) -> Iterator[tuple[str, nn.Parameter, Start]]:
    names: set[str] = set()
    met: set[int] = set()
    tapes = {start.tape for stage in stages for p in stage.parameters() if (start := start_of(p)) is not None}
    for at, stage in enumerate(stages):
        for name, parameter in stage.named_parameters():
            if parameter.is_meta and id(parameter) not in met:
                named = prefix + (name if name not in names else f"{name} of stage {at}")
                yield named, parameter, _start_of(parameter, name, tapes)
                names.add(name)
                met.add(id(parameter))


def _start_of(parameter: nn.Parameter, name: str, tapes: Iterable[Tape]) -> Start:
    start = start_of(parameter)
    if start is None:  # a deep copy that was made inside meta_init() is on its tape too
        tape = next((tape for tape in tapes if tape.knows(parameter)), None)
        start = Start(tape, parameter.detach(), parameter._version) if tape is not None else None
    if start is None:
        raise PlacementError(
            f"{name} is on the meta device, and nothing says which values it starts with: build the model inside "
            f"`with colonnade.meta_init():`, or on a device that has memory"
        )
    if start.version != parameter._version:
        raise PlacementError(
            f"{name} was changed after meta_init(), on the meta device, where that has no effect: initialise it inside the "
            f"block, or after initialize()"
        )
    return start
