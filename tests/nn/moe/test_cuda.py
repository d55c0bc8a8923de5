"""Experts on a GPU: grouped products in half precision, compiled, and no wait for the device where all experts are here."""

from __future__ import annotations

import pytest
import torch

from colonnade.context.parallel_context import ParallelContext
from colonnade.nn.moe import MoE, TopKRouter, auxiliary_loss
from colonnade.testing import run_world
from tests.nn.moe.test_grouped import KINDS, by_kind, check_experts, check_ranks

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.slow,
]


@by_kind
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_experts_are_a_loop_over_experts(dtype, kind):
    torch.backends.cuda.matmul.allow_tf32 = False
    check_experts(dtype, "cuda", kind, False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_experts_compile_without_a_graph_break(dtype):
    check_experts(dtype, "cuda", KINDS[2], "inductor")


@pytest.mark.parametrize("capacity", [None, 0.7])
def test_a_layer_with_all_experts_here_does_not_wait_for_the_device(capacity):
    context = ParallelContext()
    router = TopKRouter(64, 8, 2, capacity=capacity, z_loss=0.1, context=context)
    layer = MoE(64, 8, router, inner=96, gated=True, context=context).cuda().bfloat16()
    x = torch.randn(50, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    for mode in ("default", "error"):
        torch.cuda.set_sync_debug_mode(mode)
        try:
            (layer(x).square().sum() + auxiliary_loss(layer)).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert all(parameter.grad.isfinite().all() for parameter in layer.parameters())


def _ranks() -> None:
    for dtype, capacity in ((torch.bfloat16, None), (torch.bfloat16, 0.7), (torch.float32, None)):
        check_ranks(dtype, capacity)


@pytest.mark.parametrize("ranks", [2, 4])
def test_experts_on_ranks_equal_one_process(ranks):
    run_world(ranks, _ranks, backend="nccl", timeout=110)
