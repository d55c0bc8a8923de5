"""The bug of examples/padded_ddp is found by `colonnade verify`, in the words that the README quotes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_verify_prints_what_the_readme_quotes() -> None:
    command = [sys.executable, "-m", "colonnade.cli", "verify", "--nproc", "2", "examples/padded_ddp/train.py"]
    # DistributedDataParallel crashes with DETAIL in torch itself.
    environment = {**os.environ, "TORCH_DISTRIBUTED_DEBUG": "OFF"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False, env=environment)
    assert done.returncode == 1, done.stderr
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    quoted = re.search(r"^does NOT match a single-process run.*?(?=^```)", readme, re.DOTALL | re.MULTILINE)
    assert quoted is not None
    assert " ".join(quoted[0].split()) in " ".join(done.stdout.split())
