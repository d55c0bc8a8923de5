"""The blocks that a ring cuts attention into: together they are the whole mask, each pair of query and key once."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from colonnade.errors import LayoutError
from colonnade.nn.sequence import Parts
from colonnade.nn.sequence.masks import Mask, Sight, _needed, ring_turns
from tests.nn.sequence.training import seen_keys


def _of_a_block(mask: Mask, queries: int, keys: int) -> torch.Tensor:
    """As the kernels understand it."""
    seen = torch.zeros(queries, keys, dtype=torch.int)
    for start, stop in pairwise(mask.documents or (0, queries)):
        length, width = (queries, keys) if mask.documents is None else (stop - start, stop - start)
        for row in range(length):
            found = mask.seen(row, length, width)
            assert len(found), "kernels give garbage for a query that sees nothing"
            seen[start + row, start + found.start : start + found.stop] = 1
    return seen


@st.composite
def _cases(draw: st.DrawFn) -> tuple[Parts, Sight]:
    size = draw(st.integers(1, 5))
    if draw(st.booleans()):
        parts = Parts.of(draw(st.integers(1, 30)), size, True)
    else:
        lengths = draw(st.lists(st.integers(0, 6), min_size=size, max_size=size).filter(any))
        parts = Parts(tuple(lengths))
    total = sum(parts.lengths)
    documents = None
    if draw(st.booleans()):
        lengths = draw(st.lists(st.integers(1, 8), min_size=1, max_size=8))
        ends = [end for end in accumulate(lengths, initial=0) if end < total]
        documents = [*ends, total]
    window = draw(st.none() | st.integers(0, 12))
    return parts, Sight.of(draw(st.booleans()), window, documents, total)


@given(_cases())
def test_the_blocks_of_all_ranks_are_the_whole_mask_once(case):
    parts, sight = case
    size, total = len(parts.lengths), sum(parts.lengths)
    found = torch.zeros(total, total, dtype=torch.int)
    for at in range(size):
        mine = parts.positions(at)
        for turn in ring_turns(sight, parts, at):
            other = (at - turn.ahead) % size
            matching = next(t for t in ring_turns(sight, parts, other) if t.ahead == turn.ahead)
            assert matching.sent == turn.received  # what one sends is what the other waits for
            theirs = parts.positions(other)[turn.received]
            assert turn.received.stop <= parts.lengths[other]
            assert all(piece.queries.stop <= parts.lengths[at] for piece in turn.pieces)
            for queries, keys, mask in turn.pieces:
                assert all(b > a for a, b in pairwise(mask.documents or ())), "kernels are given no empty documents"
                assert len(mine[queries]), "a block has queries"
                assert len(theirs[keys]), "and keys"
                block = _of_a_block(mask, len(mine[queries]), len(theirs[keys]))
                found[mine[queries].unsqueeze(-1), theirs[keys]] += block
                for side in () if sight.documents or mask.is_causal else ("left", "right"):
                    if getattr(mask, side) is not None:  # it hides something: else None, for which kernels are faster
                        assert not torch.equal(_of_a_block(replace(mask, **{side: None}), *block.shape), block)
    assert torch.equal(found, seen_keys(total, sight.causal, sight.window, sight.documents).int())


def test_balanced_halves_are_one_block_a_turn_of_the_same_work():
    work = []
    for at in range(4):
        turns = ring_turns(Sight(causal=True), Parts.of(64, 4, True), at)
        assert [len(turn.pieces) for turn in turns] == [1] * 4
        sizes = [(p.queries.stop - p.queries.start) * (p.keys.stop - p.keys.start) for t in turns for p in t.pieces]
        assert turns[0].pieces[0].mask.is_causal
        assert all(turn.pieces[0].mask.is_full for turn in turns[1:])
        work.append(sizes)
    assert all(sizes == [256, 128, 128, 128] for sizes in work)


def test_keys_that_nobody_sees_stay_where_they_are():
    parts = Parts((100,) * 8)
    turns = ring_turns(Sight(causal=True, window=10), parts, 3)
    assert [turn.ahead for turn in turns] == [0, 1]
    assert turns[1].received == slice(90, 100)  # of the hundred before, the last ten
    assert turns[1].pieces[0].queries == slice(0, 10)
    assert [turn.ahead for turn in ring_turns(Sight(True, None, (0, 100, 800)), parts, 0)] == [0, 1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("documents", "total"),
    [([], 9), ([0], 9), ([0], 0), ([1, 5, 9], 9), ([0, 5, 5, 9], 9), ([0, 9, 5], 9), ([0, 5], 9), ([0, 10], 9)],
)
def test_documents_are_cumulative_lengths_of_everything(documents, total):
    with pytest.raises(LayoutError, match=f"increasing cumulative lengths from 0 to the {total} tokens"):
        Sight.of(False, None, documents, total)


def test_one_document_is_none():
    assert Sight.of(False, None, [0, 9], 9) == Sight()
    assert Sight.of(True, 0, [0, 1, 9], 9) == Sight(True, 0, (0, 1, 9))


def test_documents_that_lie_on_the_device_are_not_read_in_every_layer():
    with pytest.raises(LayoutError, match=r"documents.tolist\(\)"):
        Sight.of(False, None, torch.empty(3, device="meta"), 9)
    assert Sight.of(False, None, torch.tensor([0, 5, 9]), 9).documents == (0, 5, 9)


def test_a_window_is_not_negative():
    with pytest.raises(LayoutError, match="window is -1"):
        Sight.of(True, -1, None, 9)


@pytest.mark.parametrize(("length", "expected"), [(0, slice(0, 0)), (1, slice(0, 1)), (5, slice(0, 1))])
def test_a_turn_in_which_a_rank_needs_nothing_takes_one_row(length, expected):
    assert _needed([], length) == expected


@pytest.mark.parametrize(
    ("mask", "is_causal", "is_full"),
    [
        (Mask(), False, True),
        (Mask(right=0), True, False),
        (Mask(right=1), False, False),
        (Mask(left=3, right=0), False, False),
        (Mask(right=0, documents=(0, 4)), False, False),
        (Mask(documents=(0, 4)), False, False),
        (Mask(left=0), False, False),
    ],
)
def test_which_masks_have_a_name(mask, is_causal, is_full):
    assert (mask.is_causal, mask.is_full) == (is_causal, is_full)


@pytest.mark.parametrize(
    ("mask", "seen"),
    [
        (Mask(), [range(6)] * 4),
        (Mask(right=0), [range(3), range(4), range(5), range(6)]),
        (Mask(left=1, right=1), [range(1, 4), range(2, 5), range(3, 6), range(4, 6)]),
        (Mask(left=9), [range(6)] * 4),
    ],
)
def test_what_each_of_four_queries_sees_of_six_keys(mask, seen):
    assert [mask.seen(row, 4, 6) for row in range(4)] == seen
