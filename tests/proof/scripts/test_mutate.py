"""`colonnade verify --mutate` on a script, with tests of its own that see some mistakes and not others."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from colonnade.proof.mutate import NO, NOT_PLANTED, YES, Mutation, Tried

SCRIPT = """
import torch
from torch import nn

import colonnade
from colonnade.core import global_context as gpc

def main():
    colonnade.launch(dict(clip_grad_norm=0.01), verbose=False)
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    engine, *_ = colonnade.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.MSELoss())
    draw = torch.Generator().manual_seed(gpc.get_global_rank())
    norms = []
    for _ in range(3):
        engine.zero_grad()
        points, values = torch.randn(3, 4, generator=draw), torch.randn(3, 2, generator=draw)
        engine.backward(engine.criterion(engine(points), values))
        engine.step()
        norms.append(float(engine.grad_norm))
    return norms

if __name__ == "__main__":
    main()
"""

TESTS = """
import math
from script import main

def test_the_norm_is_a_number():
    assert all(math.isfinite(norm) for norm in main())
"""


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(SCRIPT)
    (folder / "test_script.py").write_text(TESTS)
    command = [sys.executable, "-m", "colonnade.cli", "verify", "-n", "2", "--json", "--mutate", *options, "script.py"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=900, check=False)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(920)
def test_who_notices(tmp_path):
    tests = f"{sys.executable} -m pytest -q -p no:cacheprovider"
    done = run(tmp_path, "--mistakes", "nan-on-one-rank,clip-twice,swap-two-shards", "--tests", tests)
    assert done.returncode == 1, done.stderr  # clip-twice is not noticed by these tests
    tried = {one["mistake"]: one for one in json.loads(done.stdout)["tried"]}
    assert (tried["nan-on-one-rank"]["verify"], tried["nan-on-one-rank"]["tests"]) == (YES, YES)
    assert (tried["clip-twice"]["causes"], tried["clip-twice"]["tests"]) == (["clipped-twice"], NO)
    assert (tried["swap-two-shards"]["verify"], tried["swap-two-shards"]["tests"]) == (NOT_PLANTED, NOT_PLANTED)


def test_the_table_says_what_was_missed():
    tried = [
        Tried("drift", "weights drift", YES, ("optimizer-differs",), True, NO),
        Tried("clip-twice", "clipped twice", YES, ("unknown",), False, YES),
        Tried("swap-two-shards", "swapped", NOT_PLANTED),
    ]
    text = str(Mutation(tried))
    assert "verify detects 2 of 2 injected bugs, and names the cause of 1 correctly" in text
    assert "your tests detect 1 of 2" in text
    assert "not detected by your tests: drift (weights drift)" in text
    assert "unknown (another name)" in text
    assert not Mutation(tried).ok
    assert Mutation(tried[1:]).ok
