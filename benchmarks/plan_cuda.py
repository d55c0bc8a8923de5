"""Plans compared with runs on one GPU: step time, allocated and reserved memory of the configurations in `_plan_cases.py`.

`python benchmarks/plan_cuda.py` plans every configuration whose run is in `plan_recorded.json`, and prints the table of
docs/evidence/plan.md; it needs no GPU and takes about five minutes. `--json` prints one JSON object last. `--join DIR ...` makes
`plan_recorded.json` from what `plan_record.py` has written on a machine with a GPU.

A deviation is planned / measured - 1. Ranks that share a GPU are planned with the collectives measured between them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from _measure import report
from _plan_cases import CASES, job

from colonnade.config import load_config
from colonnade.context.parallel_context import ParallelContext
from colonnade.proof.planner.hardware import load_hardware
from colonnade.proof.planner.plan import plan
from colonnade.proof.planner.plan_records import Hardware, Plan

RECORDED = Path(__file__).parent / "plan_recorded.json"
GOALS = {"step": 0.10, "allocated": 0.02, "reserved": 0.05}
CONTENTION = 1.4
"""The factor on kernels while another rank uses the GPU, measured under MPS: products 1.5, copies 1.9, and neither all the time."""
HEADER = "| configuration | step, ms: planned | measured | | allocated, GB: planned | measured | | reserved, GB: planned | measured | |"


def machine_of(ranks: int, recorded: Mapping[str, Any], sheet: bool = False) -> Hardware:
    """Return the H200: alone, or shared by ranks that talk over loopback sockets; `sheet`: without the calibration sweep."""
    machine = load_hardware("h200")
    if sheet:
        return replace(machine, kernels={}, operator_latency=3e-6)
    if ranks == 1:
        return machine
    return replace(machine, kernels={**machine.kernels, **recorded["collectives"]}, contention=CONTENTION, overlap=1.0)


def planned(name: str, recorded: Mapping[str, Any], sheet: bool = False) -> Plan:
    """Plan one configuration."""
    case = CASES[name]
    machine = machine_of(case.ranks, recorded, sheet)
    return plan(load_config(case.config), case.ranks, machine, job(case), ParallelContext())


def row(name: str, made: Plan, run: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """Return (planned, measured) of each figure; memory is that of the fullest rank."""
    fullest = max((one.memory for one in made.classes), key=lambda memory: memory.total)
    return {
        "step": (1e3 * made.totals.step_seconds, 1e3 * run["seconds"]),
        "allocated": (fullest.total / 1e9, run["allocated"] / 1e9),
        "reserved": (fullest.reserved / 1e9, run["reserved"] / 1e9),
    }


def line(name: str, found: Mapping[str, tuple[float, float]]) -> str:
    """Return one line of the table."""
    cells = [name]
    for what, digits in (("step", 1), ("allocated", 2), ("reserved", 2)):
        one, other = found[what]
        cells += [
            f"{one:.{digits}f}",
            f"{other:.{digits}f}",
            f"{100 * (one / other - 1):+.1f}%" if one else "not planned",
        ]
    return f"| {' | '.join(cells)} |"


def joined(folders: Sequence[Path]) -> dict[str, Any]:
    """Return the figures that the table needs, from the folders of `plan_record.py`; later folders win."""
    found: dict[str, Any] = {"torch": "", "cases": {}, "collectives": {}}
    for folder in folders:
        for part in ("alone.json", "ranks.json"):
            given = json.loads((folder / part).read_text())
            found["torch"] = given["torch"]
            for name, ranks in given["cases"].items():
                if name in CASES and not any("error" in one for one in ranks):
                    found["cases"][name] = dict(_figures(ranks))
            if given.get("collectives"):
                found["collectives"] = given["collectives"][0]["samples"]
    return found


def _figures(ranks: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, float]]:
    """Of the slowest and of the fullest rank."""
    yield "seconds", max(one["seconds"] for one in ranks)
    yield "issued", max(one["issued"] for one in ranks)
    yield "kernel_seconds", max(one["kernel_seconds"] for one in ranks)
    yield "allocated", max(one["step 3"]["allocated"] for one in ranks)
    yield "reserved", max(one["step 3"]["reserved"] for one in ranks)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", default="", help="configurations by name, by semicolons")
    parser.add_argument("--recorded", type=Path, default=RECORDED, help="figures of another machine or another day")
    parser.add_argument("--sheet", action="store_true", help="plan by the data sheet, without the calibration sweep")
    parser.add_argument("--join", type=Path, nargs="+", help="folders of plan_record.py")
    options = parser.parse_args()
    if options.join:
        options.recorded.write_text(json.dumps(joined(options.join), indent=1) + "\n")
        return 0
    recorded = json.loads(options.recorded.read_text())
    chosen = [name for name in CASES if name in (options.only.split(";") if options.only else recorded["cases"])]
    ratios: dict[str, float] = {}
    figures: dict[str, Any] = {}
    print(HEADER, "|---" * 10 + "|", sep="\n")
    for name in chosen:
        figures[name] = found = row(name, planned(name, recorded, options.sheet), recorded["cases"][name])
        ratios |= {f"{name}: {what}": abs(one / other - 1) for what, (one, other) in found.items() if one}
        print(line(name, found), flush=True)
    for what in GOALS:
        values = [value for key, value in ratios.items() if key.endswith(f": {what}")]
        if values:
            ratios[f"median: {what}"] = statistics.median(values)
    goals = {key: GOALS[key.rpartition(": ")[2]] for key in ratios}
    return 0 if report(ratios, goals, options.json, figures=figures) else 1


if __name__ == "__main__":
    sys.exit(main())
