"""The multi-process service of CUDA, around worlds whose ranks share a GPU."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

import pytest

from colonnade.errors import LaunchError
from colonnade.testing import cuda_mps, run_world

MPS = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")


def variables(*names: str) -> list[str | None]:
    return [os.environ.get(name) for name in names]


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
