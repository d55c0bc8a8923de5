"""Random numbers by position on a GPU: those of the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from colonnade._launch import launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.engine.build import initialize
from colonnade.parallel import meta
from colonnade.parallel.meta import meta_init, parameter_inits
from colonnade.parallel.placement import local_part
from tests.ranks import on_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


def test_a_gpu_draws_what_the_cpu_draws():
    every = torch.arange(1 << 20)
    assert torch.equal(meta.uniform(7, every.cuda(), -1.0, 3.0).cpu(), meta.uniform(7, every, -1.0, 3.0))
    torch.testing.assert_close(meta.normal(7, every.cuda()).cpu(), meta.normal(7, every), rtol=1e-12, atol=1e-12)


def test_a_parameter_is_made_on_the_gpu_with_little_memory_beside_it():
    with meta_init():
        layer = nn.Linear(8192, 8192, bias=False)
    init, shape = parameter_inits([layer])[id(layer.weight)], layer.weight.shape
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    local = torch.empty(shape, device="cuda")
    init.fill(local, [0, 0], shape, [0, 0], 1)
    assert torch.cuda.max_memory_allocated() - before <= 1.25 * local.nbytes
    rows = torch.empty(3, 8192)
    init.fill(rows, [100, 0], shape, [100, 0], 1)
    assert torch.equal(local[100:103].cpu(), rows)


@on_ranks(2, backend="nccl")
def test_offloaded_shards_start_on_the_cpu():
    """Shards that live on the CPU between their uses start there, and train."""
    with launch({"zero": {"stage": 3, "offload": True}}, context=ParallelContext(), verbose=False) as gpc:
        with meta_init():
            model = nn.Sequential(nn.Linear(7, 9), nn.Linear(9, 4))
        engine = initialize(model, lambda p: torch.optim.SGD(p, lr=0.01), context=gpc)[0]
        devices = [local_part(parameter).device.type for parameter in model.parameters()]
        losses = []
        for _ in range(3):
            engine.zero_grad()
            loss = engine(torch.ones(2, 7, device=gpc.device)).square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        assert losses[-1] < losses[0]
        engine.close()
    assert set(devices) == {"cpu"}
