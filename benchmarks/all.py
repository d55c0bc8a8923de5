"""Every benchmark, one after another, and one table of all their figures.

`python benchmarks/all.py` takes about fifteen minutes; name some to run only those: `python benchmarks/all.py clip zero`.
A ratio is Colonnade's time to that of what else a person would use, in the same run; below 1 is faster.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

ON_CPU = ("step", "clip", "engine", "trainer", "layers", "zero", "load", "guard", "verify")
ON_CUDA = {
    "clip_cuda": ["clip", "--device", "cuda"],
    "engine_cuda": ["engine_cuda"],
    "host_cuda": ["host_cuda"],
    "peak_cuda": ["peak_cuda"],
    "llama_cuda": ["llama_cuda"],
    "kernels_cuda": ["kernels_cuda"],
    "step_cuda": ["step", "--device", "cuda"],
    "parallel_cuda": ["parallel_cuda"],
    "memory_cuda": ["memory_cuda"],
    "plan_cuda": ["plan_cuda"],
}
COMMANDS = {**{name: [name] for name in ON_CPU}, **ON_CUDA}


def measure(name: str, *options: str) -> dict[str, Any]:
    """The object that a benchmark prints last; a missed goal is a figure like any other."""
    script = Path(__file__).with_name(f"{name}.py")
    ran = subprocess.run([sys.executable, str(script), "--json", *options], capture_output=True, text=True)
    lines = ran.stdout.strip().splitlines()
    if not lines or not lines[-1].startswith("{"):
        raise SystemExit(f"{script.name} gave no figures:\n{ran.stdout}\n{ran.stderr}")
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def rows(name: str, found: dict[str, Any]) -> list[str]:
    """A line per case: ratio, goal, whether it is met."""
    goals = found["goals"]
    return [
        f"{name:12s} {case:34s} {ratio:6.3f}  "
        + (f"{goals[case]:4.2f}  {'met' if ratio <= goals[case] else 'missed'}" if case in goals else "")
        for case, ratio in found["ratios"].items()
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "benchmarks", nargs="*", metavar="NAME", help=f"of {', '.join(COMMANDS)}; else all that can run"
    )
    chosen = parser.parse_args().benchmarks or [*ON_CPU, *(ON_CUDA if torch.cuda.is_available() else ())]
    unknown = sorted(set(chosen) - set(COMMANDS))
    if unknown:
        parser.error(f"no benchmark {', '.join(unknown)}; there are {', '.join(COMMANDS)}")
    print(f"{'benchmark':12s} {'case':34s} {'ratio':>6s}  goal")
    for name in chosen:
        print(*rows(name, measure(*COMMANDS[name])), sep="\n", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
