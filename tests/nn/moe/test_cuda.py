"""Experts on a GPU: grouped products in half precision, compiled, and no wait for the device where all experts are here."""

from __future__ import annotations

import pytest
import torch

from colonnade.context.parallel_context import ParallelContext
from colonnade.nn.moe import MoE, TopKRouter, auxiliary_loss
from colonnade.nn.moe.dispatch import combine, counted, order
from tests.nn.moe.test_dispatch import by_limits, check_rows
from tests.nn.moe.test_grouped import KINDS, by_kind, check_experts, check_ranks
from tests.ranks import on_ranks

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"), pytest.mark.slow]


@by_limits
@pytest.mark.parametrize(("dtype", "width"), [(torch.float64, 6), (torch.float32, 6), (torch.float32, 2500)], ids=str)
def test_rows_are_sent_and_come_back_to_their_tokens(limits, dtype, width):
    """By plain operators, and by kernels for one block of columns and for several."""
    check_rows(limits, "cuda", dtype, width)


def test_kernels_give_what_plain_operators_do():
    """In half precision, with many choices; also where gradients are differentiated again."""
    experts = torch.stack([torch.randperm(16, device="cuda")[:8] for _ in range(70)], 1)
    counts = counted(experts, 16)
    sends = order(experts, counts.sum(0))
    rows, weights = torch.randn(560, 96, device="cuda"), torch.rand(70, 8, device="cuda")
    gradient = torch.randn(70, 96, device="cuda")
    results = []
    for dtype in (torch.float64, torch.bfloat16):
        given = [value.bfloat16().to(dtype).requires_grad_() for value in (rows, weights)]
        out = combine(*given, sends)
        first = torch.autograd.grad(out, given, gradient.bfloat16().to(dtype), create_graph=True)
        again = torch.autograd.grad(out, given, gradient.bfloat16().to(dtype))
        results.append([out, *first, *again, *torch.autograd.grad(first[0].square().sum(), given[1])])
    for exact, found in zip(*results, strict=True):
        assert found.dtype == torch.bfloat16
        assert (found.double() - exact).norm() <= 1e-2 * exact.norm()


@by_kind
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_experts_are_a_loop_over_experts(dtype, kind):
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


@pytest.mark.parametrize("ranks", [2, 4])
@on_ranks("ranks", backend="nccl", timeout=110)
def test_experts_on_ranks_equal_one_process(ranks):
    for dtype, capacity in ((torch.bfloat16, None), (torch.bfloat16, 0.7), (torch.float32, None)):
        check_ranks(dtype, capacity)
