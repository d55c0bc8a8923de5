"""Batches of ranks as one process would be given them; no process group."""

from __future__ import annotations

import pytest
import torch

from colonnade.proof.record import BatchAxis, RunInfo
from colonnade.proof.reference import all_same, data_rank_batches, join

DATA, SEQUENCE, TENSOR = (
    BatchAxis("data", 2, True),
    BatchAxis("sequence", 2, True, dim=1, may_repeat=True),
    BatchAxis("tensor", 2, False),
)


def _shares(values: list, axes: list[BatchAxis]) -> list:
    runs = []
    for rank in range(len(values)):
        coordinates = {}
        for axis in reversed(axes):
            coordinates[axis.name], rank = rank % axis.size, rank // axis.size
        runs.append(RunInfo(axes=axes, coordinates=coordinates))
    return data_rank_batches(values, runs)


def _rows(rank: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return torch.full((2, 3), float(rank)), {"y": torch.tensor([rank, rank])}


def test_ranks_that_share_data_count_once_and_others_are_joined_by_rows():
    axes = [DATA, TENSOR]
    found = _shares([_rows(rank) for rank in range(4)], axes)
    assert [part[1]["y"].tolist() for part in found] == [[0, 0], [2, 2]]
    assert join(found)[0].shape == (4, 3)
    assert join(found)[1]["y"].tolist() == [0, 0, 2, 2]


def test_parts_of_sequences_are_put_together_and_whole_ones_are_taken_once():
    axes = [DATA, SEQUENCE]
    parts = [torch.arange(4).view(2, 2) + 10 * rank for rank in range(4)]
    found = _shares(parts, axes)
    assert [part.shape for part in found] == [(2, 4), (2, 4)]
    assert found[1].tolist() == [[20, 21, 30, 31], [22, 23, 32, 33]]
    whole = _shares([torch.full((2, 4), rank // 2) for rank in range(4)], axes)
    assert [part.shape for part in whole] == [(2, 4), (2, 4)]


def test_micro_batches_of_the_joined_batch_have_the_rows_of_that_micro_batch_of_all_ranks():
    first, second = torch.arange(4), torch.arange(10, 14)
    assert join([first, second], 2).tolist() == [0, 1, 10, 11, 2, 3, 12, 13]
    assert join([first, second]).tolist() == [0, 1, 2, 3, 10, 11, 12, 13]
    assert join([first, second[:2]], 2).tolist() == [0, 1, 2, 3, 10, 11]  # unlike ranks: as they come


def test_what_does_not_fit_together_is_not_joined():
    assert join([torch.zeros(2, 3), torch.zeros(2, 4)]) is None
    assert join([torch.zeros(2, 3), torch.zeros(1, 3)]).shape == (3, 3)
    axes = [SEQUENCE]
    with pytest.raises(ValueError, match="cannot be joined along dimension 1"):
        _shares([torch.zeros(2, 3), torch.zeros(3, 3)], axes)


def test_same_means_the_same_tensors_in_the_same_places():
    one = {"x": torch.arange(3)}
    assert all_same([one, {"x": torch.arange(3)}])
    assert not all_same([one, {"x": torch.arange(3) + 1}])
    assert not all_same([one, {"y": torch.arange(3)}])
