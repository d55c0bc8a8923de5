"""Processes of a script that are waited for: up to a limit, and none of them is left behind, however the wait ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from colonnade.testing.outcome import end_with_parent

_SHOWN = 4000
_DUMP_SECONDS = 1.0
_GRACE_SECONDS = 5.0


@dataclass(frozen=True)
class Running:
    """A process whose output goes to a file."""

    process: subprocess.Popen[bytes]
    log: Path

    def wait(self, until: float) -> int | None:
        """Its exit status; None if it still runs at that time, by `time.monotonic`. Then its log says where it stands."""
        try:
            return self.process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            for pid in self._children() or [self.process.pid]:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGUSR1)  # on which ranks write their stacks; the launcher would die of it
            time.sleep(_DUMP_SECONDS)
            return None

    def said(self) -> str:
        """The end of its output."""
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - _SHOWN))
            return file.read().decode("utf-8", "replace").strip()

    def _children(self) -> list[int]:
        pid = self.process.pid
        with contextlib.suppress(OSError):
            return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        return []


@contextlib.contextmanager
def running(commands: Mapping[Path, tuple[Sequence[str], Mapping[str, str]]]) -> Iterator[list[Running]]:
    """Start these commands, by log: (words, environment). Those that still run at the end are ended."""
    started: list[Running] = []
    try:
        for log, (command, environment) in commands.items():
            with log.open("wb") as into:
                process = subprocess.Popen(
                    command, env=dict(environment), stdout=into, stderr=subprocess.STDOUT, preexec_fn=end_with_parent
                )
            started.append(Running(process, log))
        yield started
    finally:
        for one in started:
            one.process.terminate()
        for one in started:
            try:
                one.process.wait(_GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                one.process.kill()  # its ranks die with it
                one.process.wait()
