"""Blocks of plain tensors find their places only if they are the weight of the single process."""

from __future__ import annotations

import torch

from colonnade.proof.local_shards import LocalTensors, block_of

ONE_BATCH = [{"data": 0, "model": 0}, {"data": 0, "model": 1}]
OWN_BATCHES = [{"data": 0, "model": 0}, {"data": 1, "model": 0}]


def test_blocks_follow_the_axis_with_as_many_ranks():
    assert block_of((3, 4), (6, 4), ONE_BATCH) == (0, [0, 1])
    assert block_of((6, 2), (6, 4), OWN_BATCHES) == (1, [0, 1])
    assert block_of((2, 4), (6, 4), ONE_BATCH) is None  # three blocks on two ranks
    assert block_of((3, 2), (6, 4), ONE_BATCH) is None  # shorter in two dimensions


def test_only_blocks_of_the_scripts_own_weight_are_joined():
    whole = torch.arange(24.0).view(6, 4)
    first, second = whole.chunk(2)
    local = LocalTensors([{"weight": first}, {"weight": second}], ONE_BATCH)
    assert torch.equal(local.joined("weight", first, whole), whole)
    assert local.joined("weight", first, whole + 1) is None
    assert local.joined("weight", first, whole.view(4, 6)) is None
    zeros = torch.zeros(6)
    assert torch.equal(local.joined("bias", zeros[:3], zeros), zeros)  # equal on all ranks
