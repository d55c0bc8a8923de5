"""The command line of `run`: where our options end and the script's arguments begin."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from colonnade.cli import run_command as module
from colonnade.cli.app import build_app
from colonnade.errors import LaunchError
from colonnade.launching.launch_job import LaunchJob


def seen(line: str, monkeypatch: pytest.MonkeyPatch) -> tuple[LaunchJob | None, str, int]:
    """What a command line asks for, what it says on stderr, and its exit code; nothing is started."""
    jobs: list[LaunchJob] = []

    def checked(job: LaunchJob) -> LaunchJob:
        jobs.append(job)
        raise LaunchError("not started")

    monkeypatch.setattr(module, "checked", checked)
    result = CliRunner().invoke(build_app(), ["run", *line.split()])
    return (jobs[0] if jobs else None), result.stderr, result.exit_code


@pytest.mark.parametrize(
    ("line", "nproc", "is_module", "target", "rest"),
    [
        ("train.py", None, False, "train.py", ""),
        ("--nproc 4 train.py --lr 1", 4, False, "train.py", "--lr 1"),
        ("--nproc=4 -m x --nproc 2", 4, True, "x", "--nproc 2"),
        ("-n4 train.py -n 2", 4, False, "train.py", "-n 2"),
        ("--nproc_per_node 4 train.py --my_option 1", 4, False, "train.py", "--my_option 1"),
        ("--nproc-per-node=4 train.py", 4, False, "train.py", ""),
        ("--max_restarts 3 --nproc 2 train.py", 2, False, "train.py", ""),
        ("train.py --nproc_per_node 4", None, False, "train.py", "--nproc_per_node 4"),
        ("-m -n 2 pkg.mod a b", 2, True, "pkg.mod", "a b"),
        ("train.py --help", None, False, "train.py", "--help"),
        ("train.py --lr 1 --nproc 4", None, False, "train.py", "--lr 1 --nproc 4"),
        ("train.py - x", None, False, "train.py", "- x"),
    ],
)
def test_what_follows_the_script_is_its_own(
    monkeypatch: pytest.MonkeyPatch, line: str, nproc: int | None, is_module: bool, target: str, rest: str
) -> None:
    job, said, _ = seen(line, monkeypatch)
    assert job is not None
    assert (job.nproc, job.is_module, job.target, job.arguments) == (nproc, is_module, target, tuple(rest.split()))
    assert ("is passed to the script" in said) == rest.startswith("--nproc")


@pytest.mark.parametrize(
    "line",
    [
        *("--unknown train.py", "--nproc", ""),
        *("--nproc 0 x.py", "--nproc -3 x.py", "--max-restarts -1 x.py", "--grace -1 x.py", "--nnodes 0 x.py"),
    ],
)
def test_unknown_options_impossible_numbers_and_a_missing_script_are_usage_errors(
    monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    job, said, code = seen(line, monkeypatch)
    assert (job, code) == (None, 2)
    assert "Error" in said


def test_help_before_the_script_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    assert seen("--help", monkeypatch)[::2] == (None, 0)


def test_an_option_of_ours_right_after_the_script_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    job, said, _ = seen("train.py --nproc=4", monkeypatch)
    assert job is not None
    assert (job.nproc, job.arguments) == (None, ("--nproc=4",))
    assert "colonnade: --nproc=4 is passed to the script; options of `run` come before SCRIPT" in said
