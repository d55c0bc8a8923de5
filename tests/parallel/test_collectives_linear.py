"""Linear maps of the 1d mode in one node: as one process has them, twice differentiated, in parts, under autocast."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F

from colonnade._launch import launch
from colonnade.config import load_config
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.nn.layer import Arrangement, Linear, arrange, gather_output, partition_input
from colonnade.parallel.collectives import Way, row_linear
from colonnade.parallel.wire import members_of, recorded
from colonnade.proof.planner.ranks import fake_rank
from tests.ranks import on_ranks

ROWS, LENGTH, WIDTH, OUT = 3, 4, 6, 8


def _whole(split: str, bias: bool) -> tuple[nn.Linear, Tensor]:
    torch.manual_seed(3)
    plain = nn.Linear(WIDTH, OUT, bias).double()
    return plain, torch.randn(ROWS, LENGTH, WIDTH, dtype=torch.float64, requires_grad=True)


def _ours(plain: nn.Linear, x: Tensor, split: str, here: Arrangement) -> tuple[Linear, Tensor, Tensor]:
    """The layer, this rank's part of x, and the whole of what the layer gives."""
    layer = Linear.from_module(plain, split=split, arrangement=here)  # type: ignore[arg-type]
    part = partition_input(x, side="outer" if split == "column" else "inner", arrangement=here)
    side: Any = "inner" if split == "column" else "outer"
    return layer, part, gather_output(layer(part), side=side, features=OUT, arrangement=here)


def _apart(here: Any, x: Tensor, weight: Tensor, bias: Tensor | None, split: str) -> Tensor:
    """The same of functions with gradients, each a node of its own."""
    if split == "column":
        return F.linear(here.enter(x), weight, bias)
    y = here._leave(F.linear(x, weight))
    return y if bias is None else y + bias


def _derivatives(y: Tensor, leaves: list[Tensor]) -> tuple[Any, Any]:
    """First and second ones."""
    first = torch.autograd.grad(y.pow(3).sum(), leaves, create_graph=True)
    second = torch.autograd.grad(sum(one.pow(2).sum() for one in first), leaves)
    return [one.detach() for one in first], second


def _twice(split: str, bias: bool, sequence_split: bool, gpc: ParallelContext) -> None:
    plain, x = _whole(split, bias)
    here = arrange(gpc, sequence_split)
    layer, part, y = _ours(plain, x, split, here)
    torch.testing.assert_close(y, plain(x), rtol=0, atol=1e-12)
    (expected,) = torch.autograd.grad(plain(x).square().sum(), x)
    (found,) = torch.autograd.grad(y.square().sum(), x)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)
    leaves = [part.detach().requires_grad_(), layer.weight, *([layer.bias] if layer.bias is not None else [])]
    apart = _apart(here, leaves[0], layer.weight, layer.bias, split)
    torch.testing.assert_close(
        _derivatives(layer(leaves[0]), leaves), _derivatives(apart, leaves), rtol=1e-11, atol=1e-11
    )


def _parts(split: str, sequence_split: bool, gpc: ParallelContext) -> None:
    """The gradient of the input alone, and of the parameters alone, are those of the whole pass; nothing is sent twice."""
    plain, x = _whole(split, True)
    here = arrange(gpc, sequence_split)
    layer = Linear.from_module(plain, split=split, arrangement=here)  # type: ignore[arg-type]
    part = partition_input(x, side="outer" if split == "column" else "inner", arrangement=here).detach()
    start = part.requires_grad_() * 1.0
    gradient = torch.ones_like(y := layer(start))
    asked = [start, layer.weight, layer.bias]
    wanted = torch.autograd.grad(y, asked, gradient, retain_graph=True)
    with recorded() as for_input:
        (of_input,) = torch.autograd.grad([y], [get_gradient_edge(start)], [gradient], retain_graph=True)
    assert layer.weight.grad is None
    with recorded() as for_weight:
        y.backward(gradient, inputs=[layer.weight, layer.bias], retain_graph=True)  # type: ignore[list-item]
    sums, gathers = ("reduce_scatter", ["all_gather"]) if sequence_split else ("all_reduce", [])
    assert [call.op for call in for_input] == ([sums] if split == "column" else gathers)
    assert [call.op for call in for_weight] == ([] if split == "column" else gathers)
    with recorded() as for_bias:
        (of_bias,) = torch.autograd.grad(y, [layer.bias], gradient, retain_graph=True)
    assert for_bias == []
    torch.testing.assert_close(of_bias, wanted[2])
    torch.testing.assert_close((of_input, layer.weight.grad, layer.bias.grad), wanted)  # type: ignore[union-attr]


def _autocast(split: str, gpc: ParallelContext) -> None:
    plain, x = (value.float() for value in _whole(split, True))
    x = x.detach().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        layer, _, y = _ours(plain, x, split, arrange(gpc, False))
        again = plain(x)
    assert y.dtype is again.dtype is torch.bfloat16
    torch.testing.assert_close(y, again, rtol=2e-2, atol=2e-2)
    y.float().square().sum().backward()
    found, x.grad = x.grad, None
    again.float().square().sum().backward()
    assert found is not None
    assert layer.weight.grad is not None
    assert found.dtype is layer.weight.grad.dtype is torch.float32
    torch.testing.assert_close(found, x.grad, rtol=5e-2, atol=5e-2)


@on_ranks(2)
def test_one_node_for_a_product_and_its_collectives():
    with launch({"parallel": {"tensor": {"size": 2, "mode": "1d"}}}, context=ParallelContext(), verbose=False) as gpc:
        for split in ("column", "row"):
            for bias in (True, False):
                for sequence_split in (True, False):
                    _twice(split, bias, sequence_split, gpc)
            for sequence_split in (True, False):
                _parts(split, sequence_split, gpc)
            _autocast(split, gpc)
        with pytest.raises(Exception, match="sequence of size 3 cannot be sharded evenly"):
            Linear(2, 2, split="row", arrangement=arrange(gpc, True))(torch.zeros(1, 3, 1))


def test_one_rank_adds_the_bias() -> None:
    """In a world that is not there, where a sum is what this rank has given."""
    torch.manual_seed(0)
    x, weight, bias = torch.randn(5, 3), torch.randn(2, 3), torch.randn(2)
    for rank in range(3):
        context = ParallelContext()
        with fake_rank(load_config({"parallel": {"tensor": {"size": 3, "mode": "1d"}}}), 3, rank, context):
            members = members_of(ParallelMode.PARALLEL_1D, context)
            assert members is not None
            way = Way(members, None, lambda x: x, lambda x: x)
            torch.testing.assert_close(row_linear(x, weight, bias, way), F.linear(x, weight, None if rank else bias))
            torch.testing.assert_close(row_linear(x, weight, None, way), F.linear(x, weight))
