"""A model saved under one tensor mode goes on under another: the placements alone say where each block belongs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from colonnade._launch import launch
from colonnade.checkpoint import CheckpointManager
from colonnade.context.parallel_context import ParallelContext
from colonnade.engine.build import initialize
from colonnade.nn.layer import arrange
from colonnade.testing import compare, gather_weights, run_world
from tests.nn.layer.cases import CASES, build_ours
from tests.nn.layer.test_parity import LAYOUTS, optimizer

MODEL = CASES["model"]


def _steps(engine: Any, count: int) -> None:
    for _ in range(count):
        engine.zero_grad()
        engine.backward(engine(MODEL.x(), MODEL.labels()))
        engine.step()


def _train(layout: str, folder: Path, resume: bool) -> dict[str, Tensor]:
    """Two steps, a checkpoint and two steps; or the last two from the checkpoint."""
    config = {"parallel": LAYOUTS[layout][1], "clip_grad_norm": 1.0}
    with launch(config, context=ParallelContext(), verbose=False) as gpc, CheckpointManager(folder, gpc) as manager:
        torch.manual_seed(1 if resume else 2)
        ours = build_ours(MODEL, arrange(gpc))
        engine = initialize(ours, optimizer(ours.parameters()), context=gpc)[0]
        if resume:
            with torch.no_grad():
                for parameter in ours.parameters():
                    parameter.zero_()
            manager.load(engine.model, engine.optimizer)
        else:
            _steps(engine, 2)
            manager.save(2, engine.model, engine.optimizer)
        _steps(engine, 2)
        weights = gather_weights(engine.model, gpc)
        engine.close()
        return weights


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second"), [("2d 4", "1d 2"), ("1d 2", "2d 4"), pytest.param("3d 8", "2.5d 8", marks=pytest.mark.long)]
)
def test_a_run_goes_on_under_another_mode(tmp_path, first, second):
    through = run_world(LAYOUTS[first][0], _train, first, tmp_path, False, timeout=100).values[0]
    resumed = run_world(LAYOUTS[second][0], _train, second, tmp_path, True, timeout=100).values[0]
    compare(through, resumed, 1e-10)
