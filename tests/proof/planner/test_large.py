"""102,400 ranks of a model of 400 G parameters, by the command: time, memory and the page."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.cli import command, environment

CONFIG = """
parallel = dict(pipeline=16, tensor=dict(size=8, mode="1d"), expert=8)
num_microbatches = 64
clip_grad_norm = 1.0
bf16 = True
zero = 1
activation_checkpoint = "full"
"""
JOB = """
import colonnade, torch
from colonnade.models import Llama


def build(context):
    model = Llama(
        128256, 4096, 6144, 48, 64, kv_heads=8, inner=5632, experts=64, router=dict(k=8), context=context
    )
    return colonnade.split(model, num_stages=context.pipeline_parallel_size)


def batch():
    tokens = torch.zeros(64, 4096, dtype=torch.long)
    return tokens, tokens
"""


@pytest.mark.long
def test_a_hundred_thousand_ranks_of_a_model_of_400_g(tmp_path: Path) -> None:
    (tmp_path / "config.py").write_text(CONFIG)
    (tmp_path / "job.py").write_text(JOB)
    words = ["plan", "config.py", "--world-size", 102_400, "--model", "job.py:build", "--html", "plan.html", "--json"]
    with (tmp_path / "plan.json").open("w") as out:
        started = subprocess.Popen(command(*words), cwd=tmp_path, env=environment(), stdout=out)
        _, status, usage = os.wait4(started.pid, 0)
    assert status == 0
    assert usage.ru_utime + usage.ru_stime < 10  # of the processor: others may use this machine too
    assert usage.ru_maxrss < 2 * 2**20  # kilobytes
    assert (tmp_path / "plan.html").stat().st_size < 3 * 2**20
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["axes"] == {"data": 800, "pipeline": 16, "tensor": 8}
    assert plan["totals"]["parameters"] > 400e9
    assert sum(one["count"] for one in plan["classes"]) == 102_400
    assert {line["mode"] for line in plan["ledger"]} == {"DATA", "EXPERT_DATA"}
