"""`colonnade verify --mutate`: known mistakes are planted into a script one at a time. Who notices?"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from colonnade.proof.compare import Report
from colonnade.proof.mutation import Mistake, known, planted_environment
from colonnade.proof.scripts import Script, ScriptError, SingleProcessScript, on_ranks, run_both, verify_script

_NO_PLACE = "there is nothing in this run to make that mistake with"
YES, NO, NOT_PLANTED = "noticed", "NOT noticed", "has no place there"


@dataclass(frozen=True)
class Tried:
    """One mistake: what `verify` said of it, and whether the tests failed. None: they were not asked."""

    mistake: str
    what: str
    verify: str
    causes: tuple[str, ...] = ()
    named: bool = False
    """Whether the first cause is one that the mistake may rightly be called."""
    tests: str | None = None
    seconds: float = 0.0

    @property
    def missed(self) -> bool:
        """Whether somebody who was asked did not notice."""
        return NO in (self.verify, self.tests)


@dataclass(frozen=True)
class Mutation:
    """All mistakes that were tried. `print` it, or read it as JSON."""

    tried: Sequence[Tried]

    @property
    def ok(self) -> bool:
        """Whether every mistake that has a place was noticed by all who were asked."""
        return not any(one.missed for one in self.tried)

    def to_json(self) -> str:
        """As a JSON object."""
        return json.dumps({"ok": self.ok, "tried": [asdict(one) for one in self.tried]}, indent=1)

    def __str__(self) -> str:
        asked = any(one.tests is not None for one in self.tried)
        lines = [("mistake", "verify", "called", *(("your tests",) if asked else ()))]
        for one in self.tried:
            called = ", ".join(one.causes) + ("" if one.named or not one.causes else " (another name)")
            lines.append((one.mistake, one.verify, called, *((one.tests or "",) if asked else ())))
        widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
        table = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
        ]
        return "\n".join([*table, "", *self._verdict()])

    def _verdict(self) -> Iterator[str]:
        here = [one for one in self.tried if one.verify != NOT_PLANTED]
        seen, named = sum(one.verify == YES for one in here), sum(one.named for one in here)
        yield f"verify notices {seen} of {len(here)} mistakes that have a place here, and calls {named} by their names"
        asked = [one for one in self.tried if one.tests in (YES, NO)]
        if asked:
            yield f"your tests notice {sum(one.tests == YES for one in asked)} of {len(asked)}"
            yield from (f"  not noticed by your tests: {one.mistake} ({one.what})" for one in asked if one.tests == NO)


def mutate_script(
    script: Script, names: str | None = None, tests: str | None = None, tell: Callable[[str], None] = lambda line: None
) -> Mutation:
    """Plant each mistake (those of these names; all) into the script on its ranks, and judge the run; and, if `tests` is a
    command, run that with the mistake in every engine of its processes. The script itself, and the tests, must be healthy."""
    chosen = known(names)
    if tests is not None and (status := _run_tests(tests, {})) != 0:
        raise ScriptError(f"{tests} fails with no mistake planted (exit status {status}): correct that first")
    with tempfile.TemporaryDirectory(prefix="colonnade-verify-") as name:
        script, healthy, alone = run_both(script, Path(name))
        report = alone.judge(healthy)
        if not report.ok:
            raise ScriptError(f"{script} differs from one process with no mistake planted:\n{report}")
        tried = []
        for at, mistake in enumerate(chosen.values(), 1):
            began = time.perf_counter()
            one = _judged(mistake, _planted(replace(script, mistake=mistake.name), alone, Path(name)))
            if tests is not None:
                one = replace(one, tests=_asked(tests, mistake, Path(name) / f"{mistake.name}.planted"))
            tried.append(replace(one, seconds=time.perf_counter() - began))
            tell(f"{at}/{len(chosen)} {mistake.name}: {one.verify} {', '.join(one.causes)}".rstrip())
    return Mutation(tried)


def _planted(script: Script, alone: SingleProcessScript, folder: Path) -> Report | None:
    """What is said of the run with the mistake; None where it has no place."""
    inside = folder / str(script.mistake)
    inside.mkdir()
    try:
        records = on_ranks(script, inside)
    except ScriptError as error:
        if _NO_PLACE in str(error):
            return None
        raise
    return alone.judge(records) if alone.was_fed(records) else verify_script(script)


def _judged(mistake: Mistake, report: Report | None) -> Tried:
    if report is None:
        return Tried(mistake.name, mistake.what, NOT_PLANTED)
    causes = tuple(report.causes)
    named = causes[:1] != () and causes[0] in mistake.causes
    return Tried(mistake.name, mistake.what, NO if report.ok else YES, causes, named)


def _asked(tests: str, mistake: Mistake, mark: Path) -> str:
    status = _run_tests(tests, planted_environment(mistake.name, mark))
    if not mark.exists():
        return NOT_PLANTED
    return YES if status != 0 else NO


def _run_tests(command: str, environment: dict[str, str]) -> int:
    quiet = subprocess.DEVNULL
    return subprocess.run(
        shlex.split(command), env={**os.environ, **environment}, stdout=quiet, stderr=quiet, check=False
    ).returncode
