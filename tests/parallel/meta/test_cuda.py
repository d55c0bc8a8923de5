"""Random numbers by position on a GPU: those of the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from colonnade.parallel.meta import counter, meta_init
from colonnade.parallel.meta.recipe import recipes_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


def test_a_gpu_draws_what_the_cpu_draws():
    every = torch.arange(1 << 20)
    assert torch.equal(counter.uniform(7, every.cuda(), -1.0, 3.0).cpu(), counter.uniform(7, every, -1.0, 3.0))
    torch.testing.assert_close(counter.normal(7, every.cuda()).cpu(), counter.normal(7, every), rtol=1e-12, atol=1e-12)


def test_a_parameter_is_made_on_the_gpu_with_little_memory_beside_it():
    with meta_init():
        layer = nn.Linear(8192, 8192, bias=False)
    recipe, shape = recipes_of([layer])[id(layer.weight)], layer.weight.shape
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    local = torch.empty(shape, device="cuda")
    recipe.fill(local, [0, 0], shape, [0, 0], 1)
    assert torch.cuda.max_memory_allocated() - before <= 1.25 * local.nbytes
    rows = torch.empty(3, 8192)
    recipe.fill(rows, [100, 0], shape, [100, 0], 1)
    assert torch.equal(local[100:103].cpu(), rows)
