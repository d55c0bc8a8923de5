"""Grouped products: torch's grouped_mm and the loop that stands in for it give the same, compiled or not, on ranks or not."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from colonnade._launch import launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.nn.moe import Experts, MoE, TopKRouter, auxiliary_loss, experts, no_losses
from colonnade.nn.moe.experts import why_not
from tests.ranks import on_ranks

HIDDEN, INNER, EXPERTS = 16, 24, 4
COUNTS = (3, 0, 5, 2)
ROWS = sum(COUNTS) + 2
"""Two rows behind the last that is counted."""
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
KINDS = [{"gated": True, "bias": False}, {"gated": False, "bias": True}, {"gated": True, "bias": True}]
"""Options of Experts."""
by_dtype = pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
by_kind = pytest.mark.parametrize("kind", KINDS, ids=str)


def make_experts(dtype: torch.dtype, device: str = "cpu", **kind: Any) -> tuple[Experts, Experts]:
    """Experts in a dtype, and the same in double precision."""
    torch.manual_seed(0)
    experts = Experts(HIDDEN, INNER, EXPERTS, **kind, context=ParallelContext()).to(device, dtype)
    return experts, copy.deepcopy(experts).double()


def by_loop(experts: Experts, rows: Tensor) -> Tensor:
    """What the experts make of the rows that are counted, one expert after another."""
    parts = []
    for at, part in enumerate(rows[: sum(COUNTS)].split(COUNTS)):
        inside = part @ experts.up[at] + (0 if experts.up_bias is None else experts.up_bias[at])
        gate = experts.gate
        inside = experts.activation(inside) if gate is None else experts.activation(part @ gate[at]) * inside
        parts.append(inside @ experts.down[at] + (0 if experts.down_bias is None else experts.down_bias[at]))
    return torch.cat(parts)


def check_experts(dtype: torch.dtype, device: str, kind: dict[str, Any], compiled: bool | str) -> None:
    """Outputs and gradients are those of a loop in double precision; rows that are not counted have no part in them."""
    experts, exact = make_experts(dtype, device, **kind)
    draw = torch.Generator().manual_seed(1)
    rows = torch.randn(ROWS, HIDDEN, generator=draw).to(device, dtype)
    rows[sum(COUNTS) :] = torch.nan
    gradient = torch.randn(sum(COUNTS), HIDDEN, generator=draw).to(device, dtype)
    run = torch.compile(experts, fullgraph=True, backend=compiled) if isinstance(compiled, str) else experts
    results = []
    for of, x in ((experts, rows), (exact, rows.double())):
        x = x.clone().requires_grad_()
        out = run(x, torch.tensor(COUNTS, device=device))[: sum(COUNTS)] if of is experts else by_loop(exact, x)
        grads = torch.autograd.grad(out, [x, *of.parameters()], gradient.to(out.dtype))
        results.append([out, grads[0][: sum(COUNTS)], *grads[1:]])
    for found, expected in zip(*results, strict=True):
        assert found.dtype == dtype
        assert (found.double() - expected).norm() <= TOLERANCE[dtype] * expected.norm().clamp(min=1)


@by_kind
@by_dtype
def test_experts_are_a_loop_over_experts(dtype, kind):
    check_experts(dtype, "cpu", kind, False)


@pytest.mark.slow
@by_dtype
def test_experts_compile_without_a_graph_break(dtype):
    """Where grouped_mm takes the dtype, and where the loop stands in for it."""
    check_experts(dtype, "cpu", KINDS[2], "aot_eager")


@pytest.mark.slow
@pytest.mark.parametrize("capacity", [None, 0.7])
def test_a_whole_layer_compiles_without_a_graph_break(capacity):
    torch.manual_seed(0)
    router = TopKRouter(HIDDEN, EXPERTS, 2, capacity=capacity, context=ParallelContext())
    layer = MoE(HIDDEN, EXPERTS, router, inner=INNER, gated=True, context=ParallelContext())
    results = []
    for run in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        x = torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(1)).requires_grad_()
        out, sums = run(x, no_losses(x))
        loss = out.square().sum() + auxiliary_loss(sums)
        results.append([out, sums, *torch.autograd.grad(loss, [x, *layer.parameters()])])
    for plain, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, plain)


@pytest.mark.parametrize(
    ("dtype", "inner", "message"),
    [
        (torch.float64, 24, "of torch.float64"),
        (torch.bfloat16, 20, "with torch.bfloat16 weights of 16 x 20, whose rows are not multiples of 16 bytes"),
        (torch.float32, 20, None),
        (torch.bfloat16, 24, None),
    ],
)
def test_what_grouped_mm_does_not_take_is_named_and_computed_all_the_same(dtype, inner, message):
    experts = Experts(HIDDEN, inner, EXPERTS, context=ParallelContext()).to(dtype)
    rows = torch.randn(sum(COUNTS), HIDDEN, dtype=dtype)
    assert why_not(rows, experts.up) == message
    experts(rows, COUNTS).sum().backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in experts.parameters())


@pytest.mark.parametrize(
    ("x", "weight", "compiled", "message"),
    [
        (torch.empty(2, 16, device="meta"), (4, 16, 16), False, "on meta"),
        (torch.empty(2, 16), (4, 16, 16), True, "of torch.float32 in compiled code"),
        (torch.empty(2, 16).half(), (4, 16, 16), True, "of torch.float16 in compiled code"),
        (torch.empty(2, 16).bfloat16(), (4, 16, 16), True, None),
        (torch.empty(2, 16).bfloat16(), (3, 16, 16), False, None),
        (torch.empty(2, 20).bfloat16(), (4, 20, 16), False, "with torch.bfloat16 weights of 20 x 16"),
        (torch.empty(2, 20).bfloat16(), (4, 16, 20), False, "with torch.bfloat16 weights of 16 x 20"),
    ],
)
def test_why_a_product_is_not_one_of_grouped_mm(x, weight, compiled, message):
    found = why_not(x, torch.empty(weight, dtype=x.dtype), compiled=compiled)
    assert found == message or (found or "").startswith(f"{message}, whose rows")


def test_the_ones_that_a_bias_is_multiplied_by_fit_in_every_dtype_and_are_the_fewest():
    for dtype in experts._DTYPES:
        assert why_not(torch.empty(2, 16, dtype=dtype), torch.empty(4, experts._ONES, 16, dtype=dtype)) is None
    assert experts._ONES * torch.bfloat16.itemsize == experts._ALIGNMENT


class OnGpu(Tensor):
    """Says that it lies on a GPU."""

    is_cuda = True


def test_products_one_after_another_are_told_of_on_a_gpu_alone(monkeypatch):
    told: list[str] = []
    monkeypatch.setattr(experts, "_warn_slow", told.append)
    ends = torch.tensor([1, 3])
    for dtype in (torch.float64, torch.float32):
        x, weight = torch.randn(3, 4, dtype=dtype), torch.randn(2, 4, 8, dtype=dtype)
        experts._grouped_mm_loop(x, weight, ends)
        assert told == []
        found = experts._grouped_mm_loop(x.as_subclass(OnGpu), weight, ends)
        assert torch.equal(found, torch.cat([x[:1] @ weight[0], x[1:] @ weight[1]]))
        assert told == ["of torch.float64" if dtype is torch.float64 else "of torch.float32 in compiled code"]
        told.clear()
        experts._grouped_mm_loop(x.T.as_subclass(OnGpu), x, ends)  # of the gradient, which is no news
        assert told == []


def test_second_derivatives_of_products_by_group():
    x, weight = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((5, 3), (2, 3, 4)))
    ends = torch.tensor([2, 5], dtype=torch.int32)
    assert torch.autograd.gradgradcheck(lambda x, weight: experts.grouped_mm(x, weight, ends), (x, weight))


def test_under_autocast_double_precision_stays():
    experts, exact = make_experts(torch.float64, gated=True)
    rows = torch.randn(ROWS, HIDDEN, dtype=torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = experts(rows, torch.tensor(COUNTS))[: sum(COUNTS)]
    torch.testing.assert_close(out, by_loop(exact, rows))


def test_under_autocast_experts_compute_in_its_dtype():
    experts, exact = make_experts(torch.float32, gated=True)
    rows = torch.randn(ROWS, HIDDEN, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = experts(rows, torch.tensor(COUNTS))[: sum(COUNTS)]
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert {parameter.grad.dtype for parameter in experts.parameters()} == {torch.float32}
    expected = by_loop(exact, rows.double())
    assert (out.double() - expected).norm() <= TOLERANCE[torch.bfloat16] * expected.norm()


# -- ranks ------------------------------------------------------------------------------------------------


def check_ranks(dtype: torch.dtype, capacity: float | None = None) -> None:
    """On each rank of an expert group: outputs and gradients of the layer are those of one process in double precision."""
    ranks, at = dist.get_world_size(), dist.get_rank()
    with launch({"parallel": {"expert": ranks}}, context=ParallelContext(), verbose=False) as gpc:
        layers = []
        for context in (gpc, ParallelContext()):
            torch.manual_seed(0)
            router = TopKRouter(HIDDEN, 8, 2, capacity=capacity, balance_loss=0.0, context=context)
            layers.append(MoE(HIDDEN, 8, router, inner=INNER, gated=True, context=context).to(gpc.device, dtype))
        layer, plain = layers[0], layers[1].double()
        draw = torch.Generator().manual_seed(1)
        sizes = [5 + 7 * rank for rank in range(ranks)]
        x, gradient = (torch.randn(sum(sizes), HIDDEN, generator=draw).to(gpc.device, dtype) for _ in range(2))
        mine = x.split(sizes)[at].clone().requires_grad_()
        x = x.double().requires_grad_()
        out, whole = layer(mine), plain(x)
        out.backward(gradient.split(sizes)[at])
        whole.backward(gradient.double())
        dist.all_reduce(layer.router.weight.grad)
        here = slice(at * 8 // ranks, (at + 1) * 8 // ranks)
        pairs = [(out, whole.split(sizes)[at]), (mine.grad, x.grad.split(sizes)[at])]
        pairs += [(layer.router.weight.grad, plain.router.weight.grad)]
        pairs += [
            (weight.grad, plain.experts.get_parameter(name).grad[here])
            for name, weight in layer.experts.named_parameters()
        ]
        for found, expected in pairs:
            assert (found.double() - expected).norm() <= 2 * TOLERANCE[dtype] * expected.norm().clamp(min=1)


@pytest.mark.slow
@on_ranks(2)
def test_grouped_products_on_two_ranks_equal_one_process():
    for dtype, capacity in ((torch.float32, None), (torch.float32, 0.7), (torch.bfloat16, None)):
        check_ranks(dtype, capacity)
