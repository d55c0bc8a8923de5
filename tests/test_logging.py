"""Rank-aware logging in real worlds."""

from __future__ import annotations

import logging
import subprocess
import sys

import torch
from torch import nn

from colonnade._launch import launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.engine.build import initialize
from colonnade.logging import get_dist_logger
from colonnade.testing import run_world


def _speak(folder: str) -> None:
    with launch({"parallel": {"tensor": 2}}, context=ParallelContext()):
        logger = get_dist_logger()
        file = logger.log_to_file(folder, suffix="x")
        logger.info("everywhere-quiet")
        logger.info("tensor-one", parallel_mode=ParallelMode.TENSOR, ranks=[1])
        logger.info("all-of-us", ranks="all")
        logger.debug("too-fine")
        logger.warning("a-warning")
        assert file.exists()


def test_filters_by_rank_and_mode(tmp_path):
    result = run_world(4, _speak, str(tmp_path))
    for rank in range(4):
        log = result.stderr[rank]
        assert ("everywhere-quiet" in log) == (rank == 0)
        assert ("tensor-one" in log) == (rank in (1, 3))
        assert f"rank {rank} INFO] all-of-us" in log
        assert "too-fine" not in log
        assert f"rank {rank} WARNING] a-warning" in log
        assert "all-of-us" in (tmp_path / f"rank_{rank}_x.log").read_text()


def _start(level: str | None) -> None:
    if level is not None:
        get_dist_logger().set_level(level)
    with launch({"zero": 1, "clip_grad_norm": 1.0}, context=ParallelContext()) as context:
        model = nn.Linear(4, 4)
        initialize(model, torch.optim.AdamW(model.parameters()), nn.MSELoss(), context=context)


def test_a_start_is_one_line_and_debug_has_the_rest():
    (line,) = run_world(2, _start, None).stderr[0].splitlines()
    assert line.endswith(
        "INFO] 2 ranks (data 2) on cpu: 20 parameters on this rank, 240 B for weights, gradients and optimizer state"
    )
    everything = run_world(2, _start, "DEBUG").stderr[0]
    assert "DEBUG] gradient handlers: " in everything
    assert "DEBUG] ZeRO stage 1: " in everything
    assert "bytes of each on this rank" in everything


def test_closing_the_context_puts_logging_back():
    with launch({}, context=ParallelContext()):
        assert logging.getLogger("colonnade").handlers
    assert logging.getLogger("colonnade").handlers == []
    assert logging.getLogger("colonnade").level == logging.NOTSET


def test_import_configures_nothing_and_costs_no_torch():
    code = (
        "import logging, sys; before = list(logging.root.handlers); import colonnade, colonnade.config, "
        "colonnade.logging, colonnade.registry, colonnade.context; assert logging.root.handlers == before; "
        "assert not logging.getLogger('colonnade').handlers; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
