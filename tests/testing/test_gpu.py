"""Ranks that share a GPU: their environment, and the multi-process service around them."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

import pytest
import torch

from colonnade.errors import LaunchError
from colonnade.testing import cuda_mps, run_world

NCCL = ("NCCL_HOSTID", "NCCL_NET", "NCCL_SOCKET_IFNAME", "NCCL_IB_DISABLE")
MPS = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")


def variables(*names: str) -> list[str | None]:
    return [os.environ.get(name) for name in names]


def nccl_sum() -> tuple[float, str]:
    total = torch.full((3,), float(torch.distributed.get_rank() + 1), device="cuda")
    torch.distributed.all_reduce(total)
    return total.sum().item(), str(total.device)


@pytest.fixture
def no_nccl_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NCCL:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("no_nccl_settings")
def test_ranks_that_share_gpus_get_hosts_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    hosts = [[f"colonnade-rank-{rank}", "Socket", "lo", "1"] for rank in range(3)]
    assert run_world(3, variables, *NCCL, backend=None).values == hosts
    without = run_world(3, variables, *NCCL, backend=None, env={"NCCL_NET": None, "NCCL_SOCKET_IFNAME": "eth0"})
    assert without.values == [[f"colonnade-rank-{rank}", None, "eth0", "1"] for rank in range(3)]


@pytest.mark.usefixtures("no_nccl_settings")
@pytest.mark.parametrize("gpus", [0, 2])
def test_nothing_is_set_where_no_gpu_is_shared(monkeypatch: pytest.MonkeyPatch, gpus: int) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert run_world(2, variables, *NCCL, backend=None).values == [[None] * 4] * 2


def test_nccl_without_a_gpu_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(LaunchError, match="backend='nccl' needs a GPU and torch finds none"):
        run_world(2, variables, backend="nccl")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_nccl_between_four_ranks() -> None:
    gpus = torch.cuda.device_count()
    with cuda_mps():
        values = run_world(4, nccl_sum, backend="nccl", timeout=110).values
    assert values == [(30.0, f"cuda:{rank % gpus}") for rank in range(4)]


def fake_control(folder: Path, monkeypatch: pytest.MonkeyPatch, code: int = 0) -> Path:
    """Put a program of the service's name on the path that writes down how it was called."""
    program, notes = folder / "nvidia-cuda-mps-control", folder / "notes"
    program.write_text(
        f'#!/bin/sh\necho "$*|$(cat)|$CUDA_MPS_PIPE_DIRECTORY" >> {notes}\necho no device >&2\nexit {code}\n'
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return notes


def test_the_service_is_started_for_the_worlds_of_the_body_and_told_to_quit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(MPS[0], "mine")
    monkeypatch.delenv(MPS[1], raising=False)
    notes = fake_control(tmp_path, monkeypatch)
    with contextlib.suppress(KeyError), cuda_mps() as is_on:
        assert is_on
        pipe, log = variables(*MPS)
        assert Path(pipe).is_dir()
        assert Path(log).is_dir()
        assert run_world(2, variables, *MPS, backend=None).values == [[pipe, log]] * 2
        raise KeyError("of the body")
    assert notes.read_text() == f"-d||{pipe}\n|quit|{pipe}\n"
    assert variables(*MPS) == ["mine", None]
    assert not Path(pipe).exists()


def test_a_service_that_does_not_start_is_an_error_that_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(MPS[0], raising=False)
    fake_control(tmp_path, monkeypatch, code=3)
    with pytest.raises(LaunchError, match="exit status 3: no device"), cuda_mps():
        pytest.fail("the body must not run")
    assert variables(MPS[0]) == [None]


def test_without_the_service_the_body_runs_after_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.warns(UserWarning, match="nvidia-cuda-mps-control is not on the PATH"), cuda_mps() as is_on:
        assert not is_on
