"""A model under torch's own `parallelize_module` is taken as it is, and equals one process."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from colonnade._launch import launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.engine.build import initialize
from colonnade.testing import compare, gather_gradients, gather_weights, plain_gradients
from tests.nn.layer.cases import numbers
from tests.ranks import on_ranks

RTOL = 1e-10


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=0.1, foreach=False)


def loss_of(model, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y)


@pytest.mark.slow
@on_ranks(4, timeout=100)
def test_a_plan_of_torchs_equals_one_process():
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    config = {"parallel": {"data": 2, "tensor": {"size": 2, "mode": "1d"}}, "clip_grad_norm": 1.0}
    x, y = 10 * numbers(4, 8, seed=1), numbers(4, 8, seed=2)
    plain = Feed()
    truth = plain_gradients(plain, loss_of(plain, x, y))
    chosen = optimizer(plain.parameters())
    with launch(config, context=ParallelContext(), verbose=False) as gpc:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        model = parallelize_module(Feed(), gpc.device_mesh(ParallelMode.TENSOR), plan)
        engine = initialize(model, optimizer(model.parameters()), context=gpc)[0]
        at = gpc.get_local_rank(ParallelMode.DATA)
        for step in range(3):
            engine.zero_grad()
            engine.backward(loss_of(engine, x.chunk(2)[at], y.chunk(2)[at]))
            outcome = engine._sum_gradients()
            if step == 0:
                compare(truth, gather_gradients(engine.model, gpc), RTOL)
            engine._finish_step(outcome)
            plain_gradients(plain, loss_of(plain, x, y))
            norm = nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
            assert abs(engine.grad_norm.item() - norm.item()) <= RTOL * norm.item()
            assert norm > 1.0
            chosen.step()
        compare({name: p.detach() for name, p in plain.named_parameters()}, gather_weights(engine.model, gpc), RTOL)
        engine.close()
