"""Training steps on several ranks as users run them, against the ways torch offers: the engine's loop and DDP's.

`python benchmarks/step.py` measures two gloo ranks: zero_grad, forward, backward, synchronise, fused AdamW. With `--json` it
prints one object last: `ratios` of Colonnade's time to that of the best DDP variant of the same run, per model and
transport, the peak of extra memory in buckets, and the `goals`. `--device cuda` measures clipped steps, and ZeRO, over NCCL
between ranks that share one GPU; see `_step_cuda.py`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _measure import has_device, interleave, report
from _models import GPT
from _step_cuda import CUDA_CASES, MODES, measure_on_cuda
from _worlds import World
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from colonnade import initialize, launch
from colonnade.comm.groups import HEAP_BYTES
from colonnade.context.parallel_context import ParallelContext

RANKS = 2
CASES = ("gpt", "wide", "layers400")
VARIANTS = ("none", "ddp", "ddp_view", "per_parameter", "flatten_copy", "fsdp2", "shm", "gloo")
DDP = ("ddp", "ddp_view")
GOALS = {
    "gpt/shm": 0.92,
    "wide/shm": 0.85,
    "layers400/shm": 0.75,
    "gpt/gloo": 1.00,
    "wide/gloo": 1.00,
    "layers400/gloo": 1.00,
}
LR = 1e-4
_MB = 1 << 20

Step = Callable[[], None]


def build(case: str) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    """A model and its loss on this rank's batch."""
    torch.manual_seed(0)
    if case == "gpt":
        gpt, tokens = GPT(), torch.randint(0, 4096, (4, 64))
        return gpt, lambda m: F.cross_entropy(m(tokens).flatten(0, 1), tokens.flatten())
    width, depth, batch = (32, 400, 32) if case == "layers400" else (2048, 3, 64)
    x = torch.randn(batch, width)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(depth))), lambda m: m(x).square().mean()


def per_parameter(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        parameter.grad.div_(RANKS)


def flatten_copy(model: nn.Module) -> None:
    """The ancestor's way: flatten, divide, sum, copy back."""
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    flat = torch._utils._flatten_dense_tensors(grads).div_(RANKS)
    dist.all_reduce(flat)
    for grad, summed in zip(grads, torch._utils._unflatten_dense_tensors(flat, grads), strict=True):
        grad.copy_(summed)


def contestant(model: nn.Module, loss: Callable[[nn.Module], Tensor], variant: str) -> tuple[Step, int]:
    """One step of the variant, which has taken its first; and the bytes it holds that torch's allocator does not know."""
    if variant in ("shm", "gloo"):
        context = launch({"sync": {"shared_memory": variant == "shm"}}, context=ParallelContext(), verbose=False)
        engine, *_ = initialize(model, adamw(model), context=context)

        def ours() -> None:
            engine.zero_grad()
            engine.backward(loss(engine))
            engine.step()

        ours()
        buckets = engine._sync.synchroniser.buckets
        return ours, sum(bucket.buffer.flat.nbytes for bucket in buckets) if variant == "shm" else 0
    wrapped, after = _torch_way(model, variant)
    optimizer = adamw(wrapped)

    def theirs() -> None:
        optimizer.zero_grad(set_to_none=variant != "none_kept")
        loss(wrapped).backward()
        after(model)
        optimizer.step()

    theirs()
    return theirs, 0


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LR, fused=True)


def _torch_way(model: nn.Module, variant: str) -> tuple[nn.Module, Callable[[nn.Module], None]]:
    def nothing(_: nn.Module) -> None: ...

    if variant == "ddp":
        return DistributedDataParallel(model), nothing
    if variant == "ddp_view":
        return DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True), nothing
    if variant == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for layer in getattr(model, "blocks", ()):
            fully_shard(layer)
        return fully_shard(model), nothing
    return model, {"per_parameter": per_parameter, "flatten_copy": flatten_copy}.get(variant, nothing)


def serve(case: str, variant: str) -> Callable[[str], Any]:
    """Answers "time" with the seconds of a step, and "memory" with the peak of bytes."""
    if variant.endswith("/memory"):
        return lambda _: peak_bytes(lambda: contestant(*build(case), variant.removesuffix("/memory")))
    step, _ = contestant(*build(case), variant)

    def timed() -> float:
        # Of two steps the second is measured: the first warms the caches that other contestants have used.
        for _ in range(2):
            dist.barrier()
            begin = time.perf_counter()
            step()
            seconds = time.perf_counter() - begin
        return seconds

    for _ in range(3):
        timed()
    return lambda _: timed()


def peak_bytes(make: Callable[[], tuple[Step, int]]) -> int:
    """The most memory at once in four steps, with the making of the model and all else before them."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as profile:
        step, hidden = make()
        for _ in range(3):
            step()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        # The block that teaches the allocator is never touched, so it is no memory.
        peak = max(peak, held) if event.nbytes() != HEAP_BYTES else peak
    return peak + hidden


def time_case(case: str, rounds: int) -> dict[str, float]:
    worlds = {variant: World(RANKS, serve, case, variant) for variant in VARIANTS}
    try:
        for world in worlds.values():
            world.ready()
        turns = {name: (lambda world=world: max(world.ask("time"))) for name, world in worlds.items()}
        return interleave(turns, rounds)
    finally:
        for world in worlds.values():
            world.close()


def memory_case(case: str) -> dict[str, int]:
    """Peak bytes beside what one process has that keeps its gradients, per variant."""
    peaks = {}
    for variant in ("none_kept", "ddp", "ddp_view", "shm", "gloo"):
        world = World(RANKS, serve, case, f"{variant}/memory").ready()
        peaks[variant] = max(world.ask("memory"))
        world.close()
    base = peaks.pop("none_kept")
    return {variant: peak - base for variant, peak in peaks.items()}


def bucket_bytes(transport: str) -> int:
    """What one bucket takes by default: the goal for extra memory."""
    return (4 if transport == "shm" else 8) * _MB


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=30, help="on the CPU")
    parser.add_argument(
        "--cases",
        nargs="+",
        choices=(*CASES, *CUDA_CASES),
        metavar="CASE",
        help=f"{', '.join(CASES)}; on a GPU {', '.join(CUDA_CASES)}",
    )
    parser.add_argument("--no-memory", action="store_true", help="on the CPU: time only")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES, help="on a GPU: with MPS, and without")
    parser.add_argument("--seconds", type=float, default=8.0, help="on a GPU: how long a world measures")
    options = parser.parse_args()
    if not has_device(options.device):
        return 0
    if options.device == "cuda":
        cases = [case for case in options.cases or CUDA_CASES if case in CUDA_CASES]
        return measure_on_cuda(cases, options.modes, options.seconds, options.json)
    return measure_on_cpu(options)


def measure_on_cpu(options: argparse.Namespace) -> int:
    ratios: dict[str, float] = {}
    goals: dict[str, float] = {}
    times, extra = {}, {}
    for case in (case for case in options.cases or CASES if case in CASES):
        times[case] = {name: seconds * 1e3 for name, seconds in time_case(case, options.rounds).items()}
        best = min(times[case][name] for name in DDP)
        print(case, {name: f"{ms:.1f} ms ({ms / best:.3f})" for name, ms in times[case].items()}, flush=True)
        for transport in ("shm", "gloo"):
            ratios[f"{case}/{transport}"] = times[case][transport] / best
            goals[f"{case}/{transport}"] = GOALS[f"{case}/{transport}"]
        if not options.no_memory:
            extra[case] = {name: peak / _MB for name, peak in memory_case(case).items()}
            print(case, "extra memory", {name: f"{mb:.1f} MB" for name, mb in extra[case].items()}, flush=True)
            for transport in ("shm", "gloo"):
                ratios[f"{case}/{transport}/memory"] = extra[case][transport] * _MB / bucket_bytes(transport)
                goals[f"{case}/{transport}/memory"] = 1.0
    rounded = {case: {name: round(ms, 3) for name, ms in row.items()} for case, row in times.items()}
    more = {"medians_ms": rounded, "extra_mb": extra, "rounds": options.rounds}
    return 0 if report(ratios, goals, options.json, **more) else 1


if __name__ == "__main__":
    sys.exit(main())
