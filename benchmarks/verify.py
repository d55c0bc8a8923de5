"""How long `colonnade verify` takes by command on two ranks: a model of two layers, and MLPs of 12.6 M and 50 M
parameters.

`python benchmarks/verify.py --json` prints one object last. `ratios` has, for each script, the seconds over the seconds that it
may take on two idle cores, and for the largest one the peak memory of the largest process over 3 GB. `cpu` has the CPU seconds of
all processes, which also count on a machine that has other work. A run that differs from a single process fails.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _measure import report

SCRIPT = """
import sys

import torch
from torch import nn

import colonnade

width, layers = int(sys.argv[1]), int(sys.argv[2])
gpc = colonnade.launch({"clip_grad_norm": 1.0}, verbose=False)
torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
engine, *_ = colonnade.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-4), nn.MSELoss())
draw = torch.Generator().manual_seed(gpc.get_global_rank())
for _ in range(3):
    x = torch.randn(8, width, generator=draw)
    engine.zero_grad()
    engine.backward(engine.criterion(engine(x), x))
    engine.step()
"""
CASES = {"tiny": ((16, 2), 6.0), "12.6 M": ((1024, 12), 10.0), "50 M": ((2048, 12), 20.0)}
MEMORY = 3e9


def measured(width: int, layers: int) -> dict[str, Any]:
    """Wall and CPU seconds of one verification, the peak memory of its largest process in bytes, and its exit code."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        script.write_text(SCRIPT)
        command = [
            sys.executable,
            "-m",
            "colonnade.cli",
            "verify",
            "--nproc",
            "2",
            str(script),
            str(width),
            str(layers),
        ]
        began = time.monotonic()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert process.stdout is not None
        said = process.stdout.read()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.monotonic() - began
    sys.stderr.write(said if process.returncode else "".join(line for line in said.splitlines(True) if " ... " in line))
    return {
        "seconds": round(seconds, 1),
        "cpu": round(used.ru_utime + used.ru_stime, 1),
        "peak": used.ru_maxrss * 1024,
        "exit code": process.returncode,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--cases", nargs="*", choices=list(CASES), default=list(CASES))
    arguments = parser.parse_args()
    found = {name: measured(*CASES[name][0]) for name in arguments.cases}
    ratios = {name: one["seconds"] / CASES[name][1] for name, one in found.items()}
    if "50 M" in found:
        ratios["memory of 50 M"] = found["50 M"]["peak"] / MEMORY
    met = report(ratios, dict.fromkeys(ratios, 1.0), arguments.json, measured=found)
    return 0 if met and not any(one["exit code"] for one in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
