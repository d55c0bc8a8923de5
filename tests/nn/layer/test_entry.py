"""The ways in and out of a split model, and what lies between: masks, tokens along hidden, autocast."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from colonnade._launch import launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.errors import ConfigError
from colonnade.nn.layer import (
    HiddenParameter,
    Linear,
    PositionEmbedding,
    SelfAttention,
    Whole,
    arrange,
    gather_output,
    partition_input,
    unsplit_sequence,
)
from colonnade.testing import gather_weights, run_world
from tests.nn.layer.cases import numbers

CONFIGS = {
    "1d": (2, {"size": 2, "mode": "1d"}, False),
    "1d, sequence split": (2, {"size": 2, "mode": "1d"}, True),
    "2d": (4, {"size": 4, "mode": "2d"}, False),
}


def _there_and_back(gpc: ParallelContext, split: bool) -> None:
    """In and out is where it was, and so is the gradient."""
    here = arrange(gpc, split)
    x = numbers(4, 6, 8, seed=1).requires_grad_()
    weights = numbers(4, 6, 8, seed=2)
    for side in ("outer", "inner"):
        part = partition_input(x, side=side, arrangement=here)
        assert (part.numel() < x.numel()) == here.is_split(side)
        whole = gather_output(part, side=side, arrangement=here)
        assert torch.equal(whole, x)
        x.grad = None
        (whole * weights).sum().backward()
        assert torch.equal(x.grad, weights)
    part = unsplit_sequence(partition_input(x, arrangement=here), arrangement=here)
    assert part.shape[1] == x.shape[1]


def _along_hidden(gpc: ParallelContext, split: bool) -> None:
    """Parameters along hidden lie as activations do."""
    here = arrange(gpc, split)
    token = numbers(1, 1, 8, seed=3)
    held = HiddenParameter(token, arrangement=here)
    assert torch.equal(gather_weights(held, gpc)["weight"], token)
    torch.manual_seed(0)
    position = PositionEmbedding(6, 8, arrangement=here, dtype=torch.float64)
    torch.manual_seed(0)
    whole = nn.Embedding(6, 8, dtype=torch.float64).weight
    x = numbers(4, 4, 8, seed=1)
    placed = partition_input(x, arrangement=here) + position(4)
    assert torch.equal(gather_output(placed, arrangement=here), x + whole[:4])
    with pytest.raises(ConfigError, match=r"longer than PositionEmbedding\(length=6\)"):
        position(7)


def _masked(gpc: ParallelContext, split: bool) -> None:
    """Masks have the whole batch, and keys may have fewer heads."""
    here, other, plain = arrange(gpc, split), arrange(gpc, split), Whole(gpc)
    products: list[int] = []

    def multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        products.append(1)
        return F.linear(x, weight, bias)

    other.multiply = multiply  # as float8 has one of its own
    x = numbers(4, 6, 8, seed=1)
    padding = torch.ones(4, 1, 1, 6, dtype=torch.bool)
    padding[1, ..., 4:] = padding[3, ..., 2:] = False
    causal = torch.ones(6, 6, dtype=torch.bool).tril()
    results = []
    for arrangement in (plain, here, other):
        torch.manual_seed(0)
        attention = SelfAttention(8, 2, dtype=torch.float64, arrangement=arrangement)
        part = partition_input(x, arrangement=arrangement)
        grouped = SelfAttention(8, 4, kv_heads=2, dtype=torch.float64, arrangement=arrangement)
        made = [attention(part, padding), attention(part, causal), attention(part, causal.view(1, 1, 6, 6))]
        made.append(attention(partition_input(x[:2], arrangement=arrangement), padding[:2]))
        results.append([gather_output(y, arrangement=arrangement) for y in (*made, grouped(part))])
    for found in results[1:]:
        torch.testing.assert_close(found, results[0], rtol=1e-12, atol=1e-12)
    assert bool(products) == other.multiplies_blocks


def _half(gpc: ParallelContext, split: bool) -> None:
    """Under autocast products run in its dtype."""
    here, plain = arrange(gpc, split), Whole(gpc)
    x = numbers(4, 6, 8, seed=1).float()
    results = []
    for arrangement in (plain, here):
        torch.manual_seed(0)
        up, down = Linear(8, 16, arrangement=arrangement), Linear(16, 8, split="row", arrangement=arrangement)
        with torch.autocast("cpu", torch.bfloat16):
            y = down(torch.relu(up(partition_input(x, arrangement=arrangement))))
        gather_output(y, arrangement=arrangement).float().square().sum().backward()
        assert up.weight.grad.dtype is torch.float32
        results.append(gather_output(y, arrangement=arrangement).float())
    torch.testing.assert_close(results[0], results[1], rtol=5e-2, atol=5e-2)


def _all(name: str) -> None:
    _, config, split = CONFIGS[name]
    with launch({"parallel": {"tensor": config}}, context=ParallelContext(), verbose=False) as gpc:
        for check in (_there_and_back, _along_hidden, _masked, _half):
            check(gpc, split)


@pytest.mark.parametrize("name", CONFIGS)
def test_what_goes_in_comes_out_as_in_one_process(name):
    run_world(CONFIGS[name][0], _all, name)
