"""Random layouts and placements: what all ranks contribute adds up to the norm of the whole, in arithmetic and for real."""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random

import pytest
import torch
from torch import Tensor

from colonnade.optim.norm import GradientBlock
from colonnade.parallel.demand import Holding, holding
from colonnade.testing import run_world
from tests.optim.field_facts import Fact, judge
from tests.optim.field_measure import ORDERS, by_function, launched
from tests.optim.field_pieces import Piece, is_held, norm_of, where, whole
from tests.optim.field_random import World, draw_piece, draw_world

DOUBLE = torch.float64
ON_CPU = {"CUDA_VISIBLE_DEVICES": ""}


@dataclass(frozen=True)
class Held:
    """What a rank has of a piece, and who else has the same by the library's account."""

    part: tuple[slice, ...]
    shape: tuple[int, ...]
    holding: Holding

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def held_by(piece: Piece, world: World) -> dict[int, Held]:
    """For the ranks that have the piece."""
    found = {}
    for rank in range(world.size):
        if is_held(piece, world.layout, rank):
            part = where(piece, world.layout, rank)
            shape = tuple(cut.stop - cut.start for cut in part)
            found[rank] = Held(part, shape, holding(world.layout, piece.placement, rank))
    return found


def covered(piece: Piece, held: dict[int, Held]) -> int:
    """How many elements are somewhere; cutting twice along the same ranks leaves some out."""
    mask = torch.zeros(piece.shape, dtype=torch.bool)
    for part in {tuple((cut.start, cut.stop) for cut in entry.part) for entry in held.values()}:
        mask[tuple(slice(*cut) for cut in part)] = True
    return int(mask.sum())


def contributions(piece: Piece, held: dict[int, Held], p: float) -> list[Tensor]:
    """What each rank adds: |x|^p summed (for inf: the largest) over the slice of its block that is its to read."""
    values, parts = whole(piece, DOUBLE).abs(), []
    for entry in held.values():
        owned = GradientBlock(values[entry.part].contiguous(), entry.holding.count, entry.holding.index).owned
        if owned.numel():
            parts.append(owned.max() if math.isinf(p) else owned.pow(p).sum())
    return parts


def check_holders(piece: Piece, held: dict[int, Held]) -> None:
    """Ranks hold the same elements if and only if the library says so; and its start-up count is right."""
    for entry in held.values():
        if entry.numel:
            assert entry.holding.ranks == tuple(r for r, other in held.items() if other.part == entry.part), piece
    counted = sum(entry.numel / entry.holding.count for entry in held.values())
    assert counted == pytest.approx(covered(piece, held)), piece


@pytest.mark.parametrize("part", range(4))
def test_500_layouts_add_up(part: int) -> None:
    draw = Random(part)
    seen = dict.fromkeys(("cut", "uneven", "empty", "tied", "expert", "several holders", "not whole"), 0)
    for number in range(500):
        world, p = draw_world(draw), draw.choice(ORDERS)
        drawn = [draw_piece(draw, world, f"{number}_{at}") for at in range(draw.randint(1, 3))]
        held = [held_by(piece, world) for piece in drawn]
        parts, wholes = [torch.zeros((), dtype=DOUBLE)], []
        for piece, entries in zip(drawn, held, strict=True):
            check_holders(piece, entries)
            if note(seen, piece, entries):
                parts += contributions(piece, entries, p)
                wholes.append(whole(piece, DOUBLE))
        sums = torch.stack(parts)
        norm = float(sums.max() if math.isinf(p) else sums.sum().pow(1 / p))
        assert math.isclose(norm, norm_of(wholes, p), rel_tol=1e-12), (world.parallel, drawn, p)
    assert min(seen.values()) > 20, seen  # the draws are of every kind


def note(seen: dict[str, int], piece: Piece, held: dict[int, Held]) -> bool:
    """Count what kind of piece it is; returns whether all of it is somewhere."""
    sizes = {entry.numel for entry in held.values()}
    complete = covered(piece, held) == math.prod(piece.shape)
    seen["not whole"] += not complete
    if complete:
        seen["cut"] += bool(piece.placement.shards)
        seen["uneven"] += len(sizes) > 1
        seen["empty"] += 0 in sizes and len(sizes) > 1
        seen["tied"] += piece.placement.tied is not None
        seen["expert"] += any(mode.startswith("expert") for mode in piece.on)
        seen["several holders"] += any(entry.holding.count > 1 for entry in held.values())
    return complete


def on_ranks(first: int, count: int) -> list[Fact]:
    """On 8 ranks: worlds and pieces drawn alike on every rank, clipped by the function."""
    facts = []
    for seed in range(first, first + count):
        draw = Random(seed)
        world, p = draw_world(draw, size=8), draw.choice(ORDERS)
        pieces = [draw_piece(draw, world, f"{seed}_{at}") for at in range(4)]
        pieces = [piece for piece in pieces if covered(piece, held_by(piece, world)) == math.prod(piece.shape)]
        with launched(world.parallel) as gpc:
            facts += by_function(gpc, pieces, DOUBLE, p)
    return facts


def test_five_layouts_on_8_ranks() -> None:
    judge(run_world(8, on_ranks, 0, 5, env=ON_CPU).values)


@pytest.mark.slow
def test_fifty_layouts_on_8_ranks() -> None:
    judge(run_world(8, on_ranks, 100, 50, timeout=110, env=ON_CPU).values)
