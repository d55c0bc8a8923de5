"""`colonnade verify --mutate`: inject known bugs into a script, one at a time, and check whether they are noticed."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from colonnade.proof.mutation import Mistake, known, planted_environment
from colonnade.proof.processes import Processes
from colonnade.proof.scripts import (
    Script,
    ScriptError,
    SingleProcessScript,
    on_ranks,
    run_both,
    verify_script,
)

_NO_PLACE = "not applicable to this run"
YES, NO, NOT_PLANTED = "noticed", "NOT noticed", "does not apply"


@dataclass(frozen=True)
class Tried:
    """The result of one injected bug: the verdict of `verify`, and whether the tests failed (None: there are no tests)."""

    mistake: str
    what: str
    verify: str
    causes: tuple[str, ...] = ()
    named: bool = False
    """Whether the first reported cause is right for the mistake."""
    tests: str | None = None
    seconds: float = 0.0

    @property
    def missed(self) -> bool:
        """Whether `verify` or the tests did not notice the bug."""
        return NO in (self.verify, self.tests)


@dataclass(frozen=True)
class Mutation:
    """The results of all injected bugs. Print it, or call `to_json`."""

    tried: Sequence[Tried]

    @property
    def ok(self) -> bool:
        """Whether `verify` and the tests noticed every bug that could be injected."""
        return not any(result.missed for result in self.tried)

    def to_json(self) -> str:
        """Return the results as a JSON object."""
        return json.dumps({"ok": self.ok, "tried": [asdict(result) for result in self.tried]}, indent=1)

    def __str__(self) -> str:
        asked = any(result.tests is not None for result in self.tried)
        lines = [("mistake", "verify", "called", *(("your tests",) if asked else ()))]
        for result in self.tried:
            called = ", ".join(result.causes) + ("" if result.named or not result.causes else " (another name)")
            lines.append((result.mistake, result.verify, called, *((result.tests or "",) if asked else ())))
        widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
        table = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
        ]
        here = [result for result in self.tried if result.verify != NOT_PLANTED]
        seen, named = sum(result.verify == YES for result in here), sum(result.named for result in here)
        verdict = [f"verify detects {seen} of {len(here)} injected bugs, and names the cause of {named} correctly"]
        tested = [result for result in self.tried if result.tests in (YES, NO)]
        if tested:
            verdict.append(f"your tests detect {sum(result.tests == YES for result in tested)} of {len(tested)}")
            verdict += [
                f"  not detected by your tests: {result.mistake} ({result.what})"
                for result in tested
                if result.tests == NO
            ]
        return "\n".join([*table, "", *verdict])


def mutate_script(
    script: Script,
    processes: Processes,
    names: str | None = None,
    tests: str | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> Mutation:
    """Inject known bugs into the script on its ranks, one at a time, and check whether they are noticed.

    Args:
        script: A script that matches its single-process run.
        processes: Starts the processes.
        names: The bugs to inject, separated by commas; default: all.
        tests: A test command. It runs once for each bug, with the bug in every engine of its processes.
        tell: Called with a line for each finished bug.

    Raises:
        ScriptError: The script or the tests fail without a bug.
    """
    chosen = known(names)
    if tests is not None and (status := _run_tests(tests, {})) != 0:
        raise ScriptError(f"{tests} fails without an injected bug (exit status {status}). Correct that failure first.")
    with ExitStack() as stack:
        name = stack.enter_context(tempfile.TemporaryDirectory(prefix="colonnade-verify-"))
        script, healthy, reference = run_both(script, Path(name), processes)
        report = reference.judge(healthy)
        if not report.ok:
            raise ScriptError(f"{script} differs from a single process without an injected bug:\n{report}")
        tried = []
        for at, mistake in enumerate(chosen.values(), 1):
            began = time.perf_counter()
            result = _verified(replace(script, mistake=mistake.name), mistake, reference, Path(name), processes)
            if tests is not None:
                # An engine that has the mistake leaves this file. Without it, the tests had no chance to notice.
                mark = Path(name) / f"{mistake.name}.planted"
                status = _run_tests(tests, planted_environment(mistake.name, mark))
                result = replace(result, tests=NOT_PLANTED if not mark.exists() else YES if status != 0 else NO)
            tried.append(replace(result, seconds=time.perf_counter() - began))
            tell(f"{at}/{len(chosen)} {mistake.name}: {result.verify} {', '.join(result.causes)}".rstrip())
    return Mutation(tried)


def _verified(
    script: Script, mistake: Mistake, reference: SingleProcessScript, folder: Path, processes: Processes
) -> Tried:
    """The verdict of `verify` on the script with the mistake."""
    inside = folder / mistake.name
    inside.mkdir()
    try:
        records = on_ranks(script, inside, processes)
    except ScriptError as error:
        if _NO_PLACE in str(error):
            return Tried(mistake.name, mistake.what, NOT_PLANTED)
        raise
    # The reference can be used again unless the mistake has changed the initial weights, batches or random numbers.
    if reference.was_fed(records):
        report = reference.judge(records)
        if needed := reference.needed_as_a_whole(report):
            report = verify_script(replace(script, whole=needed), processes)
    else:
        report = verify_script(script, processes)
    causes = tuple(report.causes)
    named = bool(causes) and causes[0] in mistake.causes
    return Tried(mistake.name, mistake.what, NO if report.ok else YES, causes, named)


def _run_tests(command: str, environment: dict[str, str]) -> int:
    quiet = subprocess.DEVNULL
    return subprocess.run(
        shlex.split(command), env={**os.environ, **environment}, stdout=quiet, stderr=quiet, check=False
    ).returncode
