"""The benchmark of plans on a GPU, tried on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli import ROOT, environment


@pytest.mark.slow
def test_plan_cuda_compares_plans_with_runs(tmp_path: Path) -> None:
    words = [
        "--device",
        "cpu",
        "--size",
        "small",
        "--only",
        "fp32,compiled,zero 1",
        "--json",
        "--out",
        tmp_path / "out",
    ]
    script = ROOT / "benchmarks" / "plan_cuda.py"
    command = [sys.executable, str(script), *map(str, words)]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=200)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["failed"] == {}, done.stderr
    assert {"gpt 354M, fp32: memory", "gpt 354M, fp32: step", "zero 1: memory", "median: step"} <= set(found["ratios"])
    assert set(found["goals"]) <= set(found["ratios"])
    assert not any(name.startswith("gpt 354M, compiled") for name in found["goals"])  # nothing is promised of it
    for name, ratio in found["ratios"].items():
        if name.endswith(": memory"):
            assert ratio < 0.02, name
    written = json.loads((tmp_path / "out" / "plan_cuda.json").read_text())
    assert written["figures"].keys() == found["figures"].keys()
    assert (tmp_path / "out" / "measured.toml").exists()
