"""The grid: models under mixes of modes, each trained for three steps beside one process.

`python -m tests.models.grid` runs all of it and prints the table that stands in the documents.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from colonnade._launch import launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.models import GPT, MoEGPT, ViT
from colonnade.parallel.split import split
from colonnade.testing import run_world
from tests.nn.sequence.training import RTOL, numbers, train

VOCABULARY, LENGTH, HIDDEN, HEADS, LAYERS, ROWS, MICRO_BATCHES = 16, 8, 16, 4, 2, 4, 2

MODELS: dict[str, Callable[..., nn.Module]] = {
    "GPT, tied": lambda **options: GPT(VOCABULARY, LENGTH, HIDDEN, HEADS, LAYERS, **options),
    "GPT": lambda **options: GPT(VOCABULARY, LENGTH, HIDDEN, HEADS, LAYERS, tied=False, **options),
    "MoE-GPT": lambda **options: MoEGPT(
        VOCABULARY, LENGTH, HIDDEN, HEADS, LAYERS, 4, router={"z_loss": 0.01}, **options
    ),
    "ViT": lambda **options: ViT(8, 2, HIDDEN, HEADS, LAYERS, 8, **options),
}


class Case(NamedTuple):
    """A model on so many ranks."""

    model: str
    parallel: dict[str, Any]
    ranks: int
    options: dict[str, Any] = {}

    def __str__(self) -> str:
        sizes = [f"{name} {_size(value)}" for name, value in self.parallel.items()]
        return f"{self.model}: {' x '.join(sizes)}{''.join(f', {value}' for value in self.options.values())}"


def _size(value: Any) -> str:
    if not isinstance(value, dict):
        return str(value)
    more = " ".join(f"{key}={it}" for key, it in value.items() if key not in ("size", "mode"))
    return " ".join(text for text in (str(value["size"]), value.get("mode", ""), more) if text)


def _tensor(size: int, mode: str, **more: Any) -> dict[str, Any]:
    return {"tensor": {"size": size, "mode": mode, **more}}


TENSOR = [
    (_tensor(2, "1d"), 2),
    (_tensor(4, "1d"), 4),
    (_tensor(2, "1d", sequence_split=True), 2),
    (_tensor(4, "2d"), 4),
    (_tensor(4, "2.5d", depth=1), 4),
    (_tensor(8, "2.5d", depth=2), 8),
    (_tensor(8, "3d"), 8),
]
GRID = [
    *(Case(model, parallel, ranks) for model in ("GPT, tied", "GPT", "ViT") for parallel, ranks in TENSOR),
    *(Case("GPT", {"sequence": size}, size, {"over": over}) for size in (2, 4) for over in ("ring", "ulysses")),
    *(Case("GPT, tied", {"sequence": 2, "data": 2}, 4, {"over": over}) for over in ("ring", "ulysses")),
    Case("GPT, tied", {"sequence": 2, **_tensor(2, "1d")}, 4),
    Case("GPT, tied", {"sequence": 2, **_tensor(4, "2d")}, 8),
    Case("ViT", {"sequence": 2}, 2),
    Case("MoE-GPT", {"expert": 2}, 2),
    Case("MoE-GPT", {"expert": 2}, 4),
    Case("MoE-GPT", {"expert": 4}, 4),
    Case("MoE-GPT", {"expert": 2, **_tensor(2, "1d")}, 4),
    Case("MoE-GPT", {"expert": 2, **_tensor(2, "1d", sequence_split=True)}, 4),
    Case("MoE-GPT", {"expert": {"size": 4, "over": "data*tensor"}, **_tensor(2, "1d")}, 4),
    Case("MoE-GPT", {"expert": 2, "pipeline": 2}, 4),
    Case("MoE-GPT", {"expert": 2, "sequence": 2}, 4),
    Case("GPT, tied", {"pipeline": 2}, 2),
    Case("GPT, tied", {"data": 2, "pipeline": 2, **_tensor(2, "1d")}, 8),
    Case("GPT", {"data": 2, "pipeline": 2, **_tensor(2, "1d")}, 8),
    Case("GPT, tied", {"pipeline": 2, **_tensor(4, "2d")}, 8),
    Case("ViT", {"data": 2, "pipeline": 2, **_tensor(2, "1d")}, 8),
    Case("MoE-GPT", {"data": 2, "expert": 2, **_tensor(2, "1d"), "pipeline": 2}, 8),
    Case("MoE-GPT", {"data": 2, "expert": 2, **_tensor(4, "2d")}, 8),
    Case("GPT, tied", {"sequence": 2, "data": 2, "pipeline": 2}, 8),
    Case("MoE-GPT", {"sequence": 2, "expert": 2, "pipeline": 2}, 8),
]


def batch(model: str, part: int, step: int) -> tuple[Tensor, Tensor]:
    seed = 100 * step + part
    draw = torch.Generator().manual_seed(seed)
    if model == "ViT":
        return numbers(ROWS, 3, 8, 8, seed=seed), torch.randint(0, 8, (ROWS,), generator=draw)
    tokens = torch.randint(0, VOCABULARY, (ROWS, LENGTH + 1), generator=draw)
    return tokens[:, :-1], tokens[:, 1:]


def trained(case: Case, zero: Any = 0) -> None:
    """On each rank: three steps of the case and of one process; raises where they differ."""
    piped = "pipeline" in case.parallel
    schedule = {"schedule": {"type": "OneFOneB", "num_microbatches": MICRO_BATCHES}} if piped else {}
    config = {"parallel": case.parallel, "clip_grad_norm": 1.0, "zero": zero, **schedule}
    with launch(config, context=ParallelContext(), verbose=False) as gpc:
        whole = MODELS[case.model](**case.options, context=gpc).double()
        plain = MODELS[case.model](context=ParallelContext()).double().to(gpc.device)
        losses: list[Tensor] = []

        def run(engine: Any, step: int) -> None:
            mine = batch(case.model, gpc.get_local_rank(ParallelMode.DATA), step)
            loss = engine.execute_schedule(iter([mine]), return_output_label=False)[2]
            mean = loss.double() / gpc.world_size
            dist.all_reduce(mean)
            losses.append(mean)

        def loss_of(plain: nn.Module, step: int) -> Tensor:
            parts = [batch(case.model, part, step) for part in range(gpc.data_parallel_size)]
            loss = torch.zeros((), device=gpc.device)
            for micro in range(MICRO_BATCHES if piped else 1):
                # A micro-batch of all data ranks is one batch: that is what its auxiliary loss is taken over.
                rows = slice(micro * 2, micro * 2 + 2) if piped else slice(None)
                x, y = (torch.cat([column[rows] for column in columns]) for columns in zip(*parts, strict=True))
                out = plain(x)
                outputs = out if isinstance(out, tuple) else (out,)
                loss = loss + plain.criterion()(*outputs, y) / (MICRO_BATCHES if piped else 1)
            assert abs(losses[-1].item() - loss.item()) <= RTOL * abs(loss.item()), (losses[-1], loss)
            return loss

        model = split(whole, num_stages=gpc.pipeline_parallel_size) if piped else whole
        train(gpc, model, plain, run, loss_of, criterion=whole.criterion())


def main() -> int:
    failed = 0
    print("| model | mix | ranks | equal to one process |\n|---|---|---|---|")
    for case in GRID:
        begin = time.monotonic()
        result = run_world(case.ranks, trained, case, timeout=100, check=False)
        failed += not result.ok
        model, mix = str(case).split(": ", 1)
        print(f"| {model} | {mix} | {case.ranks} | {'yes' if result.ok else 'NO'} |", flush=True)
        print(f"{time.monotonic() - begin:.1f} s", file=sys.stderr)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
