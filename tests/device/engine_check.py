"""The engine on CUDA: equal to plain torch, and free of host synchronisation from backward to the end of the step.

python -m tests.device.engine_check              # NCCL, a world of one
colonnade run --nproc 2 -m tests.device.engine_check -- --backend gloo      # two ranks on one GPU
"""

from __future__ import annotations

import argparse
import json

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from colonnade import initialize, launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.testing import compare, gather_weights


def model(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Embedding(64, 128)]
    for _ in range(6):
        layers += [nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128), nn.LayerNorm(128)]
    return nn.Sequential(*layers, nn.Linear(128, 64)).to(device)


def batch(step: int, rank: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    tokens = torch.randint(64, (16, 33), generator=generator).to(device)
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(net(x).flatten(0, 1), y.flatten())


def run(config: dict[str, object], backend: str | None, steps: int = 6) -> dict[str, object]:
    """Train a few steps on the engine and by hand; the last steps run with synchronisation forbidden."""
    with launch(config, backend=backend, context=ParallelContext(), verbose=False) as gpc:
        device, world = gpc.device, gpc.world_size
        net = model(device)
        # Without the flat step only a fused optimizer can drop a step on the device.
        fused = config.get("flat_step") is False
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.1, fused=fused)
        engine, *_ = initialize(net, optimizer, context=gpc)
        plain = model(device)
        adamw = torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.1, fused=True)
        batches = [[batch(step, rank, device) for rank in range(world)] for step in range(steps)]
        torch.cuda.synchronize()
        for step in range(steps):
            x, y = batches[step][gpc.get_global_rank()]
            engine.zero_grad()
            loss = loss_of(engine, x, y)
            quiet = step >= 3 and backend != "gloo"  # gloo copies CUDA tensors through the host
            torch.cuda.set_sync_debug_mode("error" if quiet else "default")
            engine.backward(loss)
            engine.step()
            torch.cuda.set_sync_debug_mode("default")
            adamw.zero_grad()
            joined = [torch.cat(parts) for parts in zip(*batches[step], strict=True)]
            loss_of(plain, *joined).backward()
            if config.get("clip_grad_norm"):
                torch.nn.utils.clip_grad_norm_(plain.parameters(), float(config["clip_grad_norm"]))  # type: ignore[arg-type]
            adamw.step()
        found = compare(dict(plain.named_parameters()), gather_weights(net, gpc), 1e-4)
        worst = max(entry.relative for entry in found.differences)
        plan = [str(bucket) for bucket in engine._sync.synchroniser.buckets]
        engine.close()
        dist.barrier()
        return {"worst": worst, "flat": engine._stepper._step.flat is not None, "buckets": plan[:2], "world": world}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default=None)
    arguments = parser.parse_args()
    results = {
        str(config): run(config, arguments.backend)
        for config in (
            {},
            {"clip_grad_norm": 0.5},
            {"clip_grad_norm": 0.5, "flat_step": False},
            {"clip_grad_norm": 0.5, "sync": {"bucket_mb": 0.5}},
        )
    }
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
