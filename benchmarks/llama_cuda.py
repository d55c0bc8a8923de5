"""A Llama of 1.2 G parameters on one GPU: the engine against the same model written by hand in torch.

bf16 autocast with fp32 parameters (`--pure`: bf16 parameters), compiled block by block, clipped, AdamW, on both sides. By hand: RMSNorm, rotary positions,
SDPA with grouped queries, SwiGLU, torch.compile of every block and of the classifier with its loss, fused AdamW and
clip_grad_norm_. Steps take turns; times are medians of CUDA events.
`python benchmarks/llama_cuda.py --json` prints one object last: tokens per second of both (`ratios` has theirs over ours), the
share of the GPU's peak and the peak memory of both. `--profile` adds the kernels that take longest.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from _llama_by_hand import EPS, THETA, Plain, Shape
from _measure import has_device, interleave, report, timed_on_gpu
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from colonnade import initialize, launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.models import Llama

SHAPE = Shape(vocabulary=32000, hidden=2048, heads=16, kv_heads=4, inner=5632, layers=24)
LR, MAX_NORM = 1e-4, 1.0
PEAK = 989e12
"""bf16 operations per second of an H100 or H200, dense, as their maker gives it."""
BEGIN = time.monotonic()
GOALS = {"tokens_per_second": 1 / 1.02}

Step = Callable[[], Any]


def by_hand(tokens: Tensor, labels: Tensor, pure: bool = False) -> Step:
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Plain(SHAPE, tokens.size(1))
    if pure:
        turns = model.cos, model.sin
        model.bfloat16()
        model.cos, model.sin = turns
    for module in (*model.blocks, model.head):
        module.compile(fullgraph=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=not pure):
            loss = model(tokens, labels)
        loss.backward()
        clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        return loss.detach()

    return step


def by_engine(tokens: Tensor, labels: Tensor, pure: bool = False, **more: Any) -> tuple[Step, int]:
    torch.manual_seed(0)
    config = {"clip_grad_norm": MAX_NORM, "bf16": {"master_weights": not pure}, "compile": {"fullgraph": True}, **more}
    gpc = launch(config, context=ParallelContext(), verbose=False)
    options: dict[str, Any] = {"kv_heads": SHAPE.kv_heads, "inner": SHAPE.inner, "theta": THETA, "eps": EPS}
    sizes = SHAPE.vocabulary, tokens.size(1), SHAPE.hidden, SHAPE.heads, SHAPE.layers
    with torch.device("cuda"):
        model = Llama(*sizes, **options, context=gpc)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    engine, *_ = initialize(model, optimizer, model.criterion(), context=gpc)

    def step() -> Tensor:
        engine.zero_grad()
        loss = engine.criterion(engine(tokens), labels)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step, sum(parameter.numel() for parameter in model.parameters())


def first_steps(build: Callable[[], Any], count: int = 4) -> tuple[Any, Step, int, list[float]]:
    """What was built, its step, the bytes that it takes at most beside what was there, and its first losses."""
    before = torch.cuda.memory_allocated()
    made = build()
    step = made[0] if isinstance(made, tuple) else made
    losses = [step().item() for _ in range(count)]
    torch.cuda.reset_peak_memory_stats()
    losses.append(step().item())
    print(f"{time.monotonic() - BEGIN:.0f} s: {len(losses)} steps, losses {losses}", flush=True)
    return made, step, torch.cuda.max_memory_allocated() - before, losses


def print_profile(name: str, step: Step) -> None:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        for _ in range(3):
            step()
        torch.cuda.synchronize()
    kernels = [e for e in seen.key_averages() if e.self_device_time_total > 0 and str(e.device_type).endswith("CUDA")]
    kernels.sort(key=lambda event: -event.self_device_time_total)
    total = sum(event.self_device_time_total for event in kernels)
    print(f"{name}: {total / 3e3:.2f} ms of kernels in a step")
    for event in kernels[:24]:
        print(f"  {event.self_device_time_total / 3e3:8.3f} ms {event.count / 3:6.0f} x {event.key[:110]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--pure", action="store_true")
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    if not has_device("cuda"):
        return 0
    drawn = torch.randint(0, SHAPE.vocabulary, (arguments.rows, arguments.length + 1), device="cuda")
    tokens, labels = drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()
    (_, parameters), ours, our_peak, our_losses = first_steps(partial(by_engine, tokens, labels, arguments.pure))
    _, theirs, their_peak, their_losses = first_steps(partial(by_hand, tokens, labels, arguments.pure))
    turns = {"ours": partial(timed_on_gpu, ours), "theirs": partial(timed_on_gpu, theirs)}
    medians = interleave(turns, arguments.rounds)
    if arguments.profile:
        print_profile("ours", ours)
        print_profile("theirs", theirs)
    dist.destroy_process_group()
    operations = SHAPE.flops_per_token(arguments.length) * tokens.numel()
    more = {
        "parameters": parameters,
        "tokens_per_step": tokens.numel(),
        "milliseconds": {name: round(ms, 2) for name, ms in medians.items()},
        "tokens_per_second": {name: round(1e3 * tokens.numel() / ms) for name, ms in medians.items()},
        "share_of_peak": {name: round(operations / (ms * 1e-3) / PEAK, 4) for name, ms in medians.items()},
        "peak_bytes": {"ours": our_peak, "theirs": their_peak},
        "first_losses": {"ours": our_losses, "theirs": their_losses},
        "device": torch.cuda.get_device_name(),
    }
    ratios = {"tokens_per_second": medians["ours"] / medians["theirs"]}
    return 0 if report(ratios, GOALS, arguments.json, **more) else 1


if __name__ == "__main__":
    sys.exit(main())
