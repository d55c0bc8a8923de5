"""What a page of evidence says of the run that made it."""

from __future__ import annotations

import platform
from datetime import UTC, datetime

import torch

from colonnade.version import __version__


def stamp(command: str) -> str:
    """One sentence: the command, the day, the versions."""
    day = datetime.now(UTC).date().isoformat()
    return (
        f"Made by `{command}` on {day}, with colonnade {__version__}, torch {torch.__version__} and Python "
        f"{platform.python_version()}."
    )
