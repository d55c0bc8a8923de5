"""ZeRO on CUDA: equal to plain torch, and (but for offload) without host synchronisation from backward to step.

python -m tests.optim.zero.device_check              # NCCL, a world of one
python -m tests.device.nccl_check --only quiet       # NCCL, two ranks on one GPU
colonnade run --nproc 2 -m tests.optim.zero.device_check -- --backend gloo      # two ranks on one GPU
"""

from __future__ import annotations

import argparse
import json
import traceback
from typing import Any

import torch
import torch.distributed as dist

from colonnade import initialize, launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.testing import compare, gather_weights
from tests.device.engine_check import batch, loss_of, model

CONFIGS: tuple[dict[str, Any], ...] = (
    {"zero": 1},
    {"zero": 2, "clip_grad_norm": 0.5},
    {"zero": {"stage": 2, "bucket_mb": 0.5}, "clip_grad_norm": 0.5, "gradient_accumulation": 2},
    {"zero": {"stage": 1, "gather_ahead": True, "bucket_mb": 0.5}, "clip_grad_norm": 0.5},
    {"zero": {"stage": 1, "offload": True}, "clip_grad_norm": 0.5},
    {"zero": {"stage": 2, "offload": True, "bucket_mb": 0.5}},
    {"zero": 1, "clip_grad_norm": 0.5, "flat_step": False},
    {"zero": 3, "clip_grad_norm": 0.5},
)


def run(config: dict[str, Any], backend: str | None, steps: int = 6) -> dict[str, Any]:
    """Train a few steps sharded and by hand; where it can be, the last ones with synchronisation forbidden."""
    passes = config.get("gradient_accumulation", 1)
    with launch(config, backend=backend, context=ParallelContext(), verbose=False) as gpc:
        device, world, rank = gpc.device, gpc.world_size, gpc.get_global_rank()
        net, plain = model(device), model(device)
        zero = config["zero"]
        on_gpu = device.type == "cuda"
        quiet = on_gpu and backend != "gloo" and not (isinstance(zero, dict) and zero.get("offload"))
        engine, *_ = initialize(
            net, torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.1, fused=True), context=gpc
        )
        adamw = torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.1, fused=True)
        batches = [[batch(step, part, device) for part in range(world)] for step in range(steps * passes)]
        if on_gpu:
            torch.cuda.synchronize()
        for step in range(steps):
            engine.zero_grad()
            adamw.zero_grad()
            for micro in range(passes):
                at = step * passes + micro
                loss = loss_of(engine, *batches[at][rank])
                if quiet and step >= 3:
                    torch.cuda.set_sync_debug_mode("error")
                engine.backward(loss)
                engine.step()
                if quiet:
                    torch.cuda.set_sync_debug_mode("default")
                joined = [torch.cat(parts) for parts in zip(*batches[at], strict=True)]
                (loss_of(plain, *joined) / passes).backward()
            if config.get("clip_grad_norm"):
                torch.nn.utils.clip_grad_norm_(plain.parameters(), config["clip_grad_norm"])
            adamw.step()
        engine.wait_for_weights()  # with gather_ahead, what is read between steps may be on its way
        found = compare(dict(plain.named_parameters()), gather_weights(net, gpc), 1e-4)
        homes = sorted({str(one.owned.device) for one in getattr(engine.optimizer, "_values", ())})
        engine.close()
        dist.barrier()
        return {"worst": max(entry.relative for entry in found.differences), "steps on": homes, "quiet": quiet}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default=None)
    arguments = parser.parse_args()
    results = {}
    for config in CONFIGS:
        try:
            results[str(config)] = run(config, arguments.backend)
        except Exception as error:
            torch.cuda.set_sync_debug_mode("default")
            frames = [f"{f.filename.rsplit('/', 1)[-1]}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__)]
            results[str(config)] = {"error": f"{type(error).__name__}: {error}"[:600], "at": frames[-6:]}
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
