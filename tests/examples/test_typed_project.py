"""A project that uses only public names is clean under `mypy --strict`, and runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import colonnade
from tests.cli import environment

SCRIPT = Path(__file__).parents[2] / "examples/typed_project/train.py"


@pytest.mark.long
def test_it_is_clean_under_mypy_strict() -> None:
    words = [sys.executable, "-m", "mypy", "--strict", "--config-file=", str(SCRIPT)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=SCRIPT.parents[2])
    assert done.returncode == 0, done.stdout


@pytest.mark.long
def test_it_runs() -> None:
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=False, env=environment())
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"best loss \d\.\d+, weights of \d+ bytes\n", done.stdout)


def test_every_public_name_has_a_type() -> None:
    """What `colonnade.X` gives at run time is declared for type checkers too."""
    declared = re.findall(r"^    from \S+ import (\w+) as \1$", Path(colonnade.__file__).read_text(), re.MULTILINE)
    assert sorted(declared) == sorted(set(colonnade.__all__) - {"__version__"})
