"""A plan beside the run on one GPU: peak memory and step time of four configurations of one model.

python benchmarks/plan_cuda.py --json     # on a machine with a GPU; measures the machine first
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch

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

    found = observe(engine, step, warm=5, timed=20)
    engine.close()
    global_context.destroy()
    return found.memory, found.seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    machine = measure_machine(1)
    rows = []
    for name, config in CONFIGS.items():
        made = plan(load_config({**config, "compile": None}), 1, machine, JOB)
        (memory, seconds), *_ = run_world(1, real, config, backend=None, timeout=600).values
        rows.append(
            {
                "config": name,
                "memory": memory,
                "planned memory": made.totals.peak_memory,
                "memory ratio": made.totals.peak_memory / memory,
                "seconds": seconds,
                "planned seconds": made.totals.step_seconds,
                "time ratio": made.totals.step_seconds / seconds,
            }
        )
    if options.json:
        print(json.dumps({"hardware": machine.name, "rows": rows}))
        return
    for row in rows:
        print(row)


if __name__ == "__main__":
    main()
