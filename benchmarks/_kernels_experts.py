"""Experts on a GPU in bf16, forward and backward, against the same by hand with torch's grouped_mm.

Experts alone on rows that are sorted already; the whole layer against its experts alone; and the layer on 2 and 4 NCCL
ranks that share the GPU (under CUDA MPS) against one by hand with all_to_all_single. Times are those of CUDA events
around a few passes in a row; contestants take turns, and the median counts, between ranks that of the slowest.
`python benchmarks/_kernels_experts.py --json` runs this alone.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from _layers_moe import HandWritten
from _measure import has_device, interleave, report
from torch import Tensor
from torch.nn import functional as F

from colonnade import launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.nn.moe import Experts, MoE, TopKRouter
from colonnade.testing import cuda_mps, run_world

HIDDEN, CHOICES = 2048, 8
CASES = {"64 x 1408": (64, 1408, 65536), "128 x 768": (128, 768, 65536), "8 x 8192": (8, 8192, 16384)}
"""Experts, inner width, rows."""
LAYER = "64 x 1408"
TOKENS_OF_A_RANK = 2048
GOAL, LAYER_GOAL = 1.05, 1.25
_PASSES, _ROUNDS, _WARM_UP = 4, 15, 3

Pass = Callable[[], None]


def measure(
    cases: Sequence[str] = tuple(CASES), ranks: Sequence[int] = (2, 4)
) -> tuple[dict[str, float], dict[str, float], dict[str, Any]]:
    """Measure all cases; returns (ratios, goals, time of each candidate in milliseconds)."""
    ratios: dict[str, float] = {}
    times: dict[str, dict[str, float]] = {}
    for name in cases:
        times[name] = found = _milliseconds(_on_one(name))
        ratios[name] = found["experts"] / found["by hand"]
        print(name, {contestant: f"{ms:.3f} ms" for contestant, ms in found.items()}, flush=True)
        if "layer" in found:
            ratios[f"layer, {name}"] = found["layer"] / found["experts"]
        torch.cuda.empty_cache()
    with cuda_mps():
        for size in ranks:
            options: Any = {"timeout": 150, "backend": "nccl", "env": {"TORCH_DISTRIBUTED_DEBUG": "OFF"}}
            everyone = run_world(size, _on_rank, **options).values
            blocks = {name: zip(*(rank[name] for rank in everyone), strict=True) for name in everyone[0]}
            found = {name: statistics.median(map(max, block)) for name, block in blocks.items()}
            times[f"{size} ranks"] = found
            print(size, "ranks", {contestant: f"{ms:.3f} ms" for contestant, ms in found.items()}, flush=True)
            ratios[f"layer on {size} ranks"] = found["layer"] / found["by hand"]
    goals = {name: LAYER_GOAL if name.startswith("layer, ") else GOAL for name in ratios}
    return ratios, goals, {case: {name: round(ms, 3) for name, ms in each.items()} for case, each in times.items()}


def _on_one(name: str) -> dict[str, Pass]:
    """The contestants of one process: experts, the same by hand, and for one case the whole layer."""
    experts, inner, rows = CASES[name]
    torch.manual_seed(0)
    # Not equally many for each expert, and whatever number of them.
    counts = torch.multinomial(torch.rand(experts) + 0.5, rows, replacement=True).bincount(minlength=experts).cuda()
    with torch.device("cuda"):
        ours = Experts(HIDDEN, inner, experts, activation=F.silu, gated=True, bias=False, context=ParallelContext())
    ours = ours.bfloat16()
    assert ours.gate is not None
    weights = [weight.detach().clone().requires_grad_() for weight in (ours.up, ours.gate, ours.down)]

    def by_hand(x: Tensor) -> Tensor:
        up, gate, down = weights
        ends = counts.cumsum(0, dtype=torch.int32)
        inside = F.silu(F.grouped_mm(x, gate, offs=ends)) * F.grouped_mm(x, up, offs=ends)
        return F.grouped_mm(inside, down, offs=ends)

    passes = {
        "experts": _passes(lambda x: ours(x, counts), rows, list(ours.parameters())),
        "by hand": _passes(by_hand, rows, weights),
    }
    if name == LAYER:
        router = TopKRouter(HIDDEN, experts, CHOICES, context=ParallelContext()).cuda()
        layer = MoE(HIDDEN, ours, router, context=ParallelContext())
        passes["layer"] = _passes(layer, rows // CHOICES, list(layer.parameters()))
    return passes


def _passes(run: Callable[[Tensor], Any], rows: int, parameters: list[Any]) -> Pass:
    """Forward and backward, gradients of the input included."""
    x = torch.randn(rows, HIDDEN, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.randn_like(x)

    def once() -> None:
        for each in (x, *parameters):
            each.grad = None
        run(x).backward(gradient)

    return once


def _milliseconds(passes: dict[str, Pass]) -> dict[str, float]:
    turns = {name: lambda once=once: _timed(once) for name, once in passes.items()}
    interleave(turns, _WARM_UP)
    return interleave(turns, _ROUNDS)


def _timed(once: Pass, passes: int = _PASSES) -> float:
    """Time of one pass in milliseconds, measured over several passes in a row."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(passes):
        once()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / passes


def _on_rank() -> dict[str, list[float]]:
    """On a rank: measure each candidate in turns, in milliseconds."""
    experts, inner, _ = CASES[LAYER]
    ranks = dist.get_world_size()
    context = launch({"parallel": {"expert": ranks}}, context=ParallelContext(), verbose=False)
    torch.manual_seed(0)
    router = TopKRouter(HIDDEN, experts, CHOICES, balance_loss=0.0, context=context).cuda()
    options: Any = {"inner": inner, "activation": F.silu, "gated": True, "bias": False}
    with torch.device("cuda"):
        layer = MoE(HIDDEN, experts, router, context=context, **options)
        hand = HandWritten(ranks, HIDDEN, inner, experts, CHOICES, gated=True).bfloat16()
    layer.experts.bfloat16()
    passes = {
        "layer": _passes(layer, TOKENS_OF_A_RANK, list(layer.parameters())),
        "by hand": _passes(hand, TOKENS_OF_A_RANK, list(hand.parameters())),
    }
    times: dict[str, list[float]] = {name: [] for name in passes}
    for turn in range(_WARM_UP + _ROUNDS // 2):
        for name in list(passes)[:: 1 if turn % 2 else -1]:
            dist.barrier()
            torch.cuda.synchronize()
            times[name].append(_timed(passes[name], 2))
    return {name: values[_WARM_UP:] for name, values in times.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    parser.add_argument("--cases", nargs="*", choices=list(CASES), default=list(CASES), help="in one process")
    parser.add_argument("--ranks", nargs="*", type=int, default=[2, 4], help="sizes of the worlds")
    options = parser.parse_args()
    if not has_device("cuda"):
        return 0
    ratios, goals, times = measure(options.cases, options.ranks)
    return 0 if report(ratios, goals, options.json, milliseconds=times) else 1


if __name__ == "__main__":
    sys.exit(main())
