"""Recipes: how each parameter of a model starts, under the name that it has in the whole model."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from colonnade.context.random import derive_seed
from colonnade.errors import PlacementError
from colonnade.parallel.meta import Source, Start, counter, source_of, start_of
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
    by_program: Mapping[int, bool]
    """The memory of all parameters, with whether theirs is drawn by a program."""
    sizes: Mapping[str, int]
    """How many elements each parameter has here."""

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
            (made, *_), step = entry.outputs, drawn(entry)
            memory = memory_of(made)
            key, owner = self._key(seed, memory), self.owners[memory]
            if not self.by_program.get(memory):  # what a program draws has no turns
                whole = numel if owner == self.name else self.sizes[owner]
                if key in seen or elements_in_memory(made) != whole:  # not the whole parameter: told apart by its turn
                    key = self._key(seed, memory, entry.draws)
                seen.add(key)
            if step is None:
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(key)
                    return entry.func(*args, **kwargs)
            result = args[0] if entry.name.endswith("_") else torch.empty(made.shape, dtype=made.dtype)
            places = counter.positions_in(torch.arange(made.numel()), *Strided.of(made))
            return result.copy_(step.apply(places, places, key).view(made.shape))

        return run


@dataclass(frozen=True, eq=False)
class Reading:
    """A parameter whose values are kept somewhere."""

    source: Source
    tensor: Tensor

    def __str__(self) -> str:
        return str(self.source)

    def fill(self, local: Tensor, start: Sequence[int], shape: Sequence[int], offset: Sequence[int], seed: int) -> None:
        """As `Recipe.fill`."""
        self.source.read_into(local, offset)


def recipes_of(stages: Iterable[nn.Module], prefix: str = "") -> dict[int, Recipe | Reading]:
    """For each parameter (by id) that is on the meta device, how it starts.

    `stages` are those of a split model, or one model. `prefix` tells apart models whose parameters have the same names.
    """
    stages = list(stages)
    found = list(_on_meta(stages, prefix))
    if found:
        _refuse_bare(stages)
    owners: dict[int, str] = {}
    for name, _, start in found:
        owners.setdefault(memory_of(start.tensor), name)
    users = Counter[int]()
    for name, _, start in found:
        sources = _sources(start, name)
        users.update(sources)
        for source in sources:
            owners.setdefault(source, name)
    programs = {name: _own_program(name, parameter, start, users) for name, parameter, start in found}
    by_program: dict[int, bool] = {}
    for name, _, start in found:
        by_program.setdefault(memory_of(start.tensor), programs[name] is not None)
    sizes = {name: start.tensor.numel() for name, _, start in found}
    kept = [(parameter, source_of(parameter)) for stage in stages for parameter in stage.parameters()]
    read = {id(parameter): Reading(source, parameter) for parameter, source in kept if source is not None}
    return read | {
        id(parameter): Recipe(name, start.tape, start.tensor, programs[name], owners, by_program, sizes)
        for name, parameter, start in found
    }


def _sources(start: Start, name: str) -> set[int]:
    """The memory that was drawn for a parameter."""
    entries = [start.tape.entries[at] for at in start.tape.needed_for(start.tensor)]
    if any(entry in start.tape.read_from for entry in entries):
        raise PlacementError(
            f"{name} starts with random numbers that a buffer, or code of the model, has read inside meta_init(); those of "
            f"parameters are drawn only in initialize(). Build its module outside, or `with torch.device('cpu'):` inside.",
            code="C034",
        )
    return {memory_of(made) for entry in entries if entry.is_random for made in entry.outputs}


def _own_program(name: str, parameter: nn.Parameter, start: Start, users: Counter[int]) -> Program | None:
    """The program of a parameter; None where it must be made whole."""
    program = program_of(start.tape, start.tensor)
    if program is None:
        return None
    if not program.steps:
        raise PlacementError(
            f"{name} was never given values inside meta_init(). Initialise it there (torch.nn.init.normal_(parameter), "
            f"say), or build its module `with torch.device('cpu'):`.",
            code="C034",
        )
    moved = program.moved or not start.tensor.is_contiguous()
    if moved and any(users[source] > 1 for source in _sources(start, name)):
        return None  # another parameter has the same numbers, and elsewhere
    return None if program.cut is not None and program.cut.size != start.tensor.shape else program


def _on_meta(stages: Sequence[nn.Module], prefix: str) -> Iterator[tuple[str, nn.Parameter, Start]]:
    names: set[str] = set()
    met: set[int] = set()
    for at, stage in enumerate(stages):
        for name, parameter in stage.named_parameters():
            if parameter.is_meta and id(parameter) not in met and source_of(parameter) is None:
                named = prefix + (name if name not in names else f"{name} of stage {at}")
                yield named, parameter, _start_of(parameter, name)
                names.add(name)
                met.add(id(parameter))


def _refuse_bare(stages: Iterable[nn.Module]) -> None:
    """Tensors that are no parameters and no buffers stay on the meta device, where forward passes cannot use them."""
    for stage in stages:
        for name, module in stage.named_modules():
            for attribute, value in vars(module).items():
                if attribute in ("_parameters", "_buffers", "_modules"):
                    continue
                for leaf in tree_leaves(value):
                    # One with a graph is computed from parameters, and by old weight_norm again in each forward pass.
                    if isinstance(leaf, Tensor) and leaf.is_meta and not leaf.requires_grad and start_of(leaf) is None:
                        raise PlacementError(
                            f"{f'{name}.{attribute}'.lstrip('.')} holds a tensor without values, as it was built inside "
                            f"meta_init(). Make it a buffer (register_buffer), or build it `with torch.device('cpu'):`.",
                            code="C034",
                        )


def _start_of(parameter: nn.Parameter, name: str) -> Start:
    start = start_of(parameter)
    if start is None:
        raise PlacementError(
            f"{name} is on the meta device, and nothing says which values it starts with: build the model inside "
            f"`with colonnade.meta_init():`, or on a device that has memory",
            code="C034",
        )
    if start.version != parameter._version:
        raise PlacementError(
            f"{name} was changed after meta_init(), on the meta device, where that has no effect: initialise it inside the "
            f"block, or after initialize()",
            code="C034",
        )
    return start
