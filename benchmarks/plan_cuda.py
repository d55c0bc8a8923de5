"""A plan beside the run on one GPU: peak memory and step time of four configurations of one model.

A ratio is how far the plan is off, in parts of what was measured, above or below: 0.05 is 5%. The machine is measured first, as by
`colonnade plan --measure`. `python benchmarks/plan_cuda.py --json` prints one object last, with all figures.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from typing import Any

import torch
from _measure import has_device, report

import colonnade
from colonnade.config import load_config
from colonnade.core import global_context
from colonnade.models import GPT
from colonnade.planner.job import Job
from colonnade.planner.measure import measure_machine
from colonnade.planner.observe import observe
from colonnade.planner.plan import plan
from colonnade.testing import run_world

ROWS, LENGTH, VOCABULARY = 8, 1024, 50304
CONFIGS: dict[str, dict[str, Any]] = {
    "bf16": dict(bf16=True),
    "bf16, checkpointed": dict(bf16=True, activation_checkpoint="full"),
    "bf16, compiled": dict(bf16=True, compile=True),
    "bf16, compiled, checkpointed": dict(bf16=True, compile=True, activation_checkpoint="full"),
}
GOALS = {"memory": 0.05, "step": 0.10}


def build() -> Any:
    return GPT(VOCABULARY, LENGTH, 1024, 16, 24, tied=True)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.arange(ROWS * (LENGTH + 1)).view(ROWS, -1) % VOCABULARY
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


JOB = Job(build, batch, optimizer=torch.optim.AdamW)


def real(config: dict[str, Any]) -> tuple[int, float]:
    """(bytes of the peak, seconds of a step) on this GPU."""
    colonnade.launch(config, verbose=False)
    model = build()
    engine, *_ = colonnade.initialize(model, torch.optim.AdamW, model.criterion(), verbose=False)
    data = tuple(tensor.to(engine.context.device) for tensor in batch())

    def step() -> None:
        engine.zero_grad()
        engine.execute_schedule(iter([data]))
        engine.step()

    found = observe(engine, step, warm=5, timed=20, counted=False)
    engine.close()
    global_context.destroy()
    return found.memory, found.seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if not has_device("cuda"):
        return 0
    machine = measure_machine(1)
    ratios, figures = {}, {}
    for name, config in CONFIGS.items():
        made = plan(load_config(config), 1, machine, JOB).totals
        (memory, seconds), *_ = run_world(1, real, config, backend=None, timeout=600).values
        figures[name] = {
            "bytes": memory,
            "planned bytes": made.peak_memory,
            "seconds": seconds,
            "planned seconds": made.step_seconds,
        }
        ratios[f"{name}: memory"] = abs(made.peak_memory / memory - 1)
        ratios[f"{name}: step"] = abs(made.step_seconds / seconds - 1)
    goals = {case: GOALS[case.rpartition(": ")[2]] for case in ratios}
    return 0 if report(ratios, goals, options.json, figures=figures, hardware=asdict(machine)) else 1


if __name__ == "__main__":
    sys.exit(main())
