"""What activation checkpointing saves and costs: a GPT of 0.88 G parameters, bf16 weights, forward and backward of 8 x 2,048 tokens.

`python benchmarks/_memory_activations.py` prints a line per setting: the time of a pass, and the bytes at its peak beyond the weights and their
gradients, each in parts of what it is without.
"""

from __future__ import annotations

from typing import Any

import torch
from _measure import has_device, interleaved

from colonnade.config.settings import ActivationSettings
from colonnade.context.parallel_context import ParallelContext
from colonnade.engine.activations import apply_activations, release_blocks
from colonnade.models import GPT

SETTINGS: dict[str, dict[str, Any]] = {
    "none": {"mode": "none"},
    "every 2": {"mode": "full", "every": 2},
    "selective": {"mode": "selective"},
    "full": {"mode": "full"},
    "offload": {"offload": True},
    "full, offload": {"mode": "full", "offload": True},
}


def main() -> None:
    if not has_device("cuda"):
        return
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = GPT(18_432, 2_048, 2_048, 16, 16, fused_loss=True, context=ParallelContext()).bfloat16()
    criterion, tokens = model.criterion(), torch.randint(0, 18_432, (8, 2_048), device="cuda")
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    peaks: dict[str, int] = {}

    def one(name: str) -> None:
        apply_activations(model, ActivationSettings.read(SETTINGS[name]), [model])
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        criterion(*model(tokens), tokens).backward()
        torch.cuda.synchronize()
        peaks[name] = torch.cuda.max_memory_allocated() - before
        release_blocks(model)

    cases = {name: (lambda name=name: one(name)) for name in SETTINGS}
    seconds = interleaved(cases, 3, "cuda")
    for name in SETTINGS:
        time, memory = seconds[name] / seconds["none"], peaks[name] / peaks["none"]
        print(
            f"{name:16s} time {time:5.2f} ({1e3 * seconds[name]:.0f} ms)  memory {memory:5.2f} ({peaks[name] / 2**20:,.0f} MB)"
        )


if __name__ == "__main__":
    main()
