"""A run as its log tells it: what a `JsonlHook` wrote, read back."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from colonnade.errors import ConfigError

Line = dict[str, Any]


@dataclass
class Run:
    """Steps, metrics and events of a run in order; `facts` is what it said of itself when it last began."""

    name: str
    path: Path
    facts: Line = field(default_factory=dict)
    starts: list[Line] = field(default_factory=list)
    steps: list[Line] = field(default_factory=list)
    metrics: list[Line] = field(default_factory=list)
    events: list[Line] = field(default_factory=list)

    def column(self, key: str) -> list[tuple[float, float]]:
        """(step, value) of every step that has such a number."""
        return [(line["step"], float(line[key])) for line in self.steps if line.get(key) is not None]

    def test(self, key: str) -> list[tuple[float, float]]:
        """The same of evaluations."""
        found = [line for line in self.metrics if line["kind"] == "test" and line.get(key) is not None]
        return [(line["step"], float(line[key])) for line in found]

    def layers(self) -> list[str]:
        """What has a gradient norm of its own, in the order of their numbers."""
        names = {name: None for line in self.steps for name in line if name.startswith("grad_norm/")}
        found = [name.removeprefix("grad_norm/") for name in names]
        return sorted(found, key=_by_numbers)

    def layout(self) -> str:
        """The sizes of the modes, as `data 2 x pipeline 2`."""
        sizes = self.facts.get("layout") or {}
        return " x ".join(f"{name} {size}" for name, size in sizes.items()) or "one process"


def read_run(source: str | Path) -> Run:
    """The run of a log, or of the folder it is in."""
    path = find_log(Path(source))
    run = Run(path.absolute().parent.name if path.stem == "log" else path.stem, path)
    homes = {"step": run.steps, "train": run.metrics, "test": run.metrics, "event": run.events, "run": run.starts}
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            line = json.loads(text)
            homes[line["kind"]].append(line)
        except (ValueError, KeyError, TypeError):
            continue  # the last line of a run that was killed, or one of somebody else
    if not run.steps:
        raise ConfigError(f"{path} has no finished step: there is nothing to show. A JsonlHook writes one line a step")
    run.facts = run.starts[-1] if run.starts else {}
    return run


def find_log(path: Path) -> Path:
    """The log of a run: itself, or the only one in its folder or one level down."""
    if path.is_file():
        return path
    if not path.is_dir():
        raise ConfigError(
            f"{path} is neither a folder of a run nor a log; give what JsonlHook(path) was given, or its folder"
        )
    found = sorted(path.glob("*.jsonl")) or sorted(path.glob("*/*.jsonl"))
    if len(found) != 1:
        what = (
            f"several logs ({', '.join(str(each.relative_to(path)) for each in found[:8])})"
            if found
            else "no log (*.jsonl)"
        )
        raise ConfigError(f"{path} has {what}; give the path of one: JsonlHook(path) in the hooks of fit writes it")
    return found[0]


def _by_numbers(name: str) -> list[tuple[int, str]]:
    """So that block2 comes before block10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
