"""The whole model on every rank of a pipeline, because nobody has called `split`: warned of, or refused."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import SGD

import colonnade
from colonnade._launch import launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.engine import checks
from colonnade.engine.build import initialize
from colonnade.errors import ColonnadeError
from colonnade.parallel.placement import Tied, place
from colonnade.testing import run_world
from tests.ranks import on_ranks

PIPE: dict[str, Any] = {"parallel": {"pipeline": 2}, "num_microbatches": 2}


def whole(seed: int | None = 0) -> nn.Sequential:
    if seed is not None:
        torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def tied() -> nn.Module:
    """The same weights at both stages, on purpose."""
    model = whole()
    for name, parameter in model.named_parameters():
        place(parameter, {ParallelMode.PIPELINE: Tied((0, 1), name)})
    return model


def half(stage: int) -> nn.Module:
    return nn.Sequential(whole()[0]) if stage == 0 else nn.Sequential(nn.Tanh(), whole()[2])


def said(config: dict[str, Any], model: Any) -> tuple[str, str]:
    """(the error of initialize, the first warning about the stages)"""
    warned: list[str] = []

    class Logger:
        def warning(self, message: str, ranks: Any = None) -> None:
            warned.append(message)

    before, checks.get_dist_logger = checks.get_dist_logger, Logger  # type: ignore[assignment]
    try:
        with launch(config, context=ParallelContext(), verbose=False) as gpc:
            model = model(gpc.get_local_rank(ParallelMode.PIPELINE)) if model is half else model
            error = ""
            try:
                initialize(model, lambda p: SGD(p, lr=0.1), nn.MSELoss(), context=gpc)[0].close()
            except ColonnadeError as found:
                error = str(found)
    finally:
        checks.get_dist_logger = before
    return error, "".join(warned)


def _pipelines() -> list[tuple[str, str]]:
    alone = {**PIPE, "schedule": "NonPipelineSchedule"}  # as a loop of engine(x) has it
    return [
        said(PIPE, whole),
        said(alone, whole),
        said(PIPE, lambda: whole(None)),  # launch seeds stages apart
        said({**PIPE, "compare_stages": False}, whole),
        said({**PIPE, "compare_stages": False}, lambda: whole(None)),
        said(PIPE, lambda: colonnade.split(whole(), num_stages=2)),
        said(PIPE, lambda: colonnade.split([whole(), whole()])),
        said(PIPE, half),
        said(PIPE, tied),
    ]


def test_the_whole_model_on_every_stage_is_refused_on_every_rank_and_split_is_named():
    for rank, (cut, alone, unseeded, *fine) in enumerate(run_world(2, _pipelines).values):
        for error, warning in (cut, alone):
            assert "[C160]" in error, rank
            assert (
                "all 2 pipeline stages have parameters of the same 4 names and shapes (0.weight, 0.bias, 2.weight, ...)"
                in error
            )
            assert "model = colonnade.split(model, num_stages=2)" in error
            assert "compare_stages=False" in error
            assert warning == ""
        error, warning = unseeded
        assert error == ""
        assert "all 2 pipeline stages" in warning
        assert "colonnade.split(model, num_stages=2)" in warning
        assert "compare_stages=False" in warning
        assert fine == [("", "")] * 6


@on_ranks(4)
def test_beside_data_parallelism_all_ranks_are_told_and_the_number_of_stages_is_the_schedules():
    two = {"parallel": {"pipeline": 2}, "schedule": {"type": "Interleaved1F1B", "num_chunks": 2, "num_microbatches": 2}}
    first, second = [said(two, whole), said({**PIPE, "zero": 1}, whole)]
    assert "num_stages=4" in first[0]
    assert "num_stages=2" in second[0]
