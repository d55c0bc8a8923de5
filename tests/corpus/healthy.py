"""Runs with nothing wrong in them, drawn at random: models, layouts, ZeRO, accumulation, clipping, optimizers and dtypes.

`python -m tests.corpus.healthy [COUNT] [SEED]` draws so many and says which were not found equal to one process.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

import colonnade
from colonnade import ParallelMode
from colonnade.context.parallel_context import ParallelContext
from colonnade.errors import ColonnadeError
from colonnade.parallel.split import split
from colonnade.testing import run_world
from tests.corpus import runner
from tests.models import grid

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.float32}
KINDS = {
    "mlp": (runner.MLP, ()),
    "classes": (runner.CLASSES, ()),
    "tensor mlp": (runner.TENSOR, ("tensor",)),
    "partial norm": (runner.PARTIAL_NORM, ("tensor",)),
    "scattered": (runner.SCATTERED, ("tensor",)),
    "experts": (runner.EXPERTS, ("expert",)),
    "sequence": (runner.SEQUENCE, ("sequence", "tensor")),
    "tied": (runner.TIED, ("pipeline",)),
    "alike": (runner.ALIKE, ("pipeline",)),
    "gated": (runner.GATED, ("tensor",)),
    "GPT, tied": (None, ("tensor", "pipeline", "sequence")),
    "GPT": (None, ("tensor", "pipeline", "sequence")),
    "Llama, tied": (None, ("tensor", "pipeline", "sequence")),
    "MoE-GPT": (None, ("expert", "tensor", "pipeline")),
}


@dataclass(frozen=True)
class Drawn:
    """One run."""

    kind: str
    ranks: int
    dtype: str
    optimizer: str
    config: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.kind} on {self.ranks} ranks in {self.dtype} with {self.optimizer}, {self.config}"


def draw(number: int, seed: int = 0) -> Drawn:
    """The run of this number, always the same."""
    dice = random.Random(f"{seed} {number}")
    kind = dice.choice(list(KINDS))
    ranks, (_, axes) = dice.choice([2, 4]), KINDS[kind]
    parallel: dict[str, Any] = {}
    left = ranks
    for axis in sorted(dice.sample(axes, len(axes)), key=lambda axis: axis == "expert"):  # which lies on the data ranks
        size = dice.choice([1, 2, 2, 2, 4])
        if size > 1 and left % size == 0 and (size == 2 or axis in ("tensor", "expert")):
            parallel[axis] = size
            left //= 1 if axis == "expert" else size
    if KINDS[kind][0] is None and "tensor" in parallel:
        parallel["tensor"] = {"size": parallel["tensor"], "mode": "1d"}
    config: dict[str, Any] = {"parallel": parallel, "zero": dice.choice([0, 0, 1, 2, 3])}
    if "pipeline" in parallel:
        config["schedule"] = {"type": dice.choice(["GPipe", "OneFOneB"]), "num_microbatches": 2}
    config["clip_grad_norm"] = dice.choice([None, 0.1, 1.0, {"max_norm": 0.5, "norm_type": 3.0}])
    config["gradient_accumulation"] = dice.choice([1, 1, 2, 3])
    dtype = dice.choice(list(DTYPES))
    if dtype == "bf16":
        config["bf16"] = True
    return Drawn(kind, ranks, dtype, dice.choice(list(OPTIMIZERS)), {k: v for k, v in config.items() if v is not None})


def check_all(drawn: list[Drawn]) -> list[tuple[str, str]]:
    """On a rank: (run, "" or what is wrong) of each."""
    return [(str(one), checked(one)) for one in drawn]


def checked(drawn: Drawn) -> str:
    """On a rank: nothing where the run is found equal to one process; else what is said. One that cannot be is passed over."""
    context = ParallelContext()
    with colonnade.launch(drawn.config, context=context, verbose=False), torch.random.fork_rng():
        torch.manual_seed(0)
        build, criterion, batches = _parts(drawn, context)
        model: Any = build(context).to(DTYPES[drawn.dtype])
        loss = criterion(model, context)
        if context.pipeline_parallel_size > 1:
            model = split(model, num_stages=context.pipeline_parallel_size)
        try:
            engine = colonnade.initialize(model, OPTIMIZERS[drawn.optimizer], loss, context=context)[0]
        except ColonnadeError as error:
            return f"refused: {error}"
        try:
            alone = ParallelContext()
            whole = build(alone)
            report = colonnade.verify(
                engine,
                reference=lambda: build(alone).to(DTYPES[drawn.dtype]),
                criterion=criterion(whole, alone),
                batches=[_cast(batches(context, step), DTYPES[drawn.dtype]) for step in range(2)],
            )
        except Exception as error:
            return f"not run: {type(error).__name__}: {error}"
        finally:
            engine.close()
        return "" if report.ok else str(report)


def _parts(drawn: Drawn, context: ParallelContext) -> tuple[Any, Any, Any]:
    """How the model, its loss and its batches are made."""
    kind = KINDS[drawn.kind][0]
    if kind is not None:
        return kind.model, lambda model, context: kind.criterion(context), kind.batches
    return (
        lambda context: grid.MODELS[drawn.kind](context=context),
        lambda model, context: model.criterion(),
        lambda context, step: [
            grid.batch(drawn.kind, 10 * at + context.get_local_rank(ParallelMode.DATA), step)
            for at in range(drawn.config["gradient_accumulation"])
        ],
    )


def _cast(batches: list[Any], dtype: torch.dtype) -> list[Any]:
    return tree_map_only(torch.Tensor, lambda one: one.to(dtype) if one.is_floating_point() else one, batches)


def sweep(first: int, count: int, seed: int = 0) -> tuple[dict[str, str], list[str], int]:
    """(what is wrong with which runs, those that were refused, how many were found equal), of so many drawn runs."""
    wrong, refused, equal = {}, [], 0
    drawn = [draw(number, seed) for number in range(first, first + count)]
    for ranks in (2, 4):
        some = [one for one in drawn if one.ranks == ranks]
        if some:
            result = run_world(ranks, check_all, some, timeout=110, env={"TORCH_DISTRIBUTED_DEBUG": "OFF"})
            for name, problem in result.values[0]:
                if problem.startswith("refused"):
                    refused.append(f"{name}: {problem}")
                elif problem:
                    wrong[name] = problem
                else:
                    equal += 1
    return wrong, refused, equal


def main(count: int = 200, seed: int = 0) -> int:
    bad = 0
    for first in range(0, count, 20):
        wrong, refused, equal = sweep(first, min(20, count - first), seed)
        bad += len(wrong)
        print(f"{first}: {equal} equal, {len(refused)} refused, {len(wrong)} false alarms", flush=True)
        for name, problem in wrong.items():
            print(f"FALSE ALARM {name}\n{problem[:3000]}", flush=True)
        for text in refused:
            print(f"    {text[:300]}", flush=True)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
