"""Models of equal blocks: run with one and with two of them, the cost of any number follows, to the byte."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from colonnade.comm.torch_versions import start_fsdp
from colonnade.parallel.placement import placement_of
from colonnade.parallel.split import Stage
from colonnade.planner.passes import StagePass
from colonnade.planner.recorder import Cost

_FEWEST = 3
"""With fewer repetitions nothing is saved."""


@dataclass(frozen=True)
class Repeat:
    """Layers [start, start + unit x times) of a container are the same `unit` layers so many times."""

    container: nn.Module
    start: int
    unit: int
    times: int

    @contextmanager
    def shortened(self, times: int) -> Iterator[None]:
        """The container with this many repetitions."""
        stop, end = self.start + self.unit * times, self.start + self.unit * self.times
        if isinstance(self.container, Stage):
            names = self.container.layer_names
            self.container.layer_names = (*names[:stop], *names[end:])
            try:
                yield
            finally:
                self.container.layer_names = names
            return
        layers = dict(self.container._modules)
        kept = [each for at, each in enumerate(layers.values()) if at < stop or at >= end]
        self.container._modules.clear()
        self.container._modules.update({str(at): each for at, each in enumerate(kept)})
        try:
            yield
        finally:
            self.container._modules.clear()
            self.container._modules.update(layers)


def run_repeated(module: nn.Module, run: Callable[[], StagePass], sharded: bool = False) -> StagePass:
    """`run()`, which passes once through the module; of many equal blocks only a few are run.

    `sharded`: FSDP2 must see all of them when it starts, and its first pass is not like the others.
    """
    found = find_repeat(module)
    if sharded:
        start_fsdp(module)
        with found.shortened(2) if found is not None else nullcontext():
            run()
    if found is None:
        return run()
    with found.shortened(1):
        one = run()
    with found.shortened(2):
        two = run()
    return extended(one, two, found.times - 2)


def find_repeat(module: nn.Module) -> Repeat | None:
    """The longest run of equal layers in a list, a sequence or a stage."""
    best: Repeat | None = None
    for each in module.modules():
        layers = _layers(each)
        for found in _runs(each, [signature(layer) for layer in layers]) if len(layers) >= _FEWEST else ():
            if best is None or found.unit * found.times > best.unit * best.times:
                best = found
    return best


def signature(module: nn.Module) -> Any:
    """What two modules have in common whose passes cost the same: their layers and parameters, but for numbers in names."""
    layers = tuple(
        (type(each).__name__, str(vars(each).get("_colonnade_runs")))
        if next(each.children(), None) is not None
        else (type(each).__name__, each.extra_repr())
        for each in module.modules()
    )
    parameters = tuple(
        (re.sub(r"\d+", "*", name), tuple(p.shape), p.dtype, p.requires_grad, placement_of(p).key[0])
        for name, p in module.named_parameters()
    )
    return layers, parameters


def _layers(module: nn.Module) -> list[nn.Module]:
    if isinstance(module, Stage):
        return [module.get_submodule(name) for name in module.layer_names]
    return list(module.children()) if isinstance(module, (nn.Sequential, nn.ModuleList)) else []


def _runs(container: nn.Module, kinds: list[Any]) -> Iterator[Repeat]:
    """Every way to see these layers as a unit that comes again and again, the shortest unit first."""
    numbers: dict[Any, int] = {}
    row = [numbers.setdefault(kind, len(numbers)) for kind in kinds]
    for unit in range(1, len(row) // _FEWEST + 1):
        start = 0
        while start + unit * _FEWEST <= len(row):
            stop = start + unit
            while row[stop : stop + unit] == row[start : start + unit]:
                stop += unit
            if (times := (stop - start) // unit) >= _FEWEST:
                yield Repeat(container, start, unit, times)
            start += max(1, stop - start - unit + 1) if times >= _FEWEST else 1


def extended(one: StagePass, two: StagePass, more: int) -> StagePass:
    """The pass that comes `more` steps after `two`, which comes one after `one`: every number goes on as it did."""

    def on(first: float, second: float) -> Any:
        return second + more * (second - first)

    def longer(first: Tensor, second: Tensor) -> Tensor:
        return second.new_empty([on(a, b) for a, b in zip(first.shape, second.shape, strict=True)])

    outputs, spec = tree_flatten(two.output)
    before = tree_leaves(one.output)
    made = [longer(a, b) if isinstance(b, Tensor) else b for a, b in zip(before, outputs, strict=True)]
    return replace(
        two,
        forward=_longer(one.forward, two.forward, more),
        backward=_longer(one.backward, two.backward, more),
        kept=on(one.kept, two.kept),
        waiting=on(one.waiting, two.waiting),
        extra=cast(
            "tuple[int, int, int, int]", tuple(max(0, on(a, b)) for a, b in zip(one.extra, two.extra, strict=True))
        ),
        output=tree_unflatten(made, spec),
        sent=on(one.sent, two.sent),
        returned=on(one.returned, two.returned),
    )


def _longer(one: Cost, two: Cost, more: int) -> Cost:
    """Calls that both make stay, those that have grown grow on, and those that are new come again."""
    both = Counter(one.calls) & Counter(two.calls)
    old, new = list((Counter(one.calls) - both).elements()), list((Counter(two.calls) - both).elements())
    calls = list(both.elements())
    for call in old:
        grown = next((each for each in new if (each.op, each.ranks) == (call.op, call.ranks)), None)
        if grown is not None:
            new.remove(grown)
            calls.append(replace(grown, bytes=grown.bytes + more * (grown.bytes - call.bytes)))
    return Cost(
        two.seconds + more * (two.seconds - one.seconds),
        two.flops + more * (two.flops - one.flops),
        two.graded + more * (two.graded - one.graded),
        two.moved + more * (two.moved - one.moved),
        two.operators + more * (two.operators - one.operators),
        calls + new * (1 + more) if len(one.calls) != len(two.calls) else calls + new,
    )
