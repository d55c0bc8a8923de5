"""`Run`: the steps, metrics and events of a run, read from the log of a `JsonlHook`."""

from __future__ import annotations

import json
import math
import re
import time
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, TypeGuard

from colonnade.errors import ConfigError
from colonnade.paths import local_path
from colonnade.proof.report.charts import buckets

_MOST_KNOTS = 400
Line = dict[str, Any]
MARKS = ("clipped", "skipped")
RATES = {"samples/s": "samples", "tokens/s": "tokens"}
"""Columns of rates: each is a count divided by the seconds of the step."""
_KNOWN = re.compile(
    r"(loss|lr|grad_norm|samples|tokens|seconds|memory|clipped|skipped|samples/s|tokens/s)$|(time|busy|grad_norm|marked)[/ ]"
)
_NEEDED = {
    "step": (),
    "train": (),
    "test": (),
    "event": ("level", "text"),
    "end": ("time", "how"),
    "run": ("time", "world_size", "device", "parameters", "colonnade", "torch", "ledger", "config"),
}
"""The keys that a line of each kind must have, in addition to `kind` and `step`."""


class Column:
    """The values of one quantity by step, stored in arrays because a log may have a million steps."""

    def __init__(self) -> None:
        self.steps, self.values = array("q"), array("d")

    def add(self, step: int, value: float) -> None:
        self.steps.append(step)
        self.values.append(value)

    def cut(self, step: int) -> None:
        """Remove this step and all later ones."""
        at = bisect_left(self.steps, step)
        del self.steps[at:], self.values[at:]


@dataclass
class Run:
    """The steps, metrics and events of a run in order.

    Attributes:
        facts: The facts that the log has about the last start of the run.
        damaged: The number of lines that could not be read.
        end: The last line of a finished run; None if the run continues or was killed.
        written: The time of the last write to the log.
        quiet: The seconds since that write when the log was read.
        cut: Whether the log ends in the middle of a line.
    """

    name: str
    path: Path
    facts: Line = field(default_factory=dict)
    starts: list[Line] = field(default_factory=list)
    epochs: list[Line] = field(default_factory=list)
    tests: list[Line] = field(default_factory=list)
    events: list[Line] = field(default_factory=list)
    columns: dict[str, Column] = field(default_factory=dict)
    steps: Column = field(default_factory=Column)
    damaged: int = 0
    end: Line | None = None
    written: float = 0.0
    quiet: float = 0.0
    cut: bool = False

    @property
    def first(self) -> int:
        """The number of the first step."""
        return self.steps.steps[0]

    @property
    def last(self) -> int:
        """The number of the last step."""
        return self.steps.steps[-1]

    def column(self, key: str) -> list[tuple[float, float]]:
        """Return (step, value) of all steps with a finite value of this quantity."""
        found = self.columns.get(key, Column())
        return list(zip(found.steps, found.values, strict=True))

    def values(self, key: str) -> Sequence[float]:
        """Return the finite values of this quantity without their steps, as stored: a list of a million steps is large."""
        return self.columns[key].values if key in self.columns else ()

    def marked(self, mark: str) -> list[tuple[float, float]]:
        """Return (step, gradient norm) of the steps with a mark: "clipped", "skipped", or "loss" (the loss is not finite).

        The norm is 1 if it is unknown.
        """
        return self.column(f"marked {mark}")

    def test(self, key: str) -> list[tuple[float, float]]:
        """Return (step, value) of all evaluations with a finite value of this metric."""
        return _points(self.tests, key)

    def metrics(self) -> dict[str, dict[str, list[tuple[float, float]]]]:
        """Return the metrics by name, then by "training" (epochs) and "validation" (evaluations), without the loss."""
        kinds = {"training": self.epochs, "validation": self.tests}
        names = dict.fromkeys(key for lines in kinds.values() for line in lines for key in line)
        found = {
            name: {kind: points for kind, lines in kinds.items() if (points := _points(lines, name))}
            for name in names
            if name not in ("kind", "step", "epoch", "Loss", "LR", "Throughput", "TFLOPS")
        }
        return {name: kinds for name, kinds in found.items() if kinds}

    def own_numbers(self) -> list[str]:
        """Return the names of quantities that hooks and scripts have logged themselves."""
        return [name for name in self.columns if not _KNOWN.match(name)]

    def axes(self) -> dict[str, list[float]]:
        """Return a few hundred steps, with the seconds and the tokens (or samples) since the start.

        The page interpolates between these steps.
        """
        steps, seconds = self.steps.steps, self.columns.get("seconds", Column())
        axes: dict[str, list[float]] = {"step": [self.first - 1, *buckets(steps, _MOST_KNOTS)]}
        counted = next((name for name in ("tokens", "samples") if name in self.columns), "")
        for name, column in (("time", seconds), (counted, self.columns.get(counted, Column()))):
            if column.steps:
                edges = [bisect_right(column.steps, step) for step in axes["step"]]
                parts = (sum(column.values[begin:end]) for begin, end in pairwise(edges))
                axes[name] = [round(value, 2) for value in accumulate(parts, initial=0.0)]
        return axes

    def layers(self) -> list[str]:
        """Return the names of the norm groups (such as layers) with a logged gradient norm, sorted by the numbers in them."""
        found = [name.removeprefix("grad_norm/") for name in self.columns if name.startswith("grad_norm/")]
        return sorted(found, key=_by_numbers)

    def layout(self) -> str:
        """Return the sizes of the modes, as `data 2 x pipeline 2`."""
        sizes = self.facts.get("layout") or {}
        return " x ".join(f"{name} {size}" for name, size in sizes.items()) or "one process"

    def add_step(self, line: Line) -> None:
        """Add the line of a step.

        If the step exists already (after a resume), the old values from it on are removed.
        """
        step = line["step"]
        if self.steps.steps and step <= self.last:
            for column in (self.steps, *self.columns.values()):
                column.cut(step)
        self.steps.add(step, 0.0)
        for key, value in line.items():
            if key not in ("kind", "step", "epoch") and _is_number(value):
                self._put(key, step, value)
        seconds, loss, norm = line.get("seconds"), line.get("loss", 0.0), line.get("grad_norm")
        if _is_number(seconds) and seconds:
            for rate, count in RATES.items():
                if _is_number(line.get(count)):
                    self._put(rate, step, line[count] / seconds)
        for mark in [mark for mark in MARKS if line.get(mark)] + ["loss"] * (not _is_number(loss)):
            self._put(f"marked {mark}", step, norm if _is_number(norm) else 1.0)

    def _put(self, key: str, step: int, value: float) -> None:
        column = self.columns.get(key)
        if column is None:
            column = self.columns[key] = Column()
        column.steps.append(step)
        column.values.append(value)


def read_run(source: str | Path) -> Run:
    """Read the run from its log, or from the folder of the log. Damaged lines are counted and left out."""
    path = find_log(local_path(source, "the run"))
    run = Run(path.absolute().parent.name if path.stem == "log" else path.stem, path, written=path.stat().st_mtime)
    run.quiet = time.time() - run.written
    homes = {"train": run.epochs, "test": run.tests, "event": run.events, "run": run.starts}
    with path.open(encoding="utf-8", errors="replace") as file:
        for text in file:
            line = _line(text)
            run.cut = not text.endswith("\n")
            if line is None:
                run.damaged += not run.cut
                continue
            if line["kind"] in ("step", "run", "end"):  # a warning may come after the end
                run.end = line if line["kind"] == "end" else None
            if line["kind"] == "step":
                run.add_step(line)
            elif line["kind"] in homes:
                homes[line["kind"]].append(line)
    if not run.steps.steps:
        raise ConfigError(
            f"{path} has no finished step, so the report would be empty. JsonlHook writes a line for each finished "
            "step; let the run finish a step first."
        )
    run.facts = run.starts[-1] if run.starts else {}
    return run


def _line(text: str) -> Line | None:
    """The values in a complete line of a JsonlHook; None for any other text."""
    try:
        line = json.loads(text)
    except ValueError:
        return None
    if not isinstance(line, dict) or not isinstance(line.get("kind"), str) or not isinstance(line.get("step"), int):
        return None
    needed = _NEEDED.get(line["kind"])
    return line if needed is not None and all(key in line for key in needed) else None


def _points(lines: list[Line], key: str) -> list[tuple[float, float]]:
    return [(line["step"], line[key]) for line in lines if _is_number(line.get(key))]


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and math.isfinite(value)


def find_log(path: Path) -> Path:
    """Return the log of a run: the file itself, or the only log in the folder or one level below."""
    if path.is_file():
        return path
    if not path.is_dir():
        raise ConfigError(
            f"{path} is neither the folder of a run nor a log. Give the path that was passed to JsonlHook, or its "
            "folder."
        )
    found = sorted(path.glob("*.jsonl")) or sorted(path.glob("*/*.jsonl"))
    if len(found) != 1:
        what = (
            f"several logs ({', '.join(str(each.relative_to(path)) for each in found[:8])})"
            if found
            else "no log (*.jsonl)"
        )
        raise ConfigError(
            f"{path} has {what}. Give the path of one log, the path that was passed to JsonlHook(path) in the hooks "
            "of fit."
        )
    return found[0]


def _by_numbers(name: str) -> list[tuple[int, str]]:
    """A sort key with which block2 comes before block10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
