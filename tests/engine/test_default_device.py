"""`torch.set_default_device` names another device than the engine's: no tensor of the library may follow it by accident."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW

import colonnade
from colonnade import initialize, launch
from colonnade.context.parallel_context import ParallelContext
from tests.ranks import on_ranks

CONFIGS: list[dict[str, Any]] = [
    {"clip_grad_norm": 1.0},
    {"clip_grad_norm": {"max_norm": 1.0, "per": "layer"}, "gradient_accumulation": 2},
    {"zero": {"stage": 1}, "clip_grad_norm": 1.0},
    {"zero": {"stage": 2}, "clip_grad_norm": {"max_norm": 1.0, "report": "layer"}},
    {"flat_step": False, "clip_grad_norm": {"max_norm": 1.0, "norm_type": 3}},
    {"zero": 3, "clip_grad_norm": 1.0},
    {"clip_grad_norm": {"method": "adagc"}},
    {"sync": {"shared_memory": False}, "clip_grad_norm": {"method": "zclip"}},
    {"parallel": {"tensor": {"size": 2, "mode": "1d"}}, "clip_grad_norm": 1.0},
    {"parallel": {"pipeline": 2}, "schedule": {"type": "OneFOneB", "num_microbatches": 2}, "clip_grad_norm": 1.0},
]


def adamw_follows_the_default() -> bool:
    """Whether torch's AdamW cannot step under another default device, because it makes its step counts there (torch 2.11)."""
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    torch.set_default_device("meta")
    try:
        AdamW([weight], foreach=False).step()
    except RuntimeError:
        return True
    finally:
        torch.set_default_device(
            None
        )  # not "cpu", which would leave a mode behind that changes what later tests compile
    return False


FOLLOWS = adamw_follows_the_default()


def weights(config: dict[str, Any], device: str) -> list[Tensor]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 3)).double()
    parallel = config.get("parallel", {})
    x, y = torch.randn(4, 4, 6, dtype=torch.float64), torch.randn(4, 4, 3, dtype=torch.float64)
    torch.set_default_device(device)
    try:
        with launch(config, context=ParallelContext(), verbose=False, backend="gloo") as gpc:
            # Where ZeRO shards, torch's AdamW makes its step counts on the default device in every version.
            kind = SGD if "zero" in config or FOLLOWS else AdamW
            if "tensor" in parallel:
                model = colonnade.parallelize(model, {"0": "colwise", "2": "rowwise"}, context=gpc)
            if "pipeline" in parallel:
                model = colonnade.split([model[:2], model[2:]])
            engine, *_ = initialize(model, lambda p: kind(p, lr=0.1), nn.MSELoss(), context=gpc)
            for step in range(3):
                engine.zero_grad()
                for _ in range(config.get("gradient_accumulation", 1)):
                    if "pipeline" in parallel:
                        engine.execute_schedule(iter([(x[step], y[step])]))
                    else:
                        engine.backward(engine.criterion(engine(x[step]), y[step]))
                engine.step()
            return list(engine.full_state_dict().values())
    finally:
        torch.set_default_device("cpu")


@on_ranks(2, timeout=100)
def test_steps_are_the_same_under_another_default_device():
    """On the meta device a tensor that followed the default would have no values, and no collective takes it."""
    for config in CONFIGS:
        assert all(map(torch.equal, weights(config, "cpu"), weights(config, "meta"))), config
