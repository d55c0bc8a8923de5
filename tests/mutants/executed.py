"""`python -m tests.mutants.executed lines.json`: which test files execute which lines of the package, ranks included.

Every test file of `make test` runs once under coverage, two at a time: about twenty minutes on two cores. A run that was ended
goes on from the file, and later only the test files run that were edited since. `python -m tests.mutants --executed lines.json`
runs against a change only the tests that execute it.
"""

from __future__ import annotations

import ast
import json
import sqlite3
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from coverage.numbits import numbits_to_nums

from tests.mutants.changes import Change
from tests.mutants.running import Known, working_copies

ROOT = Path(__file__).parents[2]
LIMIT = 600.0
"""Seconds for one file. The longest take a minute."""


class Executed:
    """The statements that each test file executed, known by module, function and text: other edits leave them as they are."""

    def __init__(self, path: Path, root: Path = ROOT) -> None:
        self._path, self._root = path, root
        found = json.loads(path.read_text()) if path.exists() else {}
        self._numbers: dict[str, int] = {name: number for number, name in enumerate(found.get("statements", []))}
        self._tests: dict[str, dict[str, Any]] = found.get("tests", {})
        """Of each test file: its `digest` and the numbers of what it `executed`."""

    def choose(self, change: Change, matched: Sequence[str]) -> list[str]:
        """Return the test files to run: of the matched ones those that execute the changed statement or are new, then others.

        All of the matched ones where it is known of none: of a statement that was edited, or runs when it is imported.
        """
        number = self._numbers.get(statements(self._root, change.path).get(change.line, ""))
        executing = {test for test, found in self._tests.items() if number in found["executed"]}
        executing = {test for test in executing if (self._root / test).exists()}  # it may have been moved
        if not executing:
            return [*matched]
        fresh = {test for test in matched if not self.is_known(test)}
        return [*(test for test in matched if test in executing | fresh), *sorted(executing.difference(matched))]

    def is_known(self, test: str) -> bool:
        """Whether this test file was measured as it is."""
        return test in self._tests and self._tests[test]["digest"] == self._digest(test)

    def add(self, test: str, lines: dict[str, set[int]]) -> None:
        """Keep what a test file executed."""
        names = {statements(self._root, module).get(line) for module in lines for line in lines[module]} - {None}
        numbers = sorted(self._numbers.setdefault(str(name), len(self._numbers)) for name in names)
        self._tests[test] = {"digest": self._digest(test), "executed": numbers}
        draft = self._path.with_suffix(".draft")
        draft.write_text(json.dumps({"statements": [*self._numbers], "tests": self._tests}))
        draft.replace(self._path)

    def _digest(self, test: str) -> str:
        return sha256((self._root / test).read_bytes()).hexdigest()


@cache
def statements(root: Path, module: str) -> dict[int, str]:
    """Return a name for every line of a statement inside a function; of a compound one for its head."""
    text = (root / module).read_text()
    lines, names = text.splitlines(), dict[int, str]()

    def visit(node: ast.AST, place: str, is_inside: bool) -> None:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            place = f"{place}.{node.name}"
        elif isinstance(node, (ast.stmt, ast.ExceptHandler)) and is_inside:
            body = getattr(node, "body", None)
            end = max(node.lineno, body[0].lineno - 1) if body else node.end_lineno or 0
            numbers = range(node.lineno, end + 1)
            words = " ".join(lines[number - 1].strip() for number in numbers)
            names.update(dict.fromkeys(numbers, f"{module}{place}: {words}"))
        for child in ast.iter_child_nodes(node):
            visit(child, place, is_inside or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))

    visit(ast.parse(text), "", False)
    return names


def main(arguments: list[str]) -> int:
    """Run the test files that the record lacks."""
    if len(arguments) != 1:
        sys.exit(__doc__)
    executed = Executed(Path(arguments[0]))
    tests = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py"))
    waiting = [test for test in tests if not executed.is_known(test)]
    with working_copies(ROOT, 2, Known(), float("inf")) as workshop, ThreadPoolExecutor(2) as pool:

        def measure(test: str) -> tuple[str, dict[str, set[int]]]:
            with workshop.copy() as copy, tempfile.TemporaryDirectory() as folder:
                workshop.measure(copy, test, Path(folder) / "data", LIMIT)
                return test, _read(Path(folder), copy)

        for done, (test, lines) in enumerate(pool.map(measure, waiting), 1):
            executed.add(test, lines)
            print(f"{done} of {len(waiting)}: {test}, {sum(map(len, lines.values()))} lines", flush=True)
    return 0


def _read(folder: Path, copy: Path) -> dict[str, set[int]]:
    """Return the lines of each module that some process of the run executed."""
    lines: dict[str, set[int]] = {}
    for file in folder.iterdir():
        with suppress(sqlite3.DatabaseError), sqlite3.connect(file) as data:  # a process that was killed wrote nothing
            rows = data.execute("select file.path, numbits from line_bits join file on file.id = line_bits.file_id")
            for path, bits in rows:
                if Path(path).is_relative_to(copy):
                    lines.setdefault(str(Path(path).relative_to(copy)), set()).update(numbits_to_nums(bits))
    return lines


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
