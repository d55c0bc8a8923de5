"""Random layouts and placements: what all ranks contribute adds up to the norm of the whole, in arithmetic and for real."""

from __future__ import annotations

import math
from random import Random

import pytest
import torch
from torch import Tensor

from colonnade.optim.blocks import Block
from colonnade.parallel.demand import holding
from colonnade.testing import run_world
from tests.optim.field_facts import Fact, judge
from tests.optim.field_measure import ORDERS, by_function, launched
from tests.optim.field_pieces import Piece, is_held, norm_of, where, whole
from tests.optim.field_random import World, draw_piece, draw_world

DOUBLE = torch.float64


def elements(piece: Piece, world: World) -> dict[int, Tensor]:
    """rank -> the numbers of the elements it holds, for the ranks that have the piece."""
    numbered = torch.arange(math.prod(piece.shape)).view(piece.shape)
    ranks = [rank for rank in range(world.size) if is_held(piece, world.layout, rank)]
    return {rank: numbered[where(piece, world.layout, rank)].flatten() for rank in ranks}


def is_whole(piece: Piece, world: World) -> bool:
    """Whether every element is somewhere; cutting twice along the same ranks leaves some out."""
    held = torch.cat(list(elements(piece, world).values()))
    return len(held.unique()) == math.prod(piece.shape)


def contributed(piece: Piece, world: World, p: float) -> Tensor:
    """What each rank adds: |x|^p summed (for inf: the largest) over the slice of its block that is its to read."""
    parts = [torch.zeros((), dtype=DOUBLE)]
    values = whole(piece, DOUBLE)
    for rank in elements(piece, world):
        held = holding(world.layout, piece.placement, rank)
        owned = (
            Block(values[where(piece, world.layout, rank)].contiguous(), held.count, held.index).owned.flatten().abs()
        )
        if owned.numel():
            parts.append(owned.max() if math.isinf(p) else owned.pow(p).sum())
    return torch.stack(parts)


@pytest.mark.parametrize("part", range(8))
def test_250_layouts_add_up(part: int) -> None:
    draw = Random(part)
    seen = {"cut": 0, "uneven": 0, "empty": 0, "tied": 0, "expert": 0, "several holders": 0, "not whole": 0}
    for number in range(250):
        world, p = draw_world(draw), draw.choice(ORDERS)
        pieces = [draw_piece(draw, world, f"{number}_{at}") for at in range(draw.randint(1, 4))]
        for piece in pieces:
            check_holders(piece, world)
        seen["not whole"] += sum(not is_whole(piece, world) for piece in pieces)
        pieces = [piece for piece in pieces if is_whole(piece, world)]
        sums = torch.cat([torch.zeros(1, dtype=DOUBLE), *(contributed(piece, world, p) for piece in pieces)])
        norm = float(sums.max() if math.isinf(p) else sums.sum().pow(1 / p))
        true = norm_of([whole(piece, DOUBLE) for piece in pieces], p)
        assert math.isclose(norm, true, rel_tol=1e-12), (world.parallel, pieces, p)
        note(seen, pieces, world)
    assert min(seen.values()) > 10, seen  # the draws are of every kind


def check_holders(piece: Piece, world: World) -> None:
    """Ranks hold the same elements if and only if the library says so; and its start-up count is right."""
    held = elements(piece, world)
    counted = 0.0
    for rank, mine in held.items():
        found = holding(world.layout, piece.placement, rank)
        counted += len(mine) / found.count
        if len(mine):
            assert found.ranks == tuple(other for other, theirs in held.items() if torch.equal(theirs, mine)), piece
    assert counted == pytest.approx(len(torch.cat(list(held.values())).unique()))


def note(seen: dict[str, int], pieces: list[Piece], world: World) -> None:
    for piece in pieces:
        sizes = {len(mine) for mine in elements(piece, world).values()}
        seen["cut"] += bool(piece.placement.shards)
        seen["uneven"] += len(sizes) > 1
        seen["empty"] += 0 in sizes and len(sizes) > 1
        seen["tied"] += piece.placement.tied is not None
        seen["expert"] += any(mode.startswith("expert") for mode in piece.on)
        seen["several holders"] += any(
            holding(world.layout, piece.placement, r).count > 1 for r in elements(piece, world)
        )


def on_ranks(first: int, count: int) -> list[Fact]:
    """On 8 ranks: worlds and pieces drawn alike on every rank, clipped by the function."""
    facts = []
    for seed in range(first, first + count):
        draw = Random(seed)
        world, p = draw_world(draw, size=8), draw.choice(ORDERS)
        pieces = [draw_piece(draw, world, f"{seed}_{at}") for at in range(4)]
        pieces = [piece for piece in pieces if is_whole(piece, world)]
        with launched(world.parallel) as gpc:
            facts += by_function(gpc, pieces, DOUBLE, p)
    return facts


def test_five_layouts_on_8_ranks() -> None:
    judge(run_world(8, on_ranks, 0, 5).values)


@pytest.mark.slow
def test_fifty_layouts_on_8_ranks() -> None:
    judge(run_world(8, on_ranks, 100, 50, timeout=110).values)
