"""The bytes that each rank receives in forward and backward of a linear layer are the closed form of its mode; and the values are torch's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from colonnade._launch import launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.nn.layer import Arrangement, Embedding, Linear, arrange, gather_output, partition_input
from colonnade.parallel.wire import recorded
from tests.ranks import on_ranks

M, K, N = 32, 16, 24  # rows of x, its width, the width of the result
BYTES = 8


def _received(config: dict[str, object], split: str, sequence_split: bool) -> int:
    with launch({"parallel": {"tensor": config}}, context=ParallelContext(), verbose=False) as gpc:
        here = arrange(gpc, sequence_split)
        torch.manual_seed(1)
        plain = nn.Linear(K, N, bias=False).double()
        layer = Linear.from_module(plain, split=split, arrangement=here)
        side, other = ("outer", "inner") if split == "column" else ("inner", "outer")
        whole = torch.randn(M // 4, 4, K, dtype=torch.float64, requires_grad=True)
        x = partition_input(whole, side=side, arrangement=here)
        x = x.detach().requires_grad_()
        with recorded() as calls:
            y = layer(x)
            y.square().sum().backward()
        truth = plain(whole)
        truth.square().sum().backward()
        torch.testing.assert_close(gather_output(y, side=other, arrangement=here), truth)
        torch.testing.assert_close(gather_output(x.grad, side=side, arrangement=here), whole.grad)
        _others(here, split)
        return sum(call.received for call in calls)


def _others(here: Arrangement, split: str) -> None:
    """From the outer spread to the same, and rows of an embedding: they are those of torch."""
    torch.manual_seed(2)
    options = {"gather_output": True} if split == "column" else {"input_is_parallel": False}
    plain, table = nn.Linear(K, N).double(), nn.Embedding(M, K, padding_idx=3).double()
    layer = Linear.from_module(plain, split=split, **options, arrangement=here)
    rows = Embedding.from_module(table, arrangement=here)
    tokens = torch.randperm(M).view(8, 4)
    vectors = rows(tokens)
    torch.testing.assert_close(gather_output(vectors, arrangement=here), table(tokens))
    torch.testing.assert_close(gather_output(layer(vectors), arrangement=here), plain(table(tokens)))


def closed_form(config: dict[str, object], split: str) -> float:
    """Bytes that arrive at one rank; x is M x K, the weight N x K, the result M x N."""
    size, depth = int(config["size"]), int(config.get("depth", 1))
    moving = K if split == "column" else N  # the side of x or of the result that a square's rows pass on
    if config["mode"] == "1d":
        return BYTES * 2 * (size - 1) / size * M * moving
    if config["mode"] == "3d":
        p = round(size ** (1 / 3))
        return BYTES * 2 * (p - 1) / p**3 * (M * K + N * K + M * N)
    q = round((size / depth) ** 0.5)
    return BYTES * 3 * (q - 1) / q**2 * (M / depth * moving + N * K)


CONFIGS = [
    (2, {"size": 2, "mode": "1d"}),
    pytest.param(4, {"size": 4, "mode": "2d"}),
    pytest.param(8, {"size": 8, "mode": "2.5d", "depth": 2}, marks=pytest.mark.slow),
    pytest.param(8, {"size": 8, "mode": "3d"}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("ranks", "config"), CONFIGS)
@on_ranks("ranks")
def test_the_volume_is_the_closed_form(ranks, config: dict[str, object]):
    """What arrived and the closed form; in 1d also with the sequence split, which moves as many bytes."""
    found = [
        (_received(config, split, sequence_split), closed_form(config, split))
        for split in ("column", "row")
        for sequence_split in ([False, True] if config["mode"] == "1d" else [False])
    ]
    assert [received for received, _ in found] == [closed for _, closed in found]
