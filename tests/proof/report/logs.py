"""Logs of runs for the tests of the report, as a JsonlHook writes them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from colonnade.comm.waits import PHASES

FACTS = {
    "time": 1.7e9,
    "colonnade": "0.1.0",
    "torch": "2.13.0",
    "device": "cpu",
    "world_size": 4,
    "layout": {"data": 2, "pipeline": 2},
    "schedule": "OneFOneB",
    "accumulation": 1,
    "parameters": 1234,
    "memory": {"parameters": 4936, "gradients": 4936, "state": 9872},
    "clip": 1.0,
    "config": {"clip_grad_norm": 1.0, "NAME": "<b>mine</b>"},
    "ledger": [
        {
            "pattern": "*.weight",
            "count": 2,
            "mode": "DATA",
            "ranks": [0, 2],
            "divisor": 2.0,
            "done_by": "DataParallelGradientHandler",
        }
    ],
    "made_again": 0,
}


def step(number: int, **values: Any) -> dict[str, Any]:
    """A step that takes 0.5 s of which 0.25 s are forward; steps 3, 13, 23, ... are clipped."""
    norm = 2.5 if number % 10 == 3 else 0.5
    line = {
        "kind": "step",
        "step": number,
        "epoch": 0,
        "loss": 3 * math.exp(-number / 50),
        "lr": 1e-3,
        "grad_norm": norm,
    }
    line |= {
        "samples": 8,
        "seconds": 0.5,
        **{f"time/{phase}": 0.25 if phase == "forward" else 0.01 for phase in PHASES},
    }
    line |= {"clipped": 1.0} if norm > 1 else {}
    line |= {f"grad_norm/blocks.{layer}": 0.1 * (layer + 1) for layer in range(12)}
    return {**line, **values}


def write_log(folder: Path, steps: int = 40, more: list[dict[str, Any]] | None = None) -> Path:
    """A run of so many steps, with an evaluation and a reading of memory."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [{"kind": "run", "step": 0, "epoch": 0, **FACTS}, *(step(number) for number in range(1, steps + 1))]
    lines[1]["memory"] = 100.0
    lines += [{"kind": "test", "step": steps, "epoch": 0, "Loss": 1.25}, *(more or [])]
    path = folder / "log.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"kind": "st')
    return path
