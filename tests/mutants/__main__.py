"""`python -m tests.mutants --count 200 --jobs 8 --seed 7`: change the package at random; see which changes nobody notices.

Every change is one: a comparison, `and` for `or`, `any` for `all`, a sign, a constant, a dropped `not` or call, a `return
None`. It is made in a copy of the tree, where the tests run that match the module: the nearest file first, then the
fast tests, then the slow ones. A change is noticed when a test fails that passes on the unchanged tree. Words, types and
logging are left alone. Changes that cannot change behaviour are listed with the reason in `equivalent/`; they are counted
apart and not run.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from tests.mutants.changes import Change, find_changes
from tests.mutants.executed import Executed
from tests.mutants.matching import Matching
from tests.mutants.running import TIERS, Known, OutOfTimeError, working_copies

ROOT = Path(__file__).parents[2]
PLACES = (
    *("checkpoint", "comm", "context", "engine", "nn", "optim", "parallel", "gradients", "trainer", "utils"),
    *("registry.py", "_launch.py"),
)
"""Where a mistake means wrong training or lost data."""
LEFT_OUT = (
    "colonnade/engine/schedule/replay.py",  # pictures of schedules
    "colonnade/trainer/hooks/progress.py",  # what is shown
)
ON_A_GPU = (
    *("colonnade/optim/kernels", "colonnade/nn/nn_kernels.py", "colonnade/nn/nn_kernels.py"),  # Triton
    "colonnade/nn/sequence/attention_kernels.py",  # torch's own for attention
)
"""What only a GPU runs is left out where there is none."""
Result = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """Choose, run, report. Returns 1 when a change went unnoticed."""
    options = _parser().parse_args(arguments)
    chosen = choose(options.places or [f"colonnade/{place}" for place in PLACES], options.count, options.seed)
    if options.list:
        print("\n\n".join(_described(change) for change in chosen))
        return 0
    entries = read_equivalent()
    to_run = [change for change in chosen if not any(is_entry(entry, _key(change)) for entry in entries)]
    print(f"{len(chosen)} changes, {len(chosen) - len(to_run)} of them equivalent by {EQUIVALENT.name}/", flush=True)
    record = Record(Path(options.json) if options.json else None)
    executed = Executed(Path(options.executed)) if options.executed else None
    run(to_run, options.jobs, record, executed, options.budget, options.stop_after)
    results = [record.results[_key(change)] for change in to_run if _key(change) in record.results]
    print(report(results, len(to_run)))
    return int(any(not result["noticed"] for result in results))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=(__doc__ or "").split("\n\n", 1)[1])
    parser.add_argument("places", nargs="*", help="files (file.py:12 for one line) or folders; default: the package")
    parser.add_argument("--count", type=int, default=50, help="so many changes at random (default 50; 0: all)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="so many changes at a time; each may start up to 8 ranks")
    parser.add_argument("--json", help="write every result there at once; a run that finds the file goes on with it")
    parser.add_argument(
        "--executed", help="run the tests that execute the change, by the file of tests.mutants.executed"
    )
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds of tests for one change (default: all)")
    parser.add_argument("--stop-after", type=float, default=math.inf, help="end after so many seconds")
    parser.add_argument("--list", action="store_true", help="show the changes, run nothing")
    return parser


def choose(places: Sequence[str], count: int, seed: int) -> list[Change]:
    """Return `count` changes at random to the files of those places.

    The seed gives every change its place in a row, so that other edits of the package do not change the choice.
    """
    known: dict[tuple[str, ...], Change] = {}
    left_out = LEFT_OUT if torch.cuda.is_available() else (*LEFT_OUT, *ON_A_GPU)
    for place in places:
        name, _, line = place.partition(":")
        path = ROOT / name
        if not path.exists():
            sys.exit(
                f"there is no {name} in {ROOT}: name a file or a folder, like colonnade/gradients or colonnade/gradients/sums.py:89"
            )
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            if place == str(file.relative_to(ROOT)) or not str(file.relative_to(ROOT)).startswith(left_out):
                source = file.read_bytes()
                found = [change for change in find_changes(file, ROOT) if not line or change.line == int(line)]
                known |= {(change.path, *change.diff(source)): change for change in found}
    row = sorted(known, key=lambda key: sha256("\n".join([str(seed), *key]).encode()).digest())
    return [known[key] for key in (row[:count] if count else row)]


class Record:
    """The results so far, kept in a file when one is given."""

    def __init__(self, path: Path | None) -> None:
        self._path, self._lock = path, threading.Lock()
        found = json.loads(path.read_text()) if path and path.exists() else {}
        self.known = Known(**found.get("known", {}))
        self.results = {(result["module"], *result["diff"]): result for result in found.get("results", [])}

    def add(self, key: tuple[str, ...], result: Result) -> None:
        with self._lock:
            self.results[key] = result
            if self._path:
                draft = self._path.with_suffix(".draft")
                content = {"known": asdict(self.known), "results": [*self.results.values()]}
                draft.write_text(json.dumps(content, indent=1))
                draft.replace(self._path)


def run(
    chosen: Sequence[Change], jobs: int, record: Record, executed: Executed | None, budget: float, stop_after: float
) -> None:
    """Judge every change that has no result yet."""
    waiting = [change for change in chosen if _key(change) not in record.results]
    if not waiting:
        return
    deadline = time.monotonic() + stop_after
    matching = Matching(ROOT)
    matched = {change.path: matching.tests_for(change.path) for change in waiting}

    def judge(change: Change) -> None:
        tests = matched[change.path]
        tests = executed.choose(change, tests) if executed else tests
        try:
            outcome = workshop.judge(change, tests, budget)
        except OutOfTimeError:
            return
        result = {"module": change.path, "line": change.line, "kind": change.kind, "diff": _diff(change)}
        record.add(_key(change), {**result, **asdict(outcome)})
        noticed = f"noticed ({outcome.noticed}) by {outcome.by}" if outcome.noticed else "NOT NOTICED"
        print(f"{change.path}:{change.line} ({change.kind}) {noticed}, {outcome.seconds:.0f} s", flush=True)

    with working_copies(ROOT, jobs, record.known, deadline) as workshop, ThreadPoolExecutor(jobs) as pool:
        list(pool.map(judge, waiting))


def report(results: Sequence[Result], wanted: int) -> str:
    """Return the table: which tier noticed first, and every change that none did."""
    total = len(results)
    lines = ["", f"{total} of {wanted} changes"]
    for tier in TIERS:
        count = sum(result["noticed"] == tier for result in results)
        lines.append(f"  noticed by the {tier} tests   {count:4d}   {_share(count, total)}")
    noticed = sum(bool(result["noticed"]) for result in results)
    lines += [
        f"  noticed in all            {noticed:4d}   {_share(noticed, total)}",
        f"  not noticed               {total - noticed:4d}",
    ]
    for result in sorted(results, key=lambda result: (result["module"], result["line"])):
        if not result["noticed"]:
            lines += [
                "",
                f"{result['module']}:{result['line']} ({result['kind']})",
                *(f"    {line}" for line in result["diff"]),
            ]
    return "\n".join(lines)


EQUIVALENT = Path(__file__).parent / "equivalent"


def read_equivalent() -> list[dict[str, Any]]:
    """Return the committed lists of changes that cannot change behaviour: module, why, and `diff` or `line`.

    `line`: every change of this one, as of a constant that is a choice, but those that make it zero.
    """
    return [entry for file in sorted(EQUIVALENT.glob("*.json")) for entry in json.loads(file.read_text())]


def is_entry(entry: Mapping[str, Any], key: tuple[str, ...]) -> bool:
    """Whether an entry of the list is, or stands for, the change with this module and diff."""
    if "diff" in entry:
        return [entry["module"], *entry["diff"]] == [*key]
    return [entry["module"], f"-{entry['line']}"] == [*key[:2]] and len(key) == 3 and not re.search(r"\b0 <<", key[2])


def unknown_equivalents(entries: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the entries that no change of today's package matches."""
    changes: dict[str, set[tuple[str, ...]]] = {}
    missing = []
    for entry in entries:
        module = entry["module"]
        if module not in changes:
            path = ROOT / module
            changes[module] = {_key(change) for change in find_changes(path, ROOT)} if path.exists() else set()
        if not any(is_entry(entry, key) for key in changes[module]):
            missing.append(f"{module}: {entry.get('diff') or entry['line']}")
    return missing


def _key(change: Change) -> tuple[str, ...]:
    return (change.path, *_diff(change))


def _diff(change: Change) -> list[str]:
    return change.diff((ROOT / change.path).read_bytes())


def _described(change: Change) -> str:
    return "\n".join([f"{change.path}:{change.line} ({change.kind})", *_diff(change)])


def _share(count: int, total: int) -> str:
    return f"{100 * count / total:5.1f}%" if total else "-"


if __name__ == "__main__":
    sys.exit(main())
