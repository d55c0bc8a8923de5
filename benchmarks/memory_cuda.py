"""Memory of the engine on a GPU, against a loop by hand: at rest after a step, at the peak of a step, and left at the end.

A GPT of 0.88 G parameters in a world of one (bf16 autocast, clipped, fused AdamW) against the same with torch alone, and one
of 118 M on two ranks that share the GPU against DDP with `gradient_as_bucket_view`. Every contestant has a process of
its own in which Python's garbage collector is off. `left` is what stays allocated after `engine.close()` and `del`, in parts
of the other's memory at rest: nothing should. `start_up` is the peak of `initialize`, in parts of the parameters and one
bucket of 100 MB. `bytes` has all figures, of the rank that has most.
`python benchmarks/memory_cuda.py --json` prints one object last.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _measure import has_device, report
from _models import GPT
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from colonnade import initialize, launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.testing import run_world

SIZES = {
    "0.88G": {"vocabulary": 18432, "width": 2048, "layers": 16, "length": 512},
    "118M": {"vocabulary": 21504, "width": 768, "layers": 12, "length": 512},
}
CASES: dict[str, tuple[str, int, str]] = {
    "0.88G alone": ("0.88G", 1, "by hand"),
    "118M on 2 ranks": ("118M", 2, "ddp"),
}
"""The size of the model, the ranks, and whom the engine is beside."""
GOALS = {"start_up": 1.0, "at_rest": 1.02, "peak": 1.02, "left": 0.0}
BUCKET = 100 * 2**20
ROWS, STEPS, MAX_NORM, LR = 4, 4, 1.0, 1e-4

Step = Callable[[], None]


def by_engine(model: GPT, tokens: Tensor, context: ParallelContext) -> tuple[Step, Step]:
    """A step, and what is called at the end."""
    engine, *_ = initialize(model, lambda held: torch.optim.AdamW(held, lr=LR, fused=True), context=context)

    def step() -> None:
        engine.zero_grad()
        engine.backward(loss_of(engine, tokens))
        engine.step()

    return step, engine.close


def by_torch(model: GPT, tokens: Tensor) -> tuple[Step, Step]:
    """The same by hand: over DDP where there are ranks."""
    wrapped: Any = model
    if dist.is_initialized():
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=LR, fused=True)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = loss_of(wrapped, tokens)
        loss.backward()
        clip_grad_norm_(wrapped.parameters(), MAX_NORM)
        optimizer.step()

    return step, lambda: None


def loss_of(model: Callable[[Tensor], Tensor], tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())


def measured(size: dict[str, int], contestant: str) -> dict[str, int]:
    """On a rank: bytes that torch's allocator has given out, beyond those before the model was made."""
    gc.collect()
    gc.disable()
    tokens = torch.randint(0, size["vocabulary"], (ROWS, size["length"]), device="cuda")
    config = {"clip_grad_norm": MAX_NORM, "bf16": True}
    context = launch(config, context=ParallelContext(), verbose=False) if contestant == "engine" else None
    start = allocated()
    found = _life(size, tokens, context)
    found["left"] = allocated()
    gc.collect()
    found["left_after_gc"] = allocated()
    return {name: value if name == "parameters" else value - start for name, value in found.items()}


def _life(size: dict[str, int], tokens: Tensor, context: ParallelContext | None) -> dict[str, int]:
    """From the model to its end: when this returns, nobody names any of it."""
    torch.manual_seed(0)
    model = GPT(**size).cuda()
    torch.cuda.reset_peak_memory_stats()
    step, close = by_torch(model, tokens) if context is None else by_engine(model, tokens, context)
    start_up = torch.cuda.max_memory_allocated()
    for _ in range(STEPS):
        step()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    found = {"parameters": parameters, "start_up": start_up, "at_rest": allocated()}
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    found |= {"peak": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.memory_reserved()}
    close()
    return found


def allocated() -> int:
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()  # matrix products keep one; it belongs to no contestant
    return torch.cuda.memory_allocated()


def measure(case: str) -> dict[str, dict[str, int]]:
    """The figures of both contestants, of the rank that has most."""
    size, ranks, against = CASES[case]
    worlds = {}
    for contestant in ("engine", against):
        options = {"timeout": 120, "backend": "nccl" if ranks > 1 else None, "env": {"TORCH_DISTRIBUTED_DEBUG": "OFF"}}
        found = run_world(ranks, measured, SIZES[size], contestant, **options).values  # type: ignore[arg-type]
        worlds[contestant] = {name: max(answer[name] for answer in found) for name in found[0]}
        print(case, contestant, {name: f"{value:,}" for name, value in worlds[contestant].items()}, flush=True)
    return worlds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    options = parser.parse_args()
    if not has_device("cuda"):
        return 0
    ratios, goals, counted = {}, {}, {}
    for case in options.cases:
        counted[case] = measure(case)
        ours, theirs = counted[case].values()
        ratios[f"{case}/start_up"] = ours["start_up"] / (ours["parameters"] * 4 + BUCKET)
        ratios[f"{case}/at_rest"] = ours["at_rest"] / theirs["at_rest"]
        ratios[f"{case}/peak"] = ours["peak"] / theirs["peak"]
        ratios[f"{case}/left"] = ours["left"] / theirs["at_rest"]
        goals |= {f"{case}/{figure}": goal for figure, goal in GOALS.items()}
    return 0 if report(ratios, goals, options.json, bytes=counted, device=torch.cuda.get_device_name()) else 1


if __name__ == "__main__":
    sys.exit(main())
