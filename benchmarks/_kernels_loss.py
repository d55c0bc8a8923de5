"""`kernels_cuda.py`: cross entropy fused with the classifier against F.cross_entropy(F.linear(...).float()), forward and backward.

In bf16. For each case: the ratio of the times, and the ratio of the peak memory in addition to inputs and gradients.
`python benchmarks/_kernels_loss.py` prints them for several chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from _measure import has_device, interleaved
from torch import Tensor

from colonnade.context.parallel_context import ParallelContext
from colonnade.nn.layer import LinearCrossEntropyLoss, Whole

CASES = {"32k": (16_384, 2_048, 32_000), "128k": (8_192, 4_096, 128_256)}
"""Tokens, hidden size, vocabulary."""


GOALS = {"time": 1.0, "memory": 0.25}


def measure() -> tuple[dict[str, float], dict[str, float], dict[str, dict[str, float]]]:
    """Ratios, goals, and the times and bytes that the ratios are of."""
    found = {case: measure_case(case) for case in CASES}
    ratios = {f"{case} {kind}": values[kind] for case, values in found.items() for kind in GOALS}
    return ratios, {f"{case} {kind}": goal for case in CASES for kind, goal in GOALS.items()}, found


def measure_case(case: str, chunk: int = 2048, rounds: int = 7) -> dict[str, float]:
    """Measure one case; returns the ratios of time and memory to torch, and milliseconds and megabytes of both."""
    tokens, hidden, vocabulary = CASES[case]
    x, weight = (
        (0.02 * torch.randn(rows, hidden, device="cuda")).bfloat16().requires_grad_() for rows in (tokens, vocabulary)
    )
    labels = torch.randint(0, vocabulary, (tokens,), device="cuda")
    ours = LinearCrossEntropyLoss(chunk=chunk, arrangement=Whole(ParallelContext()))
    losses: dict[str, Callable[[], Tensor]] = {
        "ours": lambda: ours(x, weight, labels),
        "torch": lambda: F.cross_entropy(F.linear(x, weight).float(), labels),
    }

    def once(loss: Callable[[], Tensor]) -> None:
        x.grad = weight.grad = None
        loss().backward()

    passes = {name: partial(once, loss) for name, loss in losses.items()}
    seconds = interleaved(passes, rounds, "cuda")
    peaks = {name: _peak(run) for name, run in passes.items()}
    found = {"time": seconds["ours"] / seconds["torch"], "memory": peaks["ours"] / peaks["torch"]}
    return (
        found
        | {f"{name} ms": 1e3 * value for name, value in seconds.items()}
        | {f"{name} MB": value / 2**20 for name, value in peaks.items()}
    )


def _peak(run: Callable[[], None]) -> int:
    """Bytes at the peak of a pass above those that were there before; the gradients that it leaves are among them."""
    run()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def main() -> None:
    if has_device("cuda"):
        for case in CASES:
            for chunk in (1024, 2048, 4096, 8192):
                found = measure_case(case, chunk)
                print(case, chunk, {name: round(value, 3) for name, value in found.items()}, flush=True)


if __name__ == "__main__":
    main()
