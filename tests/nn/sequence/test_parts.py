"""Parts of a sequence: who has which tokens; splitting and gathering are inverse, with the right gradients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from colonnade._launch import launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.errors import LayoutError
from colonnade.nn.sequence import Parts, gather_sequence, sequence_positions, split_sequence
from colonnade.nn.sequence.parts import sequence_rank
from tests.nn.sequence.training import close, numbers
from tests.ranks import on_ranks


@given(total=st.integers(0, 60), size=st.integers(1, 6), balanced=st.booleans())
def test_every_token_lies_on_one_rank_and_lengths_differ_little(total, size, balanced):
    parts = Parts.of(total, size, balanced)
    found = torch.cat([parts.positions(rank) for rank in range(size)])
    assert sorted(found.tolist()) == list(range(total))
    assert tuple(len(parts.positions(rank)) for rank in range(size)) == parts.lengths
    assert max(parts.lengths) - min(parts.lengths) <= 1 + balanced


@given(total=st.integers(48, 200), size=st.integers(2, 6))
def test_balanced_parts_share_the_work_of_a_causal_mask(total, size):
    work = [Parts.of(total, size, True).positions(rank).sum().item() for rank in range(size)]
    assert max(work) - min(work) <= 2 * total


def test_contiguous_parts_may_have_any_lengths_balanced_ones_may_not():
    assert Parts((5, 0, 2)).positions(2).tolist() == [5, 6]
    with pytest.raises(
        LayoutError, match=r"balanced parts of 7 tokens have lengths \[3, 4\], but the given lengths are \[5, 2\]"
    ):
        Parts((5, 2), balanced=True)


def test_without_a_sequence_group_everything_is_here():
    x = torch.arange(5.0).reshape(1, 5)
    assert split_sequence(x) is x
    assert sequence_rank(ParallelContext()) == (1, 0)
    assert torch.equal(gather_sequence(split_sequence(x)), x)
    assert sequence_positions(3).tolist() == [0, 1, 2]
    assert sequence_positions(3, lengths=[3]).tolist() == [0, 1, 2]
    for lengths in ([2, 1], [3, 0], [2]):
        with pytest.raises(LayoutError, match="one length for each rank"):
            sequence_positions(3, lengths=lengths)


@pytest.mark.parametrize(("balanced", "dim"), [(False, 1), (True, 1), (True, 2)])
@on_ranks(3)
def test_split_and_gather_are_inverse_and_gradients_come_together(balanced: bool, dim: int):
    with launch({"parallel": {"sequence": 3}}, context=ParallelContext(), verbose=False) as gpc:
        at = gpc.get_local_rank(ParallelMode.SEQUENCE)
        whole = numbers(7, 7, 7, seed=1)
        part = split_sequence(whole, dim, balanced=balanced, context=gpc).requires_grad_()
        back = gather_sequence(part, dim, balanced=balanced, context=gpc)
        assert torch.equal(back, whole)
        positions = sequence_positions(part.size(dim), balanced=balanced, context=gpc)
        assert torch.equal(part.detach(), whole.index_select(dim, positions))
        # Each rank goes on in its own way: the gradients of all come together.
        (back * numbers(7, 7, 7, seed=10 + at)).sum().backward()
        all_ways = sum(numbers(7, 7, 7, seed=10 + other) for other in range(3))
        close(part.grad, all_ways.index_select(dim, positions), 1e-14)
