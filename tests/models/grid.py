"""The grid: models under combinations of modes, each trained for three steps and compared with a single process.

`python -m tests.models.grid` runs all cases and prints the table of docs/evidence/grid.md.
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
from colonnade.models import GPT, Llama, MoEGPT, ViT
from colonnade.parallel.split import split
from colonnade.testing import run_world
from tests.evidence import stamp
from tests.nn.sequence.training import RTOL, numbers, train

VOCABULARY, LENGTH, HIDDEN, HEADS, LAYERS, ROWS, MICRO_BATCHES = 16, 8, 16, 4, 2, 4, 2

MODELS: dict[str, Callable[..., nn.Module]] = {
    "GPT, tied": lambda **options: GPT(VOCABULARY, LENGTH, HIDDEN, HEADS, LAYERS, **options),
    "GPT": lambda **options: GPT(VOCABULARY, LENGTH, HIDDEN, HEADS, LAYERS, tied=False, **options),
    "MoE-GPT": lambda **options: MoEGPT(
        VOCABULARY, LENGTH, HIDDEN, HEADS, LAYERS, 4, router={"z_loss": 0.01}, **options
    ),
    "ViT": lambda **options: ViT(8, 2, HIDDEN, HEADS, LAYERS, 8, **options),
    "Llama": lambda **options: _llama(HEADS, kv_heads=2, qk_norm=True, rotary_scaling=LLAMA3, **options),
    "Llama, tied": lambda **options: _llama(8, kv_heads=4, qk_norm=True, rotary_scaling=LINEAR, tied=True, **options),
    "Llama, experts": lambda **options: _llama(
        HEADS, kv_heads=2, qk_norm=True, experts=4, moe={"inner": 32}, router={"z_loss": 0.01}, **options
    ),
}
LINEAR = {"rope_type": "linear", "factor": 2.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def _llama(heads: int, **options: Any) -> Llama:
    return Llama(VOCABULARY, LENGTH, HIDDEN, heads, LAYERS, **options)


class Case(NamedTuple):
    """A model, a parallel configuration and a number of ranks."""

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


def _has_heads(model: str, parallel: dict[str, Any]) -> bool:
    """Two key heads are too few for 4 ranks: test_models.py checks the error."""
    return model != "Llama" or parallel != _tensor(4, "1d")


TENSOR_MODELS = ("GPT, tied", "GPT", "ViT", "Llama, tied", "Llama")
SEQUENCE_MODELS = ("GPT", "Llama, tied")
GRID = [
    *(
        Case(model, parallel, ranks)
        for model in TENSOR_MODELS
        for parallel, ranks in TENSOR
        if _has_heads(model, parallel)
    ),
    *(
        Case(model, {"sequence": size}, size, {"over": over})
        for model in SEQUENCE_MODELS
        for size in (2, 4)
        for over in ("ring", "ulysses")
    ),
    *(Case("GPT, tied", {"sequence": 2, "data": 2}, 4, {"over": over}) for over in ("ring", "ulysses")),
    Case("Llama", {"sequence": 2, "data": 2}, 4, {"over": "ring"}),
    Case("Llama", {"data": 2}, 2),
    Case("Llama, experts", {"data": 2}, 2),
    Case("Llama", {"sequence": 2, **_tensor(2, "1d")}, 4),
    Case("Llama, tied", {"sequence": 2, **_tensor(4, "2d")}, 8),
    Case("Llama, experts", {"expert": 2}, 2),
    Case("Llama, experts", {"expert": 2, **_tensor(2, "1d")}, 4),
    Case("Llama, experts", {"expert": 2, "sequence": 2}, 4),
    Case("Llama, tied", {"pipeline": 2}, 2),
    Case("Llama, experts", {"expert": 2, "pipeline": 2}, 4),
    Case("Llama, tied", {"data": 2, "pipeline": 2, **_tensor(2, "1d")}, 8),
    Case("Llama", {"data": 2, "pipeline": 2, **_tensor(2, "1d")}, 8),
    Case("Llama, experts", {"data": 2, "expert": 2, **_tensor(2, "1d"), "pipeline": 2}, 8),
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


def mixes() -> dict[str, list[Case]]:
    """The cases by configuration and options. Models of one configuration share a world; long cases have their own."""
    found: dict[str, list[Case]] = {}
    for case in GRID:
        mix = f"{case.ranks} ranks: {str(case).split(': ', 1)[1]}"
        found.setdefault(f"{mix}, more" if is_long(case) else mix, []).append(case)
    return found


def is_long(case: Case) -> bool:
    """Two ranks are quick. With more, short tests run every mode and configuration once, with each kind of model."""
    again = case.model == "Llama, tied" and case.parallel == _tensor(4, "2.5d", depth=1)
    return case.ranks > 2 and (case.model in ("GPT", "ViT", "Llama") or again)


def batch(model: str, part: int, step: int) -> tuple[Tensor, Tensor]:
    seed = 100 * step + part
    draw = torch.Generator().manual_seed(seed)
    if model == "ViT":
        return numbers(ROWS, 3, 8, 8, seed=seed), torch.randint(0, 8, (ROWS,), generator=draw)
    tokens = torch.randint(0, VOCABULARY, (ROWS, LENGTH + 1), generator=draw)
    return tokens[:, :-1], tokens[:, 1:]


def train_all(cases: list[Case]) -> None:
    """On each rank: train all cases one after another."""
    for case in cases:
        try:
            trained(case)
        except Exception as error:
            error.add_note(f"in {case}")
            raise


def trained(case: Case, zero: Any = 0, **settings: Any) -> None:
    """On each rank: three steps of the case and of a single process; raises if they differ."""
    piped = "pipeline" in case.parallel
    schedule = {"schedule": {"type": "OneFOneB", "num_microbatches": MICRO_BATCHES}} if piped else {}
    config = {"parallel": case.parallel, "clip_grad_norm": 1.0, "zero": zero, **schedule, **settings}
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
                # A micro-batch of all data ranks is one batch, over which the auxiliary loss is computed.
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
    print(stamp("python -m tests.models.grid") + "\n")
    print("| model | configuration | ranks | matches |\n|---|---|---|---|")
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
