"""Who is blamed, on every way ranks are started: the rank that failed, with the user's line, never one that only heard of it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import colonnade as library
from colonnade.testing import WorldError, run_world
from tests.cli import colonnade, environment

SCRIPT = """
import sys, time
import colonnade, torch
from torch import nn

class Block(nn.Module):
    def __init__(self): super().__init__(); self.f = nn.Linear(4, 4)
    def forward(self, x): return self.f(x).tanh()

class Model(nn.Module):
    def __init__(self): super().__init__(); self.blocks = nn.ModuleList(Block() for _ in range(4))
    def forward(self, x):
        for block in self.blocks: x = block(x)
        return x

def criterion(output, label):
    raise ValueError("a mistake in my criterion")  # THE LINE

context = colonnade.launch(dict(parallel=dict(pipeline=2), num_microbatches=2), verbose=False)
split = colonnade.split(Model(), num_stages=2, sample=torch.ones(2, 4))
engine, *_ = colonnade.initialize(split, lambda p: torch.optim.SGD(p, lr=0.1), criterion)
engine.zero_grad()
try:
    engine.execute_schedule(iter([(torch.ones(4, 4), torch.zeros(4, 4))]))
finally:
    if context.get_global_rank() == 1: time.sleep(1)  # the rank that failed is the last to leave
"""
LINE = SCRIPT.splitlines().index('    raise ValueError("a mistake in my criterion")  # THE LINE') + 1


@pytest.fixture
def script(tmp_path: Path) -> Path:
    file = tmp_path / "train.py"
    file.write_text(SCRIPT)
    return file


@pytest.mark.slow
def test_an_error_of_the_last_stage_is_shown_with_its_line_though_another_rank_leaves_first(script: Path) -> None:
    done = colonnade("run", "--nproc", 2, script)
    assert done.returncode == 1
    tail = done.stderr[done.stderr.index("colonnade: rank 1 failed first, exit status 1") :].splitlines()
    assert tail[1].startswith("Traceback")
    assert tail[-1] == "ValueError: a mistake in my criterion"
    assert f'  File "{script}", line {LINE}, in criterion' in tail
    assert "rank 0: ended because rank 1 was gone" in done.stderr


@pytest.mark.slow
def test_torchruns_root_cause_is_the_rank_that_failed_with_its_traceback(script: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script],
        env={**environment(), "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    root = done.stderr[done.stderr.index("Root Cause (first observed failure)") :]
    assert re.search(r"rank +: 1 ", root), root
    assert f'File "{script}", line {LINE}, in criterion' in root
    assert "ValueError: a mistake in my criterion" in root
    # The other rank may be ended before it has said anything; what it says names the same line.
    heard = [line for line in done.stderr.splitlines() if "the pipeline stopped because" in line]
    assert all(
        f'rank 1 failed: ValueError: a mistake in my criterion (File "{script}", line {LINE}' in line for line in heard
    )


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.inner(values).tanh()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            values = block(values)
        return values


def wrong_criterion(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    raise ValueError("a mistake in my criterion")


def failing_step() -> None:
    context = library.launch(dict(parallel=dict(pipeline=2), num_microbatches=2), verbose=False)
    split = library.split(Model(), num_stages=2, sample=torch.ones(2, 4))
    engine, *_ = library.initialize(split, lambda p: torch.optim.SGD(p, lr=0.1), wrong_criterion)
    engine.zero_grad()
    try:
        engine.execute_schedule(iter([(torch.ones(4, 4), torch.zeros(4, 4))]))
    finally:
        if context.get_global_rank() == 1:
            time.sleep(0.5)  # the rank that failed is the last to leave


def test_run_world_blames_the_rank_that_failed_and_the_other_names_its_line() -> None:
    with pytest.raises(WorldError) as caught:
        run_world(2, failing_step)
    result = caught.value.result
    assert caught.value.rank == 1
    assert "in wrong_criterion" in result.report()
    line = wrong_criterion.__code__.co_firstlineno + 1
    heard = result.outcomes[0]
    assert heard.lost_a_peer
    assert heard.named_ranks == (1,)
    assert heard.message == (
        "the pipeline stopped because rank 1 failed: ValueError: a mistake in my criterion "
        f'(File "{os.path.abspath(__file__)}", line {line}, in wrong_criterion)'
    )


def refused_on_1() -> None:
    from colonnade.comm.messages import agreed_errors

    context = library.launch({}, verbose=False)
    with agreed_errors(context.device):
        if context.get_global_rank() == 1:
            {}["missing"]
        time.sleep(0.0)


def test_an_error_that_all_ranks_raise_is_that_of_the_rank_it_began_on() -> None:
    with pytest.raises(WorldError) as caught:
        run_world(2, refused_on_1)
    result = caught.value.result
    assert caught.value.rank == 1
    line = refused_on_1.__code__.co_firstlineno + 6
    assert result.outcomes[0].named_ranks == (1,)
    assert f"KeyError: 'missing' (File \"{os.path.abspath(__file__)}\", line {line}, in refused_on_1)" in (
        result.outcomes[0].message
    )
