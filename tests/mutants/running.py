"""Runs the matching tests against a change, in a copy of the tree: the fast ones first, the slow ones if need be."""

from __future__ import annotations

import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

from tests.mutants.changes import Change

TIERS = {"fast": "not slow", "slow": "slow and not long"}
"""The expressions of `make check` and of the rest of `make test`."""
CHUNK = 6
"""So many test files share one run on the unchanged tree."""
PASSED, FAILED, USAGE, NO_TESTS = 0, 1, 4, 5


class BrokenTestsError(Exception):
    """The tests cannot be judged by: they do not run on the unchanged tree."""


@dataclass
class Baseline:
    """What the tests do on the unchanged tree: seconds of each file in each tier, and what fails even so."""

    files: list[str] = field(default_factory=list)
    seconds: dict[str, dict[str, float]] = field(default_factory=lambda: {tier: {} for tier in TIERS})
    longest: dict[str, float] = field(default_factory=dict)
    failing: list[str] = field(default_factory=list)


@dataclass
class Outcome:
    """Which tier noticed a change ("" for none), by which test, and how long it took."""

    noticed: str
    by: str
    seconds: float


class Workshop:
    """Copies of the tree in a temporary folder, each for one run at a time."""

    def __init__(self, root: Path, folder: Path, jobs: int) -> None:
        self.root, self.jobs = root, jobs
        self._free: queue.Queue[Path] = queue.Queue()
        for number in range(jobs):
            copy = folder / f"{number}" / "tree"
            shutil.copytree(root, copy, ignore=_ignored)
            (copy.parent / "tmp").mkdir()
            self._free.put(copy)

    @contextmanager
    def copy(self) -> Iterator[Path]:
        """Lend a copy that is as the tree was."""
        copy = self._free.get()
        try:
            yield copy
        finally:
            shutil.rmtree(copy.parent / "tmp", ignore_errors=True)
            (copy.parent / "tmp").mkdir(exist_ok=True)
            self._free.put(copy)

    def measure(self, files: Sequence[str]) -> Baseline:
        """Run the test files on the unchanged tree."""
        baseline = Baseline(list(files))
        chunks = [(tier, files[at : at + CHUNK]) for tier in TIERS for at in range(0, len(files), CHUNK)]
        chunks.reverse()  # the slow ones first: the end is then short
        with ThreadPoolExecutor(self.jobs) as pool:
            for future in as_completed([pool.submit(self._measure, tier, chunk) for tier, chunk in chunks]):
                for tier, test, seconds, failed in future.result():
                    file = test.partition("::")[0]
                    baseline.seconds[tier][file] = baseline.seconds[tier].get(file, 0.0) + seconds
                    baseline.longest[file] = max(baseline.longest.get(file, 0.0), seconds)
                    if failed:
                        baseline.failing.append(test)
        return baseline

    def _measure(self, tier: str, files: Sequence[str]) -> list[tuple[str, str, float, bool]]:
        with self.copy() as copy:
            report = copy.parent / "report.xml"
            report.unlink(missing_ok=True)
            arguments = [f"--junitxml={report}", "-o", "junit_family=xunit1"]
            code, output = run_tests(copy, tier, files, arguments, 1800)
            ran = code in (PASSED, FAILED, NO_TESTS) and report.exists()
            cases = ElementTree.parse(report).getroot().iter("testcase") if ran else ()
            found = [
                (tier, f"{case.get('file')}::{case.get('name')}", float(case.get("time", 0)), _has_failed(case))
                for case in cases
                if case.get("file")
            ]
        if ran:
            return found
        if len(files) == 1:
            print(f"{files[0]}: pytest ended with {code} on the unchanged tree:\n{output[-2000:]}", flush=True)
            return [(tier, files[0], 0.0, True)]
        return [case for file in files for case in self._measure(tier, [file])]

    def judge(self, change: Change, files: Sequence[str], baseline: Baseline) -> Outcome:
        """Run the matching tests against the change until one fails."""
        begin = time.monotonic()
        with self.copy() as copy, _changed(copy / change.path, change):
            for tier, known in baseline.seconds.items():
                matching = [file for file in files if file in known]
                if not matching:
                    continue
                # The nearest file leads; of the rest the quick ones come first.
                matching[1:] = sorted(matching[1:], key=known.__getitem__)
                left_out = [f"--deselect={test}" for test in baseline.failing]
                one_test = max(40, 3 * max(baseline.longest[file] for file in matching))
                arguments = ["-x", "-o", f"timeout={one_test:.0f}", *left_out]
                limit = 120 + 3 * sum(known[file] for file in matching)
                code, output = run_tests(copy, tier, matching, arguments, limit)
                if code == USAGE:
                    raise BrokenTestsError(output[-3000:])
                if code not in (PASSED, NO_TESTS):
                    return Outcome(tier, _first_failure(output), time.monotonic() - begin)
        return Outcome("", "", time.monotonic() - begin)


def run_tests(
    copy: Path, tier: str, files: Sequence[str], arguments: Sequence[str], limit: float
) -> tuple[int | str, str]:
    """Run pytest in the copy; return its exit status ("time limit" when it was stopped) and its output."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(copy),
        "OMP_NUM_THREADS": "1",
        "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
        "TMPDIR": str(copy.parent / "tmp"),
    }
    command = [sys.executable, "-m", "pytest", "-q", "--tb=line", "-p", "no:cacheprovider", "--hypothesis-seed=0"]
    output = copy.parent / "output.txt"
    with output.open("wb") as stream:
        process = subprocess.Popen(
            [*command, "-m", TIERS[tier], *arguments, *files],
            cwd=copy,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | str = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = "time limit"
        finally:
            # Whatever the tests left running would disturb the next change.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return code, output.read_text(errors="replace")


@contextmanager
def working_copies(root: Path, jobs: int) -> Iterator[Workshop]:
    """Make as many copies of the tree as runs go at a time; remove them at the end."""
    with tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as folder:
        yield Workshop(root, Path(folder), jobs)


@contextmanager
def _changed(file: Path, change: Change) -> Iterator[None]:
    source = file.read_bytes()
    try:
        _write(file, change.apply(source))
        yield
    finally:
        _write(file, source)


def _write(file: Path, content: bytes) -> None:
    """Write a module, and forget its compiled form: Python tells versions apart by whole seconds and length."""
    file.write_bytes(content)
    for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):
        compiled.unlink()


def _ignored(folder: str, names: list[str]) -> set[str]:
    hidden = {name for name in names if name.startswith(".")}
    return hidden | ({"__pycache__", "runs", "output", "dist", "build"} & {*names})


def _has_failed(case: ElementTree.Element) -> bool:
    return any(child.tag in ("failure", "error") for child in case)


def _first_failure(output: str) -> str:
    lines = [line for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return lines[0].split(" - ")[0].split(" ", 1)[1] if lines else "the run ended, or was stopped, without a result"
