"""Stages by the forward pass in a pipeline: every schedule, and what a config can ask for, beside one process."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import colonnade
from colonnade.checkpoint import CheckpointManager
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.testing import compare, gather_weights, run_world
from tests.parallel.own_forward.models import LENGTH, WORDS, Decoder

ROWS, STEPS = 16, 3
ADAMW = partial(torch.optim.AdamW, lr=0.01, eps=1e-6)
SCHEDULES: dict[str, dict[str, Any]] = {
    "OneFOneB": {},
    "GPipe": {},
    "Interleaved1F1B": {"num_chunks": 2},
    "BreadthFirst": {"num_chunks": 2},
    "InterleavedZeroBubble": {"num_chunks": 2},
    "ZBV": {},
    "DualPipeV": {},
}


def build() -> Decoder:
    torch.manual_seed(0)
    return Decoder(blocks=5).double()


def batch_of(step: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(step)
    ids = torch.randint(0, WORDS, (ROWS, LENGTH), generator=draw)
    labels = ids.roll(-1, 1).where(torch.rand(ids.shape, generator=draw) < 0.6, -100)
    return {"ids": ids, "padding": torch.rand(ids.shape, generator=draw) < 0.8, "labels": labels}


def criterion(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"), (labels != -100).sum()


def alone() -> dict[str, Any]:
    model = build()
    adamw, norms = ADAMW(model.parameters()), []
    for step in range(STEPS):
        batch = batch_of(step)
        adamw.zero_grad()
        total, count = criterion(model(batch["ids"], batch["padding"]), batch["labels"])
        (total / count).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        adamw.step()
    return {"norms": norms, "weights": {name: parameter.detach() for name, parameter in model.named_parameters()}}


def start(gpc: ParallelContext, chunks: int) -> Any:
    sample = {name: value[:2] for name, value in batch_of(0).items() if name != "labels"}
    stages = colonnade.split(build(), num_stages=2 * chunks, sample=sample)
    return colonnade.initialize(stages, ADAMW, criterion, context=gpc)[0]


def train(engine: Any, gpc: ParallelContext, steps: Iterable[int], truth: dict[str, Any]) -> None:
    for step in steps:
        mine = {name: value[gpc.get_local_rank(ParallelMode.DATA) :: 2] for name, value in batch_of(step).items()}
        engine.zero_grad()
        engine.execute_schedule(iter([mine]), return_output_label=False)
        engine.step()
        assert engine.grad_norm.item() == pytest.approx(truth["norms"][step], rel=1e-9)


def train_all(cases: list[tuple[str, dict[str, Any]]], folder: str) -> None:
    """On each of four ranks, two and two of which see other rows: three steps, the last two after a checkpoint."""
    truth = alone()
    for index, (name, settings) in enumerate(cases):
        schedule = {"type": name, "num_microbatches": 4, **SCHEDULES[name]}
        config = {"parallel": {"pipeline": 2}, "schedule": schedule, "clip_grad_norm": 0.5, **settings}
        chunks = 1 if name in ("OneFOneB", "GPipe") else 2
        with colonnade.launch(config, context=ParallelContext(), verbose=False) as gpc:
            engine = start(gpc, chunks)
            train(engine, gpc, [0], truth)
            with CheckpointManager(Path(folder, str(index)), gpc) as manager:
                manager.save(0, engine.model, engine.optimizer)
            engine.close()
            engine = start(gpc, chunks)
            with CheckpointManager(Path(folder, str(index)), gpc, read_only=True) as manager:
                manager.load(engine.model, engine.optimizer)
            train(engine, gpc, [1, 2], truth)
            compare(truth["weights"], gather_weights(engine.model, gpc), 1e-9)
            assert "parameters" in str(engine.memory())
            engine.close()


FEW: list[tuple[str, dict[str, Any]]] = [
    ("OneFOneB", {"zero": 1}),
    ("Interleaved1F1B", {}),
    ("OneFOneB", {"zero": 3, "activation_checkpoint": True}),
    ("ZBV", {"zero": 3}),
]
MORE: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in SCHEDULES),
    ("Interleaved1F1B", {"zero": 2}),
    ("ZBV", {"activation_checkpoint": {"mode": "selective", "every": 2}}),
    ("Interleaved1F1B", {"compile": {"backend": "aot_eager"}}),
    ("OneFOneB", {"compile": {"backend": "aot_eager", "blocks": False}}),
]


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(FEW, marks=pytest.mark.slow, id="few"),
        pytest.param(MORE, marks=[pytest.mark.slow, pytest.mark.long], id="more"),
    ],
)
def test_schedules_and_settings(cases: list[tuple[str, dict[str, Any]]], tmp_path: Path) -> None:
    """The embedding is tied to the head: on two ranks, or, where stages form a V, on one."""
    run_world(4, train_all, cases, str(tmp_path), timeout=60 + 20 * len(cases))
