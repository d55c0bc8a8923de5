"""A project that passes `mypy --strict` and uses only public names of Colonnade.

python train.py              # it starts two ranks
mypy --strict train.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import colonnade
from colonnade import Engine, ParallelContext, ParallelMode
from colonnade.checkpoint import CheckpointManager, export_full
from colonnade.context import Layout, build_layout
from colonnade.engine.gradient_handler import BaseGradientHandler
from colonnade.errors import ColonnadeError
from colonnade.logging import get_dist_logger
from colonnade.nn import Linear
from colonnade.nn.lr_scheduler import CosineAnnealingLR
from colonnade.registry import GRADIENT_HANDLER, HOOKS
from colonnade.testing import WorldResult, run_world
from colonnade.trainer import BaseHook, StepRecord, Trainer, hooks
from colonnade.utils import get_dataloader


@GRADIENT_HANDLER.register_module
class PlainHandler(BaseGradientHandler):
    """A custom handler that all-reduces gradients over data ranks one by one; the ledger checks it."""

    def handle_gradient(self) -> None:
        group = self.context.get_group(ParallelMode.DATA)
        for parameter in self._model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad, group=group)
                parameter.grad /= dist.get_world_size(group)


@HOOKS.register_module
class BestLoss(BaseHook):
    """Stores the smallest loss, also in checkpoints."""

    def __init__(self) -> None:
        super().__init__(priority=20)
        self.best = float("inf")

    def on_record(self, trainer: Trainer, record: StepRecord) -> None:
        if record.loss is not None:
            self.best = min(self.best, record.loss)

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best = state["best"]


def build(context: ParallelContext) -> Engine:
    """Build a model with layers sharded over tensor ranks, and its engine."""
    model = nn.Sequential(Linear(8, 32), nn.ReLU(), Linear(32, 4, split="row"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    engine, *_ = colonnade.initialize(model, optimizer, nn.CrossEntropyLoss(), context=context)
    return engine


def train(folder: Path) -> float:
    """Train, save, and return the best loss."""
    context: ParallelContext = colonnade.launch(
        {"clip_grad_norm": 1.0, "parallel": {"tensor": {"size": 2, "mode": "1d"}}}, verbose=False
    )
    points = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    loader = get_dataloader(TensorDataset(points, points[:, :4].argmax(dim=1)), shuffle=True, batch_size=16)
    engine = build(context)
    scheduler = CosineAnnealingLR(engine.optimizer, total_steps=8, warmup_steps=2)
    best = BestLoss()
    trainer = Trainer(engine)
    stepped = hooks.LRSchedulerHook(scheduler, by_epoch=False)
    trainer.fit(loader, max_steps=8, hooks=[hooks.LossHook(), best, stepped, hooks.EMAHook()])
    found: dict[str, float] = trainer.evaluate(loader)
    with CheckpointManager(folder, context) as manager:
        manager.save(trainer.cur_step, engine.model, engine.optimizer)
    norm: Tensor | None = engine.grad_norm
    get_dist_logger().info(f"loss {found['Loss']:.3f}, last norm {norm}, {engine.ledger()}")
    context.destroy()
    return best.best


def main() -> None:
    """Print the layout without starting processes, then train on two ranks."""
    layout: Layout = build_layout({"parallel": {"tensor": {"size": 2, "mode": "1d"}}}, world_size=4)
    assert layout.group_of(ParallelMode.DATA, rank=1) == [1, 3]
    with tempfile.TemporaryDirectory() as folder:
        try:
            result: WorldResult = run_world(2, train, Path(folder), backend=None)
        except ColonnadeError as error:
            raise SystemExit(f"{error.code}: {error}") from error
        weights: Path = export_full(folder, Path(folder) / "model.safetensors")
        print(f"best loss {result.values[0]:.3f}, weights of {weights.stat().st_size} bytes")


if __name__ == "__main__":
    main()
