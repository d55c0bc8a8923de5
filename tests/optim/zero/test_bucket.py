"""Slices and pieces: pure arithmetic, over any number of ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from colonnade.optim.zero.bucket import Member, ShardedBucket, fill_buckets
from colonnade.optim.zero.team import Flat

SHAPES = st.lists(st.lists(st.integers(1, 7), max_size=3).map(tuple), min_size=1, max_size=6)
KINDS = st.sampled_from([torch.float64, torch.float32, torch.bfloat16])


def team(size: int, index: int) -> Any:
    return SimpleNamespace(size=size, index=index)


def members(shapes: list[tuple[int, ...]], dtype: torch.dtype) -> list[Member]:
    start, made = 1, []
    for at, shape in enumerate(shapes):
        numel = torch.empty(shape).numel()
        values = torch.arange(start, start + numel, dtype=torch.float64).view(shape).to(dtype)
        made.append(Member(f"p{at}", nn.Parameter(values), at % 2, 1))
        start += numel
    return made


@given(SHAPES, KINDS, st.integers(1, 5))
def test_the_pieces_of_all_ranks_make_up_every_parameter_once(shapes, dtype, ranks):
    seen: dict[str, list[int]] = {}
    for index in range(ranks):
        mine = members(shapes, dtype)
        bucket = ShardedBucket(mine, team(ranks, index))
        assert bucket.numel % ranks == 0
        bucket.use_memory(Flat(torch.zeros(bucket.numel, dtype=dtype)), masters=False, device=torch.device("cpu"))
        for piece in bucket.pieces:
            seen.setdefault(piece.member.name, []).extend(range(piece.start, piece.stop))
            whole = piece.member.local.flatten()
            assert torch.equal(piece.value, whole[piece.start : piece.stop])
            piece.value.fill_(7)
            assert bool((piece.member.local.flatten()[piece.start : piece.stop] == 7).all()), "a view, not a copy"
        assert all(int(gap.count_nonzero()) == 0 for gap in bucket.gaps(bucket.flat.own))
        assert bucket.values.numel() == bucket.used <= bucket.width
    for member in members(shapes, dtype):
        assert seen[member.name] == list(range(member.local.numel()))


@given(SHAPES, st.integers(1, 4))
def test_a_master_copy_keeps_the_places_and_comes_back_rounded(shapes, ranks):
    bucket = ShardedBucket(members(shapes, torch.bfloat16), team(ranks, 0))
    memory = Flat(torch.zeros(bucket.numel, dtype=torch.bfloat16))
    bucket.use_memory(memory, masters=True, device=torch.device("cpu"))
    assert bucket.values.dtype == torch.float32
    for piece in bucket.pieces:
        piece.value.fill_(1.0 + 2**-12)
    bucket.publish()
    for piece in bucket.pieces:
        assert bool((piece.member.local.flatten()[piece.start : piece.stop] == 1.0).all())
        assert bool((piece.value != 1.0).all())


def test_buckets_are_filled_from_the_end_of_the_model():
    mine = members([(4,), (100,), (4,), (4,)], torch.float32)
    buckets = fill_buckets(mine, team(2, 0), cap=40)
    assert [[member.name for member in bucket.members] for bucket in buckets] == [["p3", "p2"], ["p1"], ["p0"]]


def test_weights_that_were_written_by_hand_reach_the_masters():
    (member,) = members([(40,)], torch.bfloat16)
    bucket = ShardedBucket([member], team(2, 1))
    bucket.use_memory(Flat(torch.zeros(bucket.numel, dtype=torch.bfloat16)), masters=True, device=torch.device("cpu"))
    (piece,) = bucket.pieces
    before = piece.value.clone()
    piece.value += 2**-12
    bucket.refresh()
    assert not torch.equal(piece.value, before), "masters that nobody wrote to keep their digits"
    with torch.no_grad():
        member.parameter.add_(1)
    bucket.refresh()
    assert torch.equal(piece.value, before + 1)
