"""The kernels of attention, of experts and of the loss on a GPU, against torch's own by hand, and between NCCL ranks that share it.

`python benchmarks/kernels_cuda.py --json` prints one object last, with `ratios` (lower is better) and `goals`; see
`_kernels_attention.py`, `_kernels_experts.py` and `_kernels_loss.py`. `--only` chooses among them.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import Any

from _measure import has_device, report

PARTS = ("attention", "experts", "loss")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    parser.add_argument("--only", default=",".join(PARTS), help=f"parts, of {','.join(PARTS)}")
    options = parser.parse_args()
    parts = options.only.split(",")
    if not set(parts) <= set(PARTS):
        parser.error(f"--only {options.only}: parts are {', '.join(PARTS)}")
    if not has_device("cuda"):
        return 0
    ratios: dict[str, float] = {}
    goals: dict[str, float] = {}
    details: dict[str, Any] = {}
    for part in parts:  # what is not asked for is not imported
        found, wanted, more = importlib.import_module(f"_kernels_{part}").measure()
        ratios |= {f"{part}/{name}": ratio for name, ratio in found.items()}
        goals |= {f"{part}/{name}": goal for name, goal in wanted.items()}
        details[part] = more
    return 0 if report(ratios, goals, options.json, details=details) else 1


if __name__ == "__main__":
    sys.exit(main())
