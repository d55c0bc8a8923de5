"""The table of plans and runs on a GPU: the planned figures of docs/evidence/plan.md are computed again."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli import ROOT, environment

PAGE = ROOT / "docs" / "evidence" / "plan.md"
QUICK = ("short", "tensor 2")


@pytest.mark.slow
def test_the_table_has_what_is_planned_now(tmp_path: Path) -> None:
    """Two of the configurations; `python benchmarks/plan_cuda.py` prints all lines."""
    script = ROOT / "benchmarks" / "plan_cuda.py"
    command = [sys.executable, str(script), "--json", "--only", ";".join(QUICK)]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=300)
    lines = [line for line in done.stdout.splitlines() if line.startswith(tuple(f"| {name} |" for name in QUICK))]
    assert len(lines) == len(QUICK), done.stderr
    page = PAGE.read_text().splitlines()
    assert [line for line in lines if line not in page] == []
    assert json.loads(done.stdout.splitlines()[-1])["ratios"]["tensor 2: allocated"] < 0.01


def test_all_recorded_runs_are_in_the_table() -> None:
    recorded = json.loads((ROOT / "benchmarks" / "plan_recorded.json").read_text())["cases"]
    page = PAGE.read_text()
    assert [name for name in recorded if f"| {name} |" not in page] == []
