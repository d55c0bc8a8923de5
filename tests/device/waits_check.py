"""No host waits for the device in a steady step: every kind of model, over NCCL between ranks that share one GPU.

`python -m tests.device.nccl_check --only waits`. A step is everything from `zero_grad` to the end of `step`. For transformers models,
whose own code may wait (an expert's tokens are chosen by `nonzero`), the engine must add no wait to those of the model by hand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import colonnade
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.parallel.split import split
from colonnade.testing import device_waits
from tests.hf import zoo
from tests.models import grid

WARM_UP, STEPS = 8, 2
"""Steps before the steady state (the ranks compare batches and notes in the first ones), and those that are measured."""


def of_grid(case: grid.Case, settings: dict[str, Any]) -> None:
    """On a rank: a model of the grid, in fp32."""
    piped = "pipeline" in case.parallel
    schedule = {"schedule": {"type": "OneFOneB", "num_microbatches": grid.MICRO_BATCHES}} if piped else {}
    config = {"parallel": case.parallel, "clip_grad_norm": 1.0, **schedule, **settings}
    with colonnade.launch(config, context=ParallelContext(), verbose=False) as gpc:
        model: Any = grid.MODELS[case.model](**case.options, context=gpc)
        criterion = model.criterion()
        model = split(model, num_stages=gpc.pipeline_parallel_size) if piped else model
        engine = colonnade.initialize(model, _adamw, criterion, context=gpc)[0]
        part = gpc.get_local_rank(ParallelMode.DATA)
        batches = [[t.to(gpc.device) for t in grid.batch(case.model, part, step)] for step in range(WARM_UP + STEPS)]
        batches = [[t.float() if t.is_floating_point() else t for t in one] for one in batches]

        def step(at: int) -> None:
            engine.zero_grad()
            engine.execute_schedule(iter([batches[at]]), return_output_label=False)
            engine.step()

        waits = _steady(step)
        engine.close()
        assert not waits, f"{case}, {settings}: {waits}"


def of_transformers(names: list[str], settings: dict[str, Any]) -> None:
    """On a rank: transformers models under data parallelism, each compared with itself by hand."""
    with colonnade.launch({"clip_grad_norm": 1.0, **settings}, context=ParallelContext(), verbose=False) as gpc:
        wrong = {}
        for name in names:
            architecture = zoo.BY_NAME[name]
            plain = architecture.build().float().to(gpc.device)
            rows = slice(gpc.get_local_rank(ParallelMode.DATA), None, gpc.data_parallel_size)
            of_rank = [zoo.num_rows(zoo.batch_of(architecture.kind, step), rows) for step in range(WARM_UP + STEPS)]
            batches = [
                {
                    key: (value.float() if value.is_floating_point() else value).to(gpc.device)
                    for key, value in one.items()
                }
                for one in of_rank
            ]
            by_hand = _steady(_step_by_hand(plain, batches))
            engine = colonnade.initialize(architecture.build().float(), _adamw, context=gpc)[0]

            def step(at: int, engine: Any = engine, batches: Any = batches) -> None:
                engine.zero_grad()
                engine.backward(engine(**batches[at]).loss)
                engine.step()

            waits = _steady(step)
            engine.close()
            if len(waits) > len(by_hand):
                wrong[name] = {"engine": waits, "by hand": by_hand}
        assert not wrong, wrong


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, fused=torch.cuda.is_available())


def _step_by_hand(model: nn.Module, batches: list[dict[str, Any]]) -> Callable[[int], None]:
    optimizer = _adamw(model.parameters())

    def step(at: int) -> None:
        optimizer.zero_grad()
        model(**batches[at]).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def _steady(step: Callable[[int], None]) -> list[str]:
    """The waits of the last steps, after a warm-up."""
    for at in range(WARM_UP):
        step(at)
    return device_waits(lambda: [step(WARM_UP + at) for at in range(STEPS)])
