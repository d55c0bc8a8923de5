"""Random worlds and random pieces on them: layouts, uneven shards, ties, experts, replicas that were summed."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

from colonnade.config import load_config
from colonnade.context.layout import Layout
from colonnade.context.layout_builder import build_layout
from colonnade.context.parallel_mode import ParallelMode
from colonnade.parallel.placement import Replicate, Shard, Spec, Tied
from tests.optim.field_layouts import OWN
from tests.optim.field_pieces import Piece

# Modes that cut a piece further are tried in any order; which of them fit together is found by trying.
TENSOR_MODES: dict[str, tuple[int, ...]] = {
    "": (1, 2, 3, 4),
    "1d": (2, 3),
    "2d": (4,),
    "2.5d": (4, 8),
    "3d": (8,),
    "sequence": (2, 3),
}
DEPTHS = {4: 1, 8: 2}


@dataclass(frozen=True)
class World:
    """A config's `parallel` and the layout that follows from it."""

    size: int
    parallel: dict[str, Any]
    layout: Layout


def draw_world(draw: Random, size: int | None = None, most: int = 16) -> World:
    """Some axes whose product is at most `most`, or just `size`."""
    while True:
        mode = draw.choice(list(TENSOR_MODES))
        tensor = draw.choice(TENSOR_MODES[mode])
        pipeline, own, data = draw.choice([1, 1, 2, 3, 4]), draw.choice([1, 1, 2]), draw.choice([1, 2, 3, 4, 8])
        world = data * pipeline * own * tensor
        if world == size or (size is None and world <= most):
            break
    parallel: dict[str, Any] = {"pipeline": pipeline, "tensor": {"size": tensor}}
    if mode:
        parallel["tensor"] |= {"mode": mode} | ({"depth": DEPTHS[tensor]} if mode == "2.5d" else {})
    if own > 1:
        parallel["own"] = {"size": own, "mode": OWN.value}
    over = draw.choice(["data", "data*tensor"])
    room = data if over == "data" else data * tensor
    experts = draw.choice([count for count in range(1, room + 1) if room % count == 0])
    if experts > 1 and draw.random() < 0.6:
        parallel["expert"] = {"size": experts, "over": over}
    return World(world, parallel, build_layout(load_config({"parallel": parallel}), world))


def draw_piece(draw: Random, world: World, name: str) -> Piece:
    """A piece of up to three dimensions, cut over some modes of the world, tied or at one stage of a pipeline."""
    layout, stages = world.layout, world.layout.grid.sizes["pipeline"]
    shape = tuple(draw.choice([0, 1, 2, 3, 5, 8, 13]) for _ in range(draw.randint(0, 2)))
    shape = (*shape, draw.choice([1, 3, 7, 70 if len(shape) < 2 else 4]))
    on: dict[str, Spec] = {}
    parts: dict[str, tuple[int, ...]] = {}
    stage = draw.randrange(stages) if stages > 1 else None
    if stages > 1 and draw.random() < 0.4:
        tied = sorted(draw.sample(range(stages), draw.randint(2, stages)))
        stage, on["pipe"] = None, Tied(tuple(tied), name)
    modes = [
        mode for mode in layout.modes if mode not in (ParallelMode.GLOBAL, ParallelMode.PIPELINE, ParallelMode.MODEL)
    ]
    for mode in draw.sample(modes, min(len(modes), draw.randint(0, 3))):
        kind = draw.random()
        if kind < 0.75:
            dim = draw.randrange(len(shape))
            on[mode.value] = Shard(dim, draw.choice(["auto", "nothing"]))
            if not any(
                isinstance(spec, Shard) and spec.dim == dim for other, spec in on.items() if other != mode.value
            ):
                parts[mode.value] = _uneven(draw, shape[dim], len(layout.groups(mode)[0]))
        elif kind < 0.9:
            on[mode.value] = Replicate(owes="sum")
    return Piece(name, shape, on, stage, {mode: cut for mode, cut in parts.items() if cut})


def _uneven(draw: Random, length: int, count: int) -> tuple[int, ...]:
    """Any lengths that add up; or none, which is as even as can be."""
    if draw.random() < 0.5:
        return ()
    cuts = sorted(draw.randint(0, length) for _ in range(count - 1))
    return tuple(b - a for a, b in zip([0, *cuts], [*cuts, length], strict=True))
