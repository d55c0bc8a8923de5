"""Layers of every tensor mode in one process: shapes, placements and calls, on a rank of a world that is not there.

What a rank receives there is what it has sent, so that values mean nothing; the other tests compare those.
"""

from __future__ import annotations

from collections import Counter
from math import prod
from typing import Any

import pytest
import torch
from torch import nn

from colonnade.config import load_config
from colonnade.context.parallel_context import ParallelContext
from colonnade.models import GPT
from colonnade.nn.layer import Embedding, LayerNorm, Linear, arrange
from colonnade.parallel.collectives.wire import recorded
from colonnade.parallel.demand import holding
from colonnade.parallel.placement import logical_shape, placement_of
from colonnade.planner.fake import fake_rank

MODES: dict[str, tuple[int, dict[str, Any]]] = {
    "1d": (2, {"mode": "1d"}),
    "1d, sequence split": (2, {"mode": "1d", "sequence_split": True}),
    "2d": (4, {"mode": "2d"}),
    "2.5d": (8, {"mode": "2.5d", "depth": 2}),
    "3d": (8, {"mode": "3d"}),
}
INPUT = {"1d": (8, 4, 16), "1d, sequence split": (8, 2, 16), "2d": (4, 4, 8), "2.5d": (2, 4, 8), "3d": (2, 4, 8)}
INNER = {"1d": (8, 4, 16), "1d, sequence split": (8, 4, 16), "2d": (4, 4, 16), "2.5d": (2, 4, 16), "3d": (2, 4, 16)}


@pytest.mark.parametrize("name", MODES)
def test_a_column_and_a_row_lead_inside_and_out_again(name):
    size, mode = MODES[name]
    context = ParallelContext()
    with fake_rank(load_config({"parallel": {"tensor": {"size": size, **mode}}}), size, size - 1, context):
        here = arrange(context)
        norm = LayerNorm(16, arrangement=here)
        column, row = Linear(16, 32, arrangement=here), Linear(32, 16, split="row", arrangement=here)
        x = torch.randn(INPUT[name], requires_grad=True)
        with recorded() as calls:
            inner = column(norm(x))
            y = row(inner)
        assert inner.shape == INNER[name]
        assert y.shape == x.shape
        y.square().sum().backward()
        assert x.grad is not None
        assert x.grad.shape == x.shape
        for layer in (norm, column, row):
            assert all(p.grad is not None and p.grad.shape == p.shape for p in layer.parameters())
        assert calls, "nobody talked"
        embedding = Embedding(64, 16, arrangement=here)
        assert embedding(torch.zeros(8, 4, dtype=torch.long)).shape == x.shape


@pytest.mark.parametrize("name", MODES)
def test_the_parts_of_all_ranks_are_the_whole_model_once(name):
    size, mode = MODES[name]
    whole = {key: tuple(p.shape) for key, p in GPT(32, 8, 16, 4, 1, context=ParallelContext()).named_parameters()}
    held: Counter[str] = Counter()
    for rank in range(size):
        context = ParallelContext()
        with fake_rank(load_config({"parallel": {"tensor": {"size": size, **mode}}}), size, rank, context):
            model = GPT(32, 8, 16, 4, 1, context=context)
            for key, parameter in model.named_parameters():
                placement = placement_of(parameter)
                by_mode = {m: context.get_world_size(m) for m in placement.shards}
                assert logical_shape(parameter, placement, by_mode) == whole[key], key
                held[key] += parameter.numel() / holding(context.layout, placement, rank).count
            if rank == 0:
                ids = torch.zeros(8, 8, dtype=torch.long)
                loss = model.criterion()(model(ids), ids)
                (loss[0] if isinstance(loss, tuple) else loss).backward()
                assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())
    assert held == {key: pytest.approx(prod(shape)) for key, shape in whole.items()}


def test_alone_every_mode_is_torchs_own():
    column = Linear(4, 6, arrangement=arrange(ParallelContext()))
    assert isinstance(column.weight, nn.Parameter)
    x = torch.randn(2, 3, 4)
    assert torch.equal(column(x), nn.functional.linear(x, column.weight, column.bias))
