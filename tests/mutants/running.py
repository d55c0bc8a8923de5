"""Runs the matching tests against a change, in a copy of the tree, until one fails that passes without the change."""

from __future__ import annotations

import json
import math
import os
import queue
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.mutants.changes import Change

TIERS = ("fast", "slow")
"""The tests of `make check`, and the rest of `make test`."""
GUESS = {"fast": 1.0, "slow": 5.0}
"""So many seconds are expected of the tests of a file that never ran. Too few is better: what comes late is left out anyway."""
UNSURE = 5.0
"""A test that fails after so many seconds may have met a time limit of its own."""
PASSED, NO_TESTS = 0, 5
NO_IMPORT = "the tests cannot be imported"
"""What noticed a change when no test begins with it, and all files can be read without it."""


class BrokenTestsError(Exception):
    """The tests cannot be judged by: pytest cannot read them on the unchanged tree."""


class OutOfTimeError(Exception):
    """The time of the whole run is over: this change has no result."""


@dataclass
class Known:
    """What is known of the tests so far, learnt while they run.

    Seconds of each file in each tier, of its longest test, and which tests pass and fail on the unchanged tree.
    """

    seconds: dict[str, dict[str, float]] = field(default_factory=lambda: {tier: {} for tier in TIERS})
    longest: dict[str, float] = field(default_factory=dict)
    passing: list[str] = field(default_factory=list)
    failing: list[str] = field(default_factory=list)

    def plan(self, files: Sequence[str], budget: float) -> list[tuple[str, str]]:
        """Return what to run: the nearest file, then the fast tests, the quick files first, then the slow ones, the nearest first.

        What comes after `budget` seconds is left out, and after half of them the rest of the same file. A change that those
        tests would notice counts as not noticed.
        """
        if not files:
            return []
        rest = [(tier, self._expected(tier, file), file) for tier in TIERS for file in files[1:]]
        rest.sort(key=lambda each: (0, each[1]) if each[0] == "fast" else (1, 0.0))
        order, spent = [], 0.0
        for tier, seconds, file in [*((tier, self._expected(tier, files[0]), files[0]) for tier in TIERS), *rest]:
            if not order or spent < budget:
                order.append((tier, file))
                spent += min(seconds, budget / 2)
        return order

    def _expected(self, tier: str, file: str) -> float:
        return self.seconds[tier].get(file, 0.0 if file in self.longest else GUESS[tier])

    def learn(self, events: Iterable[dict[str, Any]]) -> None:
        """Take the seconds of a run."""
        sums: dict[tuple[str, str], float] = {}
        for event in events:
            file = event["test"].partition("::")[0]
            if event.get("failed") is False:
                key = event["tier"], file
                sums[key] = sums.get(key, 0.0) + event["seconds"]
                self.longest[file] = max(self.longest.get(file, 0.0), event["seconds"])
        for (tier, file), seconds in sums.items():
            self.seconds[tier][file] = max(self.seconds[tier].get(file, 0.0), seconds)


@dataclass
class Outcome:
    """Which tier noticed a change ("" for none), by which test, and how long it took."""

    noticed: str
    by: str
    seconds: float


class Workshop:
    """Copies of the tree in a temporary folder, each for one run at a time."""

    def __init__(self, root: Path, folder: Path, jobs: int, known: Known, deadline: float) -> None:
        self.known, self.deadline = known, deadline
        self._lock = threading.Lock()
        self._free: queue.Queue[Path] = queue.Queue()
        self._runners: dict[Path, Runner] = {}
        for number in range(jobs):
            copy = folder / f"{number}" / "tree"
            shutil.copytree(root, copy, ignore=lambda folder, names: _ignored(Path(folder) == root, names))
            (copy.parent / "tmp").mkdir()
            self._runners[copy] = Runner(copy)
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

    def judge(self, change: Change, files: Sequence[str], budget: float) -> Outcome:
        """Run the matching tests against the change until one fails that passes without it."""
        begin = time.monotonic()
        done: set[str] = set()
        with self.copy() as copy:
            while True:
                order = self.known.plan([file for file in files if file not in self.known.failing], budget)
                if not order:  # every matching file fails on the unchanged tree
                    return Outcome("", "", time.monotonic() - begin)
                read = [*dict.fromkeys(file for _, file in order)]
                with _changed(copy / change.path, change):
                    events, ended = self._run(copy, order, {*done, *self.known.failing}, budget=budget)
                    self._learn(events)
                    failed = next((event for event in events if event.get("failed")), None)
                    if failed is None and ended == "passed":
                        return Outcome("", "", time.monotonic() - begin)
                    # What hung, died or took long is run once more: the machine may have been too busy.
                    if failed is None and events:
                        failed = events[-1]
                    is_unsure = failed is not None and failed.get("seconds", math.inf) > UNSURE
                    if is_unsure and self._run(copy, order, set(), [failed["test"]])[1] == "passed":
                        done |= {event["test"] for event in events}
                        continue
                if failed is None:  # no test began: a conftest needs the module, or its import never ended
                    _, ended = self._run(copy, [], set(), read)  # without the change; reads the files and runs nothing
                    if ended == "passed":
                        return Outcome("fast", NO_IMPORT, time.monotonic() - begin)
                    raise BrokenTestsError(ended)
                if self._passes(copy, failed["test"]):
                    return Outcome(failed["tier"], failed["test"], time.monotonic() - begin)
                done |= {event["test"] for event in events if event.get("failed") is False}

    def measure(self, copy: Path, test: str, data: Path, limit: float) -> None:
        """Run a test file under coverage, which writes what each process executed beside `data`."""
        self._runners[copy].run([test], limit, str(data))

    def end(self) -> None:
        """Let the processes go that ran the tests."""
        for runner in self._runners.values():
            runner.end()

    def _learn(self, events: list[dict[str, Any]]) -> None:
        with self._lock:
            self.known.learn(events)

    def _passes(self, copy: Path, test: str) -> bool:
        """Whether the test passes on the unchanged tree; run once."""
        if test not in self.known.passing and test not in self.known.failing:
            file, is_test, _ = test.partition("::")
            # Of a file that could not be read nothing is run: it is enough that pytest reads it.
            passes = self._run(copy, [(tier, file) for tier in TIERS if is_test], set(), [test])[1] == "passed"
            with self._lock:
                seen = self.known.passing if passes else self.known.failing
                seen += [test] if test not in seen else []
        return test in self.known.passing

    def _run(
        self,
        copy: Path,
        order: Sequence[tuple[str, str]],
        skip: set[str],
        tests: Sequence[str] = (),
        budget: float = math.inf,
    ) -> tuple[list[dict[str, Any]], str]:
        """Run the order, or those tests of it alone; return what was written down and "passed" or how it ended."""
        files = [*dict.fromkeys(file for _, file in order)]
        longest = {file: self.known.longest[file] for file in files if file in self.known.longest}
        plan = copy.parent / "plan.json"
        # What is slow on a busy machine does not hang.
        busy = min(max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)), 4.0)
        limits = {file: busy * max(40, 3 * seconds) for file, seconds in longest.items()}
        plan.write_text(json.dumps({"order": order, "skip": [*skip], "limits": limits, "budget": budget}))
        events = plan.with_suffix(".events")
        events.unlink(missing_ok=True)
        limit = busy * 180 + 3 * sum(self.known.seconds[tier].get(file, GUESS[tier]) for tier, file in order)
        options = ["-x", "--tb=line", "-p", "tests.mutants.plugin", f"--plan={plan}", *(tests or files)]
        code, output = self._runners[copy].run(options, min(limit, self.deadline - time.monotonic()))
        if time.monotonic() >= self.deadline:
            raise OutOfTimeError
        found = [json.loads(line) for line in events.read_text().splitlines()] if events.exists() else []
        return found, "passed" if code in (PASSED, NO_TESTS) else f"ended with {code}: {output[-3000:]}"


class Runner:
    """Runs pytest in a copy of the tree, by a server that has imported torch once for all runs."""

    def __init__(self, copy: Path) -> None:
        environment = {
            # Without compiled files every run would compile the package and its tests again.
            **{name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"},
            "PYTHONPATH": str(copy),
            "OMP_NUM_THREADS": "1",
            "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
            "TMPDIR": str(copy.parent / "tmp"),
        }
        self._output = copy.parent / "output.txt"
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.mutants.server"],
            cwd=copy,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )

    def run(self, options: Sequence[str], limit: float, coverage: str = "") -> tuple[int | str, str]:
        """Return pytest's exit status ("time limit" when it was stopped) and its output."""
        assert self._server.stdin
        assert self._server.stdout
        arguments = ["-q", "-p", "no:cacheprovider", "--hypothesis-seed=0", "-m", "not long", *options]
        self._output.write_text("")
        request = json.dumps({"output": str(self._output), "arguments": arguments, "coverage": coverage})
        self._server.stdin.write(f"{request}\n".encode())
        process = int(self._server.stdout.readline())
        is_in_time = select.select([self._server.stdout], [], [], max(limit, 0))[0]
        if not is_in_time:
            os.kill(process, signal.SIGKILL)
        code = int(self._server.stdout.readline())
        # Whatever the tests left running would disturb the next change.
        with suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)
        return code if is_in_time else "time limit", self._output.read_text(errors="replace")

    def end(self) -> None:
        assert self._server.stdin
        self._server.stdin.close()
        self._server.wait()


@contextmanager
def working_copies(root: Path, jobs: int, known: Known, deadline: float) -> Iterator[Workshop]:
    """Make as many copies of the tree as runs go at a time; remove them at the end."""
    with tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as folder:
        workshop = Workshop(root, Path(folder), jobs, known, deadline)
        try:
            yield workshop
        finally:
            workshop.end()


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


def _ignored(at_root: bool, names: list[str]) -> set[str]:
    hidden = {name for name in names if name.startswith(".")}
    made = {"__pycache__", "output", *(("runs", "dist", "build") if at_root else ())}
    return hidden | (made & {*names})
