"""What is said once when a model trains otherwise than its user may think: to whom, and to nobody else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from colonnade.context.layout_builder import build_layout
from colonnade.context.parallel_mode import ParallelMode
from colonnade.engine import checks
from colonnade.parallel.placement import place


@pytest.fixture
def said(monkeypatch):
    said: list[str] = []

    def warning(text: str, ranks: list[int] | None = None) -> None:
        assert ranks in (None, [0])
        said.append(text)

    logger = SimpleNamespace(warning=warning)
    monkeypatch.setattr(checks, "get_dist_logger", lambda: logger)
    return said


def world(ranks: int, rank: int = 0, **parallel: Any) -> Any:
    layout = build_layout({"parallel": parallel}, ranks)
    return SimpleNamespace(
        layout=layout,
        get_global_rank=lambda: rank,
        pipeline_parallel_size=parallel.get("pipeline", 1),
        tensor_parallel_size=parallel.get("tensor", 1),
    )


@pytest.mark.parametrize(
    ("context", "layer", "is_said"),
    [
        (world(2), nn.BatchNorm1d(2), True),
        (world(2), nn.BatchNorm1d(2).eval(), False),
        (world(2), nn.SyncBatchNorm(2), False),
        (world(2), nn.LayerNorm(2), False),
        (world(1), nn.BatchNorm1d(2), False),
        (world(2, rank=1), nn.BatchNorm1d(2), False),  # the first rank of a stage says it
        (world(4, rank=1, tensor=2), nn.BatchNorm1d(2), False),
        (world(2, tensor=2), nn.BatchNorm1d(2), False),
        (world(2, pipeline=2), nn.BatchNorm1d(2), True),
        (world(2, rank=1, pipeline=2), nn.BatchNorm1d(2), True),
    ],
)
def test_batch_norms_that_see_a_part_of_the_batch(said, context, layer, is_said):
    checks.warn_of_batch_norm(nn.Sequential(nn.Linear(2, 2), layer), context)
    assert len(said) == is_said
    if is_said:
        assert said[0].startswith("BatchNorm1d (1) normalises over the rows that one rank has")


def test_of_many_batch_norms_three_are_named(said):
    checks.warn_of_batch_norm(nn.Sequential(*(nn.BatchNorm1d(2) for _ in range(3))), world(2))
    checks.warn_of_batch_norm(nn.Sequential(*(nn.BatchNorm1d(2) for _ in range(4))), world(2))
    assert ["..." in text for text in said] == [False, True]


def model(spec: Any = None) -> nn.Module:
    made = nn.Linear(2, 2)
    if spec is not None:
        place(made.weight, {ParallelMode.TENSOR: spec})
    return made
