"""Data loaders, activation checkpointing, and the rest."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from colonnade._launch import launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.testing import run_world
from colonnade.utils import checkpoint, free_port, get_dataloader


def _loaded() -> list[float]:
    with launch({"parallel": {"tensor": 2}}, context=ParallelContext(), verbose=False) as gpc:
        loader = get_dataloader(TensorDataset(torch.arange(8.0)), shuffle=True, batch_size=2, context=gpc)
        return [value for (batch,) in loader for value in batch.tolist()]


def test_tensor_ranks_load_the_same_and_data_ranks_the_rest():
    values = run_world(4, _loaded).values
    assert values[0] == values[1]
    assert values[2] == values[3]
    assert sorted(values[0] + values[2]) == list(range(8))


@pytest.mark.parametrize("offload", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
def test_activations_computed_again_give_the_same_gradient(offload, reentrant):
    torch.manual_seed(0)
    layer, x = nn.Sequential(nn.Linear(3, 5), nn.Tanh()), torch.randn(2, 3, requires_grad=True)
    layer(x).sum().backward()
    expected = [parameter.grad.clone() for parameter in layer.parameters()]
    layer.zero_grad()
    checkpoint(layer, offload, x, use_reentrant=reentrant).sum().backward()
    assert all(torch.equal(parameter.grad, grad) for parameter, grad in zip(layer.parameters(), expected, strict=True))


def test_a_free_port_is_a_port():
    assert 0 < free_port() < 65536
