"""What is refused before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from colonnade.errors import LaunchError
from colonnade.launching.launch_job import LaunchJob, checked, cores


@pytest.fixture
def script(tmp_path: Path) -> str:
    file = tmp_path / "train.py"
    file.write_text("")
    return str(file)


def test_a_good_job_passes(script: str) -> None:
    job = LaunchJob(script, nproc=2)
    assert checked(job) is job


def test_a_script_that_is_missing_or_a_folder_is_named_with_the_nearest(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for target, told in (
        (script.replace("train", "trian"), r"no script '.*/trian.py'.*Did you mean '.*/train.py'\?"),
        ("tarin.py", r"Did you mean 'train.py'\?"),
        (str(tmp_path), "is a folder"),
    ):
        with pytest.raises(LaunchError, match=told):
            checked(LaunchJob(target))


def test_a_module_must_exist() -> None:
    checked(LaunchJob("json.tool", is_module=True))
    for name, told in (("jsno.tool", "jsno"), ("", ""), (".tool", "")):
        with pytest.raises(LaunchError, match=f"no module '{told}'"):
            checked(LaunchJob(name, is_module=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"node_rank": 1}, "needs --nnodes"),
        ({"nnodes": 2}, "--rdzv-endpoint HOST:PORT"),
        ({"nnodes": 2, "endpoint": "here"}, "--rdzv-endpoint HOST:PORT"),
        ({"nnodes": 2, "endpoint": "here:1", "node_rank": 2}, "0 to 1"),
        ({"nnodes": 2, "endpoint": "here:99999"}, r"a free port \(1 to 65535\).*got 'here:99999'"),
        ({"nnodes": 2, "endpoint": "here:0"}, r"a free port \(1 to 65535\)"),
        ({"nnodes": 2, "endpoint": ":29500"}, "--rdzv-endpoint HOST:PORT"),
        ({"endpoint": "here:99999"}, r"a free port \(1 to 65535\)"),
        ({"nproc": 99999999999999999999}, "--nproc is 99999999999999999999, but this machine"),
        ({"log_dir": Path("/proc/x")}, "--log-dir /proc/x cannot be written: .*Give another folder"),
        ({"log_dir": Path("/dev/null/x")}, "--log-dir /dev/null/x cannot be written"),
    ],
)
def test_impossible_jobs(script: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        checked(LaunchJob(script, **options))


def test_a_log_dir_that_is_a_file_is_refused(script: str) -> None:
    with pytest.raises(LaunchError, match="is a file"):
        checked(LaunchJob(script, log_dir=Path(script)))


def test_far_too_many_ranks_are_warned_of(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    checked(LaunchJob(script, nproc=8 * cores() + 1))
    assert f"{8 * cores() + 1} ranks share" in capsys.readouterr().err
    checked(LaunchJob(script, nproc=1))
    assert capsys.readouterr().err == ""
