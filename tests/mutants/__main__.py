"""`python -m tests.mutants --count 200 --jobs 8 --seed 7`: change the package at random; see which changes nobody notices.

Every change is one: a comparison, `and` for `or`, `any` for `all`, a sign, a constant, a dropped `not` or call, a `return
None`. It is made in a copy of the tree, where the tests run that match the module: the fast ones first, the slow ones
when no fast one noticed. Words, types and logging are left alone. Changes that cannot change behaviour are listed with
the reason in `equivalent.json`; they are counted apart and not run.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.mutants.changes import Change, find_changes
from tests.mutants.matching import Matching
from tests.mutants.running import TIERS, Baseline, working_copies

ROOT = Path(__file__).parents[2]
PLACES = (
    *("checkpoint", "comm", "context", "engine", "nn", "optim", "parallel", "reduce", "trainer", "utils"),
    *("registry.py", "_launch.py"),
)
"""Where a mistake means wrong training or lost data."""
LEFT_OUT = (
    "colonnade/optim/kernels",  # only a GPU runs them
    "colonnade/engine/schedule/simulate.py",  # pictures of schedules
    "colonnade/trainer/hooks/progress.py",  # what is shown
    "colonnade/trainer/hooks/log.py",
)
Result = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """Choose, run, report. Returns 1 when a change went unnoticed."""
    options = _parser().parse_args(arguments)
    chosen = choose(options.places or [f"colonnade/{place}" for place in PLACES], options.count, options.seed)
    if options.list:
        print("\n\n".join(_described(change) for change in chosen))
        return 0
    equivalent = {(entry["module"], *entry["diff"]): entry["why"] for entry in read_equivalent()}
    to_run = [change for change in chosen if _key(change) not in equivalent]
    print(f"{len(chosen)} changes, {len(chosen) - len(to_run)} of them equivalent by {EQUIVALENT.name}", flush=True)
    record = Record(Path(options.json) if options.json else None)
    run(to_run, options.jobs, record)
    wanted = {_name(change) for change in to_run}
    results = [result for name, result in record.results.items() if name in wanted]
    print(report(results))
    return int(any(not result["noticed"] for result in results))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=(__doc__ or "").split("\n\n", 1)[1])
    parser.add_argument("places", nargs="*", help="files (file.py:12 for one line) or folders; default: the package")
    parser.add_argument("--count", type=int, default=50, help="so many changes at random (default 50; 0: all)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="so many changes at a time; each may start up to 8 ranks")
    parser.add_argument("--json", help="write every result there at once; a run that finds the file goes on with it")
    parser.add_argument("--list", action="store_true", help="show the changes, run nothing")
    return parser


def choose(places: Sequence[str], count: int, seed: int) -> list[Change]:
    """Return `count` changes at random to the files of those places."""
    known = []
    for place in places:
        name, _, line = place.partition(":")
        path = ROOT / name
        if not path.exists():
            sys.exit(
                f"there is no {name} in {ROOT}: name a file or a folder, like colonnade/reduce or colonnade/reduce/plan.py:89"
            )
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            if place == str(file.relative_to(ROOT)) or not str(file.relative_to(ROOT)).startswith(LEFT_OUT):
                known += [change for change in find_changes(file, ROOT) if not line or change.line == int(line)]
    return random.Random(seed).sample(known, min(count, len(known)) if count else len(known))


class Record:
    """The results so far, kept in a file when one is given."""

    def __init__(self, path: Path | None) -> None:
        self._path, self._lock = path, threading.Lock()
        found = json.loads(path.read_text()) if path and path.exists() else {}
        self.baseline = Baseline(**found["baseline"]) if "baseline" in found else None
        self.results: dict[str, Result] = {result["name"]: result for result in found.get("results", [])}

    def add(self, result: Result) -> None:
        with self._lock:
            self.results[result["name"]] = result
            self.save()

    def save(self) -> None:
        if self._path and self.baseline:
            content = {"baseline": asdict(self.baseline), "results": [*self.results.values()]}
            draft = self._path.with_suffix(".draft")
            draft.write_text(json.dumps(content, indent=1))
            draft.replace(self._path)


def run(chosen: Sequence[Change], jobs: int, record: Record) -> None:
    """Judge every change that has no result yet."""
    waiting = [change for change in chosen if _name(change) not in record.results]
    if not waiting:
        return
    matching = Matching(ROOT)
    tests = {change.path: matching.tests_for(change.path) for change in waiting}
    with working_copies(ROOT, jobs) as workshop:
        files = sorted({file for some in tests.values() for file in some})
        if record.baseline is None or not set(files).issubset(record.baseline.files):
            print(f"first the {len(files)} matching test files on the unchanged tree", flush=True)
            record.baseline = workshop.measure(files)
            record.save()
        for test in record.baseline.failing:
            print(f"left out, since it fails on the unchanged tree: {test}", flush=True)
        with ThreadPoolExecutor(jobs) as pool:
            judged = {
                pool.submit(workshop.judge, change, tests[change.path], record.baseline): change for change in waiting
            }
            for number, future in enumerate(as_completed(judged), 1):
                change, outcome = judged[future], future.result()
                record.add(
                    {
                        "name": _name(change),
                        "module": change.path,
                        "line": change.line,
                        "kind": change.kind,
                        "diff": _diff(change),
                        **asdict(outcome),
                    }
                )
                noticed = f"noticed ({outcome.noticed}) by {outcome.by}" if outcome.noticed else "NOT NOTICED"
                print(f"{number}/{len(waiting)} {_name(change)} {noticed}, {outcome.seconds:.0f} s", flush=True)


def report(results: Sequence[Result]) -> str:
    """Return the table: what each tier noticed, and every change that none did."""
    total = len(results)
    lines = ["", f"{total} changes"]
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


EQUIVALENT = Path(__file__).parent / "equivalent.json"


def read_equivalent() -> list[dict[str, Any]]:
    """Return the committed list of changes that cannot change behaviour: module, diff, why."""
    return json.loads(EQUIVALENT.read_text())


def unknown_equivalents(entries: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the entries that no change of today's package matches."""
    changes: dict[str, set[tuple[str, ...]]] = {}
    missing = []
    for entry in entries:
        module = entry["module"]
        if module not in changes:
            path = ROOT / module
            changes[module] = {_key(change)[1:] for change in find_changes(path, ROOT)} if path.exists() else set()
        if tuple(entry["diff"]) not in changes[module]:
            missing.append(f"{module}: {entry['diff']}")
    return missing


def _key(change: Change) -> tuple[str, ...]:
    return (change.path, *_diff(change))


def _diff(change: Change) -> list[str]:
    return change.diff((ROOT / change.path).read_bytes())


def _name(change: Change) -> str:
    return f"{change.path}:{change.line} {change.kind} @{change.start} {change.text!r}"


def _described(change: Change) -> str:
    return "\n".join([f"{change.path}:{change.line} ({change.kind})", *_diff(change)])


def _share(count: int, total: int) -> str:
    return f"{100 * count / total:5.1f}%" if total else "-"


if __name__ == "__main__":
    sys.exit(main())
