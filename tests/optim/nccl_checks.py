"""Steps of an engine in which the host may not wait for the device: small gradients, in buckets and in none, of two dtypes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from colonnade._launch import launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.engine.build import initialize
from tests.device.check import Check

CONFIGS: tuple[dict[str, Any], ...] = (
    {"clip_grad_norm": 0.5},
    {"clip_grad_norm": {"max_norm": 0.5, "per": "parameter"}},
    {"clip_grad_norm": {"max_norm": 0.5, "report": "layer", "norm_type": 3}, "flat_step": False},
    {"clip_grad_norm": {"max_norm": 0.5, "norm_type": "inf"}, "gradient_accumulation": 2},
    {"clip_grad_norm": {"method": {"type": "zclip", "warmup": 2}}},
    {"clip_grad_norm": 0.5, "zero": 1},
    {"clip_grad_norm": 0.5, "sync": {"waive": ["*"]}},
    {"clip_grad_norm": 0.5, "sync": {"waive": ["1.*"]}},
    {"clip_grad_norm": 0.5, "fp16": True},
)


def checks() -> Iterator[Check]:
    for config in CONFIGS:
        for default in (False, True):
            name = f"{config}{', CUDA the default device' * default}"
            yield Check("waits", name, 2, steps, (config, default), places_itself=True, only_on_gpu=True)


def steps(config: dict[str, Any], default: bool) -> None:
    """Six steps; in the last three PyTorch raises where the host waits for the device."""
    with launch(config, context=ParallelContext(), verbose=False) as gpc:
        if default:
            torch.set_default_device(gpc.device)
        torch.manual_seed(0)
        # Odd widths, so that rows are aligned by nothing.
        model = nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 5), nn.LayerNorm(5)).to(gpc.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        engine, *_ = initialize(model, optimizer, nn.MSELoss(), context=gpc)
        x, y = torch.randn(6, 7, device=gpc.device), torch.randn(6, 5, device=gpc.device)
        try:
            for step in range(6):
                torch.cuda.synchronize()
                torch.cuda.set_sync_debug_mode("error" if step >= 3 else "default")
                for _ in range(engine.accumulation):
                    engine.zero_grad()
                    engine.backward(engine.criterion(engine(x).to(y.dtype), y))
                    engine.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
            torch.set_default_device(None)
        assert engine.grad_norm is not None
        assert torch.isfinite(engine.grad_norm)
        engine.close()
        if gpc.world_size > 1:
            dist.barrier()
