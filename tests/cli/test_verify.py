"""`colonnade verify`: the exit code says whether a script is equal to one process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

LOOP = Path(__file__).parents[1] / "verification" / "scripts" / "loop.py"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def _verify(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "colonnade.cli", "verify", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_equal_is_0_and_json_can_be_read() -> None:
    done = _verify("--nproc", "2", "--steps", "1", "--dtype", "own", "--json", str(LOOP))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["findings"] == []


def test_different_is_1_and_says_why() -> None:
    done = _verify("--nproc", "2", "--steps", "1", str(LOOP), "undivided")
    assert done.returncode == 1, done.stderr
    assert "summed-not-averaged" in done.stdout


def test_not_run_is_2_with_the_words_of_the_script() -> None:
    done = _verify("--nproc", "2", str(LOOP), "fail")
    assert done.returncode == 2
    assert "this script fails by itself" in done.stderr
