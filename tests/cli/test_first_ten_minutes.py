"""The script of docs/start/first_ten_minutes.md does what the page says of it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli import ROOT, colonnade, environment

PAGE = (ROOT / "docs/start/first_ten_minutes.md").read_text(encoding="utf-8")


@pytest.fixture
def script(tmp_path: Path) -> Path:
    found = re.search(r"Save this as `train.py`:\n\n```(?:python|py|text)\n(.*?)```", PAGE, re.DOTALL)
    assert found is not None
    file = tmp_path / "train.py"
    file.write_text(found[1].replace("epochs=20", "epochs=2"))  # 64 steps an epoch on two ranks, 128 on one
    return file


@pytest.mark.long
def test_it_runs_on_two_ranks_and_goes_on_in_one_process(script: Path) -> None:
    done = colonnade("run", "--nproc", 2, script, cwd=script.parent)
    assert done.returncode == 0, done.stderr
    assert "saved step 128 to run/step-00000128" in done.stdout + done.stderr
    script.write_text(script.read_text().replace("epochs=2", "epochs=3"))
    words = [sys.executable, str(script)]
    alone = subprocess.run(words, cwd=script.parent, env=environment(), capture_output=True, text=True, check=False)
    assert alone.returncode == 0, alone.stderr
    assert "saved step 256 to run/step-00000256" in alone.stdout + alone.stderr


@pytest.mark.long
def test_a_slip_is_refused_with_the_right_name_and_a_code(script: Path) -> None:
    script.write_text(script.read_text().replace("clip_grad_norm", "clip_grad_nrom"))
    done = colonnade("run", "--nproc_per_node", 2, script, cwd=script.parent)
    assert done.returncode == 1
    assert "Did you mean `clip_grad_norm`?" in done.stderr
    assert "[C001]" in done.stderr


@pytest.mark.long
def test_without_its_checkpoints_it_is_proven(script: Path) -> None:
    script.write_text(re.sub(r"\n +hooks\.(Load|Save)Checkpoint.*", "", script.read_text()))
    done = colonnade("verify", "--nproc", 2, script, cwd=script.parent)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "matches a single-process run" in done.stdout
