"""A model of 4 G parameters, started from the meta device under ZeRO 3 on two NCCL ranks of one GPU, and trained for 5 steps.

python -m tests.device.meta_check                                  # about a minute on an H200, of which it takes 70 GiB
python -m tests.device.meta_check --backend gloo --hidden 64 --layers 4    # on the CPU, without the memory

In bf16 with fp32 weights in the optimizer. Prints for each rank the bytes at the start and the peak, beside the formula: what stage 3
holds, and at one moment the outermost module and two blocks in bf16, and the gradients of one of them in bf16 and, laid out for the
sum, in fp32. The exit status is 1 if a peak is more than 5% away from it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import torch

import colonnade
from colonnade.models import GPT
from colonnade.optim.zero.formula import bytes_held
from colonnade.parallel.placement import local_part
from colonnade.testing import run_world

LENGTH, VOCABULARY = 128, 32000


def train(hidden: int, layers: int, steps: int) -> dict[str, Any]:
    """Start and train; what one rank saw."""
    begin = time.monotonic()
    gpc = colonnade.launch({"zero": 3, "bf16": True, "clip_grad_norm": 1.0}, verbose=False)
    on_gpu = gpc.device.type == "cuda"
    with colonnade.meta_init():
        model = GPT(VOCABULARY, LENGTH, hidden, hidden // 64, layers)
    numel = sum(p.numel() for p in model.parameters())
    block = sum(p.numel() for p in model.blocks[0].parameters())  # type: ignore[index]
    outer = numel - layers * block
    seen: dict[str, Any] = {"rank": gpc.get_global_rank(), "numel": numel, "built_s": time.monotonic() - begin}
    engine, *_ = colonnade.initialize(
        model, lambda p: torch.optim.AdamW(p, lr=1e-4, fused=on_gpu or None), model.criterion()
    )
    seen["started_s"] = time.monotonic() - begin
    seen["shard_bytes"] = sum(local_part(p).nbytes for p in model.parameters())
    if on_gpu:
        seen["start_peak"] = torch.cuda.max_memory_allocated()
    tokens = torch.randint(VOCABULARY, (1, LENGTH), device=gpc.device)
    losses = []
    for _ in range(steps):
        engine.zero_grad()
        loss = engine.criterion(engine(tokens), tokens)
        engine.backward(loss)
        engine.step()
        losses.append(round(loss.item(), 4))
    seen |= {"losses": losses, "trained_s": time.monotonic() - begin}
    held = bytes_held(3, numel, 2).total
    seen |= {"held": held, "formula": held + 2 * (outer + 2 * block) + 6 * max(outer, block)}
    if on_gpu:
        seen["peak"] = torch.cuda.max_memory_allocated()
    engine.close()
    gpc.destroy()
    return seen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=78)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--backend", default="nccl")
    given = parser.parse_args()
    ranks = run_world(2, train, given.hidden, given.layers, given.steps, timeout=150, backend=given.backend).values
    ok = all(seen["losses"] == sorted(seen["losses"], reverse=True) for seen in ranks)
    for seen in ranks:
        if "peak" in seen:
            seen["peak_to_formula"] = round(seen["peak"] / seen["formula"], 4)
            seen["start_peak_to_shard"] = round(seen["start_peak"] / seen["shard_bytes"], 4)
            ok &= abs(seen["peak_to_formula"] - 1) <= 0.05
        print(json.dumps({key: round(value, 1) if key.endswith("_s") else value for key, value in seen.items()}))
    print("ok" if ok else "FAILED")
    return int(not ok)


if __name__ == "__main__":
    sys.exit(main())
