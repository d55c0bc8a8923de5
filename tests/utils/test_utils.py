"""Data loaders, activation checkpointing, and the rest."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from colonnade._launch import launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.testing import run_world
from colonnade.utils import checkpoint, free_port, get_current_device, get_dataloader, print_rank_0


def _loaded() -> list[float]:
    with launch({"parallel": {"tensor": 2}}, context=ParallelContext(), verbose=False) as gpc:
        loader = get_dataloader(TensorDataset(torch.arange(8.0)), shuffle=True, batch_size=2, context=gpc)
        return [value for (batch,) in loader for value in batch.tolist()]


def test_tensor_ranks_load_the_same_and_data_ranks_the_rest():
    values = run_world(4, _loaded).values
    assert values[0] == values[1]
    assert values[2] == values[3]
    assert sorted(values[0] + values[2]) == list(range(8))


def test_a_loader_takes_what_torchs_own_takes():
    dataset, context = TensorDataset(torch.arange(5.0)), ParallelContext()
    plain = get_dataloader(dataset, add_sampler=False, batch_size=2, context=context)
    assert [batch.tolist() for (batch,) in plain] == [[0, 1], [2, 3], [4]]
    assert get_dataloader(dataset, pin_memory=True, context=context).pin_memory == torch.cuda.is_available()
    orders = [
        [batch.tolist() for (batch,) in get_dataloader(dataset, True, seed, add_sampler=False, context=context)]
        for seed in (1, 1, 2)
    ]
    assert orders[0] == orders[1] != orders[2]


@pytest.mark.parametrize("offload", [True, False])
def test_only_on_demand_are_activations_kept_on_the_host(offload, monkeypatch):
    asked = []
    monkeypatch.setattr("colonnade.utils.kept_on_host", lambda parameters: asked.append(parameters) or nullcontext())
    checkpoint(torch.tanh, offload, torch.ones(1))
    assert asked == [()] * offload


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
    assert 1024 <= free_port() < 65536  # none of those that belong to known services


def test_one_process_is_rank_0_on_its_device(capsys):
    print_rank_0("here")
    assert capsys.readouterr().out == "here\n"
    assert get_current_device() == torch.device("cuda" if torch.cuda.is_available() else "cpu")
