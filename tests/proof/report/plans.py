"""Plans for the tests of the report, made by the planner: what a script has of a model, and the groups of a large world."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

import colonnade
from colonnade.config import load_config
from colonnade.context.parallel_context import ParallelContext
from colonnade.nn import Linear
from colonnade.proof.planner.hardware import load_hardware
from colonnade.proof.planner.plan import plan
from tests.cli import colonnade as command

CONFIG = """
parallel = dict(pipeline=2, tensor=dict(size=2, mode="1d"))
schedule = dict(type="OneFOneB", num_microbatches=4)
"""


def build() -> Any:
    layers = [Linear(16, 32), nn.ReLU(), Linear(32, 16, split="row"), nn.Linear(16, 10)]
    return colonnade.split(nn.Sequential(*layers), num_stages=2)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(8, 16), torch.zeros(8, dtype=torch.long)


def criterion() -> nn.Module:
    return nn.CrossEntropyLoss()


def plan_by_command(folder: Path) -> dict[str, Any]:
    """The plan of 8 ranks, data 2 x pipeline 2 x tensor 2, by `colonnade plan`: its page and pictures are in the folder."""
    (folder / "config.py").write_text(CONFIG)
    words = [
        "--world-size",
        8,
        "--model",
        f"{__name__}:build",
        "--html",
        folder / "p" / "plan.html",
        "--svg",
        folder / "svg",
    ]
    done = command("plan", folder / "config.py", *words, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@cache
def groups_of_a_hundred_thousand() -> dict[str, Any]:
    """102,400 ranks without a model."""
    parallel = {"pipeline": 16, "tensor": {"size": 8, "mode": "1d"}, "expert": 8}
    return plan(
        load_config({"parallel": parallel}), 102_400, load_hardware("h100"), context=ParallelContext()
    ).to_dict()
