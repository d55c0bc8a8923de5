"""What transformers' own hook for a norm of each head does to gradients that are accumulated, and what ours does."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from colonnade import initialize, parallelize
from colonnade._launch import launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.testing import run_world

PASSES, HEAD = 3, 4


class Heads(nn.Module):
    """Two heads, each normed, and weighed by numbers that it has of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(HEAD, 2 * HEAD), nn.Linear(2 * HEAD, 1)
        self.q_norm = nn.LayerNorm(HEAD)

    def forward(self, x: Tensor) -> Tensor:
        return self.o(self.q_norm(self.q(x).unflatten(-1, (-1, HEAD))).flatten(-2)).sum()


PLAN = {"q": "colwise", "o": "rowwise"}


def inputs() -> list[Tensor]:
    return list(torch.randn(PASSES, 5, HEAD, generator=torch.Generator().manual_seed(1), dtype=torch.float64))


def build() -> Heads:
    torch.manual_seed(0)
    return Heads().double()


def truth() -> list[Tensor]:
    """One process: the gradient of the norm's weight, pass by pass."""
    found = []
    for x in inputs():
        model = build()
        model(x).backward()
        found.append(model.q_norm.weight.grad)
    return found


def _both() -> tuple[Tensor, Tensor]:
    from transformers.distributed.tensor_parallel import ReplicatedWithGradAllReduce

    config = {"parallel": {"tensor": {"size": 2, "mode": "1d"}}, "gradient_accumulation": PASSES}
    with launch(config, context=ParallelContext(), verbose=False) as gpc:
        theirs = parallelize(build(), PLAN, context=gpc)
        ReplicatedWithGradAllReduce().install_forward(theirs.q_norm, gpc.device_mesh(ParallelMode.TENSOR))
        for x in inputs():
            theirs(x).backward()
        ours = parallelize(build(), {**PLAN, "q_norm": "replicated_with_grad_allreduce"}, context=gpc)
        engine = initialize(ours, lambda p: torch.optim.SGD(p, lr=0.0), context=gpc)[0]
        for x in inputs():
            engine.backward((engine(x), torch.tensor(1.0)))
        engine._sum_gradients()
        dist.barrier()
        return theirs.q_norm.weight.grad, ours.q_norm.weight.grad * PASSES


@pytest.mark.slow
def test_upstreams_hook_sums_in_every_pass_and_ours_once_a_step():
    """Theirs sums what was summed before: the first of three passes counts 2 x 2 times on 2 ranks, the second 2 times."""
    pytest.importorskip("transformers.distributed.tensor_parallel")
    first, second, third = truth()
    theirs, ours = run_world(2, _both).values[0]
    torch.testing.assert_close(ours, first + second + third, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(theirs, 4 * first + 2 * second + third, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(theirs, ours, rtol=0.1)
