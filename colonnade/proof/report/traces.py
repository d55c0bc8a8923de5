"""Joins the profiler traces of all ranks into one file for Perfetto or chrome://tracing, on a common clock."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from statistics import median
from typing import Any

from colonnade.errors import ConfigError
from colonnade.paths import local_path

NAME = "trace-rank-{:05d}.json"
"""The file name of a rank's trace."""


def merge_traces(folder: str | Path, out: str | Path) -> Path:
    """Join `trace-rank-*.json` of a folder into `out` (gzipped if it ends in .gz): one process per rank, in order.

    A trace has the time of its machine's clock. Each rank has noted this time at common moments (the ends of barriers),
    from which the differences between the clocks are computed and subtracted.
    """
    files = sorted(local_path(folder, "the folder of the traces").glob("trace-rank-*.json"))
    if not files:
        raise ConfigError(
            f"{folder} has no trace-rank-*.json. Add ProfilerHook(folder) to the hooks of fit to write traces."
        )
    events: list[dict[str, Any]] = []
    met: list[float] | None = None
    for file in files:
        trace = _read(file)
        found = re.search(r"(\d+)\.json$", file.name)
        rank, facts = int(found[1]) if found else 0, trace.get("colonnade", {})
        base = trace.get("baseTimeNanoseconds", 0) / 1000
        here = facts.get("met_us") or [0.0]
        met = here if met is None else met
        ahead = median(mine - first for mine, first in zip(here, met, strict=False))
        events += _of_rank(trace["traceEvents"], rank, facts.get("place", ""), base - ahead)
    first = min((event["ts"] for event in events if "ts" in event), default=0.0)
    for event in events:
        if "ts" in event:
            event["ts"] = round(event["ts"] - first, 3)
    text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
    target = local_path(out, "the trace's file")
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.suffix == ".gz":
        target.write_bytes(gzip.compress(text.encode(), 6))
    else:
        target.write_text(text, encoding="utf-8")
    return target


def _read(file: Path) -> dict[str, Any]:
    try:
        trace = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:  # cut off, or no text
        trace = None
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        raise ConfigError(
            f"{file} is incomplete, probably because its rank was killed while it wrote the file. Remove the file to "
            "join the others."
        )
    return trace


def _of_rank(events: list[dict[str, Any]], rank: int, place: str, shift: float) -> list[dict[str, Any]]:
    """The events of one rank with process numbers that no other rank has, and times on the clock of the first."""
    numbers: dict[Any, int] = {}
    made = []
    for event in events:
        if event.get("ph") == "M" and event.get("name") in ("process_name", "process_labels", "process_sort_index"):
            continue
        pid = numbers.setdefault(event.get("pid"), rank * 1000 + len(numbers))
        moved = {**event, "pid": pid}
        if "ts" in event:
            moved["ts"] = event["ts"] + shift
        if "id" in event:  # arrows between events are of one rank
            moved["id"] = f"{rank}-{event['id']}"
        made.append(moved)
    for original, pid in numbers.items():
        name = f"rank {rank}{f' ({place})' if place else ''}: {original}"
        made.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}})
        made.append({"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}})
    return made
