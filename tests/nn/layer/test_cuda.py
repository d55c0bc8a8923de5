"""Layers on a GPU against fp64 there; nothing here runs without one."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from colonnade.context.parallel_context import ParallelContext
from colonnade.nn.layer import LinearCrossEntropyLoss, Whole

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float64: 1e-11}


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_the_fused_loss_equals_torchs(dtype: torch.dtype, smoothing: float) -> None:
    torch.manual_seed(0)
    tokens, hidden, classes = 1000, 256, 5003  # neither divides a block of the kernels
    x = torch.randn(tokens, hidden, device="cuda", dtype=dtype, requires_grad=True)
    weight = (0.2 * torch.randn(classes, hidden, device="cuda", dtype=dtype)).requires_grad_()
    labels = torch.randint(0, classes, (tokens,), device="cuda").masked_fill(
        torch.rand(tokens, device="cuda") < 0.1, -100
    )
    criterion = LinearCrossEntropyLoss(label_smoothing=smoothing, chunk=300, arrangement=Whole(ParallelContext()))
    loss = criterion(x, weight, labels)
    loss.backward()
    exact = [each.detach().double().requires_grad_() for each in (x, weight)]
    wanted = F.cross_entropy(F.linear(*exact), labels, label_smoothing=smoothing)
    wanted.backward()
    torch.testing.assert_close(loss.double(), wanted, rtol=TOLERANCE[dtype], atol=0)
    for found, truth in ((x.grad, exact[0].grad), (weight.grad, exact[1].grad)):
        assert (found.double() - truth).norm() <= TOLERANCE[dtype] * truth.norm()
    labels[0] = classes
    assert criterion(x, weight, labels).isnan()
