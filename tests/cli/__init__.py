"""Tests of the command line; `colonnade` here runs it as a user would."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def environment() -> dict[str, str]:
    """Return this process's environment as a user's: the package importable, no threads or debug level set."""
    dropped = ("OMP_NUM_THREADS", "TORCH_DISTRIBUTED_DEBUG", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    return {**kept, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}


def command(*words: object) -> list[str]:
    """Return the words of a `colonnade` command line."""
    return [sys.executable, "-m", "colonnade.cli", *map(str, words)]


def colonnade(*words: object, cwd: Path = ROOT, timeout: float = 100) -> subprocess.CompletedProcess[str]:
    """Run `colonnade` to its end."""
    return subprocess.run(
        command(*words), cwd=cwd, env=environment(), capture_output=True, text=True, timeout=timeout, check=False
    )
