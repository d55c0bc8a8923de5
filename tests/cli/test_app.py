"""The command line as a whole."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
import warnings
from typing import Any

import pytest

from colonnade.cli import main
from colonnade.cli.app import COMMANDS
from colonnade.version import __version__
from tests.cli import ROOT, colonnade, environment


def test_help_lists_every_command() -> None:
    done = colonnade("--help")
    assert done.returncode == 0
    assert all(f" {name} " in done.stdout for name in COMMANDS)


def test_version() -> None:
    assert colonnade("--version").stdout == f"colonnade {__version__}\n"


def test_no_command_imports_torch_before_it_runs() -> None:
    code = (
        "import sys\n"
        "from colonnade.cli import main\n"
        "try:\n    main(['run', '--help'])\nexcept SystemExit:\n    pass\n"
        "sys.exit('torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment(), capture_output=True, check=False)
    assert done.returncode == 0
    assert b"--nproc" in done.stdout


def test_a_command_that_does_not_exist_is_a_usage_error() -> None:
    done = colonnade("rnu")
    assert done.returncode == 2
    assert "rnu" in done.stderr


def test_errors_of_ours_are_one_message_without_a_traceback() -> None:
    done = colonnade("run", "--node-rank", 1, __file__)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "colonnade: --node-rank 1 needs a larger --nnodes. [C022]",
        "Details: colonnade explain C022",
    ]


@pytest.mark.parametrize("words", [("new", "parallelism", "a" * 300), ("ckpt", "ls", "a" * 300)])
def test_a_path_that_fails_is_one_message_without_a_traceback(words: tuple[str, ...], capsys: Any) -> None:
    with pytest.raises(SystemExit) as left:
        main(words)
    assert left.value.code == 2
    assert re.fullmatch(r"colonnade: a+\S*: File name too long\. .*\n", capsys.readouterr().err)


@pytest.mark.parametrize("asked", ["--help", "-h"])
@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_help_has_plain_metavars_and_whole_paragraphs(
    name: str, asked: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main([*name.split(), asked])
    shown = capsys.readouterr().out
    assert "--help" in shown
    assert (
        re.findall(r"<bool>|<str>|<path>|<int|<list|\{(?!folder)\w+\}", shown) == []
    )  # {folder}: an argument of --resume
    # A line of prose ends where the next word would not fit.
    prose = shown.partition("Usage:")[2].partition("╭")[0].splitlines()[1:]
    for line, following in itertools.pairwise(prose):
        if line.strip() and following.strip():
            assert len(line.rstrip()) + 1 + len(following.split()[0]) >= 79, line


@pytest.mark.parametrize(("words", "found"), [("colonnade ru", "run"), ("colonnade ckpt v", "verify")])
def test_a_shell_completes_commands_and_what_they_take(words: str, found: str) -> None:
    asked = {"_COLONNADE_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    done = subprocess.run(
        [sys.executable, "-m", "colonnade.cli"],
        env={**environment(), **asked},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == [found]


def test_nobody_is_told_that_numpy_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONWARNINGS", "default")
    with warnings.catch_warnings(), pytest.raises(SystemExit):
        main(["--version"])
    assert os.environ["PYTHONWARNINGS"] == "default,ignore:Failed to initialize NumPy:UserWarning"
    code = "import warnings; warnings.warn('Failed to initialize NumPy: gone'); warnings.warn('another')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "another" in done.stderr
    assert "NumPy: gone\n" not in done.stderr.replace(code, "")
