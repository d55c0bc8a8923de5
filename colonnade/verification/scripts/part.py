"""Which part a process plays in `colonnade verify`: the parent sets COLONNADE_VERIFY to a file that says it."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

VARIABLE = "COLONNADE_VERIFY"
JOINED, START, MASKS, REFERENCE, OPTIONS = "joined{share}.pt", "start.pt", "masks.pt", "reference.pt", "options.pt"


@dataclass(frozen=True)
class Part:
    """What one process does in a verification; `result` is the file that it writes, with {rank}."""

    role: str
    folder: str
    result: str
    steps: int = 2
    dtype: str = "fp64"
    noise: int | None = None
    """Alone: the seed by which weights and inputs are moved by one ulp."""
    share: int | None = None
    """Alone: which share of the batches it is given, of those that ranks see apart."""
    mistake: str | None = None
    off: dict[str, str] | None = None
    """The modules in which nothing is dropped, and why; None: nothing is dropped anywhere."""

    def write(self, path: Path) -> Path:
        path.write_text(json.dumps(asdict(self)))
        return path

    @property
    def alone(self) -> bool:
        return self.role == "alone"


def current_part() -> Part | None:
    """What this process is to do, if it was started by `colonnade verify`."""
    path = os.environ.get(VARIABLE)
    return Part(**json.loads(Path(path).read_text())) if path else None
