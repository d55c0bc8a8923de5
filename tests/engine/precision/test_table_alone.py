"""The table of dtypes in one process, to the byte."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from colonnade._launch import launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.engine.build import initialize
from colonnade.engine.precision import precision_table
from colonnade.optim.engine_optimizer import PlainOptimizer

NOTHING: Any = SimpleNamespace(layout=(), parameters={})


class Own(torch.optim.AdamW):
    """Not one of torch's own: what it will keep is not known before its first step."""


def step(engine: Any) -> None:
    engine.zero_grad()
    engine.backward(engine(torch.ones(1, 3)).sum())
    engine.step()


def test_bytes_of_each_kind_before_and_after_the_first_step():
    for kind, before in ((torch.optim.AdamW, 8.0), (Own, 0.0)):
        with launch({}, context=ParallelContext(), verbose=False) as gpc:
            engine = initialize(nn.Linear(3, 2), lambda p, kind=kind: kind(p, lr=0.1), context=gpc)[0]
            assert engine.precision_table()["optimizer state"].bytes == before
            step(engine)
            table = engine.precision_table()
            sizes = {row.what: row.bytes for row in table.rows}
            gradients = sizes.pop("gradients")  # in a bucket, which has a tail
            assert gradients >= 4.0
            assert sizes == {
                "weights": 4.0,
                "computed with": None,
                "master copies": 0.0,
                "reduced in": None,
                "optimizer state": 8.0,  # without the counts of steps
            }
            assert (table.parameters, table.bytes_per_parameter) == (8, 12.0 + gradients)
            engine.close()


def test_what_is_frozen_has_no_gradient_and_no_state():
    model = nn.Linear(3, 1, dtype=torch.bfloat16)
    model.bias.requires_grad_(False)
    table = precision_table(
        model, PlainOptimizer(torch.optim.AdamW(model.parameters()), nn.Module()), NOTHING, torch.float16
    )
    assert [table[what].bytes for what in ("weights", "gradients", "optimizer state")] == [2.0, 1.5, 3.0]
    assert table["computed with"].dtypes == ("float16",)
    assert precision_table(model.double(), PlainOptimizer(None, nn.Module()), NOTHING, torch.float16)[
        "computed with"
    ].dtypes == ("float64",)
    assert precision_table(model, PlainOptimizer(None, nn.Module()), NOTHING, None)["optimizer state"].bytes == 0.0


def test_a_model_without_parameters_takes_nothing():
    table = precision_table(nn.Tanh(), PlainOptimizer(SimpleNamespace(), nn.Module()), NOTHING, None)
    assert (table.parameters, table.bytes_per_parameter) == (1, 0.0)
    assert [row.dtypes for row in table.rows] == [()] * 6
