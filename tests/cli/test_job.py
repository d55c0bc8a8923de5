"""What is refused before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from colonnade.cli.job import Job, checked
from colonnade.errors import LaunchError


@pytest.fixture
def script(tmp_path: Path) -> str:
    file = tmp_path / "train.py"
    file.write_text("")
    return str(file)


def test_a_good_job_passes(script: str) -> None:
    job = Job(script, nproc=2)
    assert checked(job) is job


def test_a_missing_script_names_the_nearest(script: str) -> None:
    with pytest.raises(LaunchError, match=r"no script '.*/trian.py'.*Did you mean '.*/train.py'\?"):
        checked(Job(script.replace("train", "trian")))


def test_a_missing_script_in_this_folder_names_the_nearest(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(script).parent)
    with pytest.raises(LaunchError, match=r"Did you mean 'train.py'\?"):
        checked(Job("tarin.py"))


def test_a_folder_is_not_a_script(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="is a folder"):
        checked(Job(str(tmp_path)))


def test_a_module_must_exist() -> None:
    checked(Job("json.tool", is_module=True))
    with pytest.raises(LaunchError, match="no module 'jsno'"):
        checked(Job("jsno.tool", is_module=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"node_rank": 1}, "needs --nnodes"),
        ({"nnodes": 2}, "--rdzv-endpoint HOST:PORT"),
        ({"nnodes": 2, "endpoint": "here"}, "--rdzv-endpoint HOST:PORT"),
        ({"nnodes": 2, "endpoint": "here:1", "node_rank": 2}, "0 to 1"),
    ],
)
def test_impossible_jobs(script: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        checked(Job(script, **options))


def test_a_log_dir_that_is_a_file_is_refused(script: str) -> None:
    with pytest.raises(LaunchError, match="is a file"):
        checked(Job(script, log_dir=Path(script)))


def test_far_too_many_ranks_are_warned_of(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    checked(Job(script, nproc=100_000))
    assert "100000 ranks share" in capsys.readouterr().err
    checked(Job(script, nproc=1))
    assert capsys.readouterr().err == ""
