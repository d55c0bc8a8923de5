"""`step.py --device cuda`: clipped AdamW steps over NCCL between ranks that share one GPU, in fp32.

The engine against DDP with torch's clip and fused AdamW; ZeRO stages 1 and 2 against DDP with ZeroRedundancyOptimizer,
stage 3 against FSDP2 by hand. All contestants of a case are in the same processes and take turns in blocks of steps;
a block's time is that of the slowest rank until its GPU is done. Once with CUDA MPS, under which the ranks' kernels run
side by side, and once without, where they take turns. Collectives are counted with torch's profiler, in one step.
"""

from __future__ import annotations

import collections
import contextlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _measure import report
from _models import GPT
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from colonnade import initialize, launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.testing import WorldError, cuda_mps, run_world

ROWS, LENGTH, MAX_NORM, LR = 8, 256, 1.0, 1e-4
SIZES = {
    "27M": {"vocabulary": 8192, "width": 512, "layers": 6, "length": LENGTH},
    "118M": {"vocabulary": 21504, "width": 768, "layers": 12, "length": LENGTH},
}
MODES = ("mps", "turns")
ZERO = ("zero1", "zero2", "redundancy", "zero3", "fsdp2")
AGAINST = {"engine": "ddp", "zero1": "redundancy", "zero2": "redundancy", "zero3": "fsdp2"}
CUDA_CASES: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "27M": ("27M", 2, ("engine", "ddp")),
    "118M": ("118M", 2, ("engine", "ddp")),
    "27M-4": ("27M", 4, ("engine", "ddp")),
    "zero-27M": ("27M", 2, ZERO),
    "zero-118M": ("118M", 2, ZERO),
}
"""The size of the model, the ranks, and the contestants."""
GOALS = {
    **{f"{case}/engine/mps": 0.98 for case in ("27M", "118M", "27M-4")},
    **{f"{case}/engine/turns": 1.00 for case in ("27M", "118M", "27M-4")},
    "zero-27M/zero1/mps": 0.80,
    "zero-118M/zero1/mps": 0.75,
    "zero-27M/zero3/mps": 1.00,
    "zero-118M/zero3/mps": 1.00,
}
_WARM_UP = 6

Step = Callable[[], None]


def measure_on_cuda(cases: Sequence[str], modes: Sequence[str], seconds: float, as_json: bool) -> int:
    """One world per case and mode; the ratios, the times of a step, and its collectives."""
    ratios: dict[str, float] = {}
    times, counts, failed = {}, {}, {}
    for mode in modes:
        with cuda_mps() if mode == "mps" else contextlib.nullcontext(True) as served:
            for case in cases if served else ():
                size, ranks, names = CUDA_CASES[case]
                options = {"timeout": 90 + 4 * seconds, "backend": "nccl", "env": {"TORCH_DISTRIBUTED_DEBUG": "OFF"}}
                where = f"{case}/{mode}"
                try:
                    found = run_world(ranks, measured, SIZES[size], names, seconds, **options).values  # type: ignore[arg-type]
                except WorldError as error:  # the other cases are still worth their time
                    failed[where] = str(error)[-2000:]
                    print(where, "failed:", error, flush=True)
                    continue
                medians = slowest(found)
                times[where] = {name: round(1e3 * median, 3) for name, median in medians.items()}
                counts[where] = found[0]["collectives"]
                ratios |= {f"{case}/{a}/{mode}": medians[a] / medians[b] for a, b in AGAINST.items() if a in medians}
                print(where, f"{found[0]['parameters']:,} parameters, {found[0]['rounds']} rounds", flush=True)
                print("  milliseconds of a step", times[where], "\n  collectives of a step", counts[where], flush=True)
    goals = {case: goal for case, goal in GOALS.items() if case in ratios}
    more = {"step_ms": times, "collectives": counts, "failed": failed, "device": torch.cuda.get_device_name()}
    return 0 if report(ratios, goals, as_json, **more) and not failed else 1


def slowest(found: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The median over blocks of the slowest rank's seconds for a step."""
    by_rank = [answer["seconds"] for answer in found]
    return {
        name: statistics.median(max(block) for block in zip(*(times[name] for times in by_rank), strict=True))
        for name in by_rank[0]
    }


# -- on the ranks -----------------------------------------------------------------------------------------


def measured(size: dict[str, int], names: Sequence[str], seconds: float) -> dict[str, Any]:
    """The seconds of a step of each contestant, block by block in turns; and its collectives."""
    torch.manual_seed(dist.get_rank())
    tokens = torch.randint(0, size["vocabulary"], (ROWS, size["length"])).to(device())
    steps: dict[str, Step] = {}
    parameters = 0
    for name in names:
        torch.manual_seed(0)
        model = GPT(**size).to(device())
        parameters = sum(parameter.numel() for parameter in model.parameters())
        steps[name] = CONTESTANTS[name](model, tokens)
    return {**take_turns(steps, seconds), "parameters": parameters}


def take_turns(steps: Mapping[str, Step], seconds: float, block_seconds: float = 0.2) -> dict[str, Any]:
    """The seconds of a step of each contestant, in blocks of steps in turns; and the collectives of one step."""
    blocks: dict[str, Callable[[], float]] = {}
    counts = {}
    for name, step in steps.items():
        for _ in range(_WARM_UP):
            step()
        counts[name] = collectives(step)
        length = int(_agreed(min(20.0, max(1.0, block_seconds / _block(step, 2)))))
        blocks[name] = partial(_block, step, length)
    one = {name: block() for name, block in blocks.items()}
    # `one` has seconds of a step; a block has about block_seconds of them, and a step at least.
    rounds = int(_agreed(min(40.0, max(5.0, seconds / sum(max(block_seconds, value) for value in one.values())))))
    names = list(steps)
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        for name in [*names[turn % len(names) :], *names[: turn % len(names)]]:
            times[name].append(blocks[name]())
    return {"seconds": times, "collectives": counts, "rounds": rounds}


def collectives(step: Step) -> dict[str, int]:
    """How often a step calls each collective."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
        _until_done()
    kinds = (event.name.partition(":") for event in profile.events() or ())
    return dict(collections.Counter(kind for backend, _, kind in kinds if backend in ("nccl", "gloo")))


def _block(step: Step, length: int) -> float:
    """Seconds of a step, of so many in a row, which all ranks begin together."""
    _until_done()
    dist.barrier()
    _until_done()
    begin = time.perf_counter()
    for _ in range(length):
        step()
    _until_done()
    return (time.perf_counter() - begin) / length


def _agreed(value: float) -> float:
    """The least of all ranks' values."""
    shared = torch.tensor(value, device=device(), dtype=torch.float64)
    dist.all_reduce(shared, op=dist.ReduceOp.MIN)
    return shared.item()


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _until_done() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


# -- the contestants --------------------------------------------------------------------------------------


def loss_of(model: Callable[[Tensor], Tensor], tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def by_engine(model: nn.Module, tokens: Tensor, stage: int = 0) -> Step:
    """The engine's loop; ZeRO is a key of the config."""
    config = {"clip_grad_norm": MAX_NORM, **({"zero": stage} if stage else {})}
    context = launch(config, context=ParallelContext(), verbose=False)
    engine, *_ = initialize(model, lambda held: torch.optim.AdamW(held, lr=LR, fused=True), context=context)

    def step() -> None:
        engine.zero_grad()
        engine.backward(loss_of(engine, tokens))
        engine.step()

    return step


def by_torch(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor) -> Step:
    """The same with torch alone, around a model that sums its gradients itself."""

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss_of(model, tokens).backward()
        clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()

    return step


def by_ddp(model: nn.Module, tokens: Tensor) -> Step:
    wrapped = DistributedDataParallel(model, bucket_cap_mb=25, gradient_as_bucket_view=True)
    return by_torch(wrapped, torch.optim.AdamW(wrapped.parameters(), lr=LR, fused=True), tokens)


def by_redundancy(model: nn.Module, tokens: Tensor) -> Step:
    """DDP, and torch's ZeroRedundancyOptimizer at its fastest."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapped = DistributedDataParallel(model, bucket_cap_mb=25, gradient_as_bucket_view=True)
    kind, held = torch.optim.AdamW, wrapped.parameters()
    optimizer = ZeroRedundancyOptimizer(held, kind, parameters_as_bucket_view=True, lr=LR, fused=True)
    return by_torch(wrapped, optimizer, tokens)


def by_fsdp(model: nn.Module, tokens: Tensor) -> Step:
    """FSDP2 by hand: each block, then the rest."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return by_torch(model, torch.optim.AdamW(model.parameters(), lr=LR, fused=True), tokens)


CONTESTANTS: dict[str, Callable[[nn.Module, Tensor], Step]] = {
    "engine": by_engine,
    "ddp": by_ddp,
    "zero1": lambda model, tokens: by_engine(model, tokens, 1),
    "zero2": lambda model, tokens: by_engine(model, tokens, 2),
    "zero3": lambda model, tokens: by_engine(model, tokens, 3),
    "redundancy": by_redundancy,
    "fsdp2": by_fsdp,
}
