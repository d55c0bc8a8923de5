"""Where the parts of the ranks lie in the tensor of one process."""

from __future__ import annotations

import torch
from torch import Tensor

from colonnade.proof.random_numbers import joined, places_for

GROUPS = {"DATA": [[0, 2], [1, 3]], "TENSOR": [[0, 1], [2, 3]]}


def _found(parts: dict[int, Tensor], whole: Tensor, anyhow: bool = False) -> Tensor | str:
    shapes = {rank: tuple(part.shape) for rank, part in parts.items()}
    places = places_for(shapes, tuple(whole.shape), GROUPS, parts, whole, anyhow)
    return places if isinstance(places, str) else joined(parts, places, tuple(whole.shape))


def _whole(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def test_parts_are_joined_by_the_numbers_where_shapes_allow_several_ways() -> None:
    whole = _whole(4, 6, 4)
    rows, columns = whole.chunk(2, 0), whole.chunk(2, 2)
    for parts in (
        [whole] * 4,
        [rows[0], rows[0], rows[1], rows[1]],  # cut over DATA
        [rows[0], rows[1], rows[0], rows[1]],  # and over TENSOR
        [rows[rank // 2].chunk(2, 2)[rank % 2] for rank in range(4)],
        [columns[rank // 2].chunk(2, 0)[rank % 2] for rank in range(4)],
        list(whole.chunk(4, 0)),  # DATA outside, TENSOR inside
        [whole.chunk(4, 2)[rank] for rank in (0, 2, 1, 3)],  # TENSOR outside
    ):
        found = _found(dict(enumerate(parts)), whole)
        assert isinstance(found, Tensor), found
        assert torch.equal(found, whole)


def test_rows_may_be_dealt_out_in_any_order() -> None:
    whole = _whole(2, 8, 3)
    first, second, third, fourth = whole.chunk(4, 1)
    mine, theirs = torch.cat([first, fourth], 1), torch.cat([second, third], 1)  # as ring attention balances them
    found = _found({0: mine, 1: theirs}, whole)
    assert isinstance(found, Tensor), found
    assert torch.equal(found, whole)


def test_what_does_not_fit_is_said() -> None:
    whole = _whole(4, 6)
    assert "which does not divide (4, 6)" in str(_found({0: whole[:3], 1: whole[:3]}, whole))
    assert "different shapes" in str(_found({0: whole[:3], 1: whole[3:]}, whole))
    assert "no process groups shard" in str(_found({0: whole[:1], 1: whole[1:2]}, whole))
    other = {0: whole[:2] + 1, 2: whole[2:] + 1}
    assert "not those of the single process, in any order" in str(_found(other, whole))
    assert isinstance(_found(other, whole, anyhow=True), Tensor)
