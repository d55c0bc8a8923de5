"""Speed of training steps on one GPU in TFLOP/s: layers of an 8B Llama in bf16 and in float8, and of Qwen3-30B-A3B.

One formula for all (`Shape.flops_per_token`): 6 operations per token and weight of a matrix product (for experts: those that a token
uses), and 6 x layers x width x length for causal attention. Float8 steps are counted as the same work in bf16. A step is forward,
backward, clipping and AdamW; times are medians of CUDA events.

`python benchmarks/peak_cuda.py --json` runs each variant in a process of its own, so that one that fails costs no other, and prints
one object last. `--only NAME ...` chooses variants, `--seconds` limits each; `--list` names them. float8 needs torchao: its package
can lie in any folder of PYTHONPATH.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _llama_by_hand import EPS, THETA, Plain, Shape
from _measure import has_device, interleave, timed_on_gpu
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from colonnade import initialize, launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.models import Llama

PEAK = 989.0
"""bf16 TFLOP/s of an H100 or H200, dense, by its data sheet."""
SHAPES = {
    "8B": Shape(vocabulary=32000, hidden=4096, heads=32, kv_heads=8, inner=14336, layers=6),
    "Qwen3": Shape(vocabulary=32000, hidden=2048, heads=32, kv_heads=4, inner=768, layers=4, experts=128, choices=8),
}
LENGTH, MAX_NORM, LR = 4096, 1.0, 1e-4

Step = Callable[[], Any]


@dataclass(frozen=True)
class Variant:
    """One way to train a shape. `goal` is in TFLOP/s.

    `pure`: weights, gradients and optimizer state in bf16; otherwise weights and state in fp32. `cudnn`: attention by cuDNN.
    """

    shape: str = "8B"
    rows: int = 4
    by_hand: bool = False
    pure: bool = False
    cudnn: bool = False
    float8: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    goal: float | None = None


VARIANTS = {
    "bf16": Variant(),
    "bf16, by hand": Variant(by_hand=True),
    "bf16, cudnn": Variant(cudnn=True),
    "bf16, cudnn, 8 rows": Variant(cudnn=True, rows=8),
    "bf16, cudnn, 8 rows, pure": Variant(cudnn=True, rows=8, pure=True),
    "bf16, cudnn, 8 rows, pure, by hand": Variant(cudnn=True, rows=8, pure=True, by_hand=True),
    "bf16, cudnn, 8 rows, pure, fused loss": Variant(cudnn=True, rows=8, pure=True, model={"fused_loss": True}),
    "bf16, cudnn, 16 rows, pure": Variant(cudnn=True, rows=16, pure=True, goal=0.60 * PEAK),
    "bf16, cudnn, 16 rows, pure, by hand": Variant(cudnn=True, rows=16, pure=True, by_hand=True),
    "float8, tensorwise": Variant(cudnn=True, rows=8, pure=True, float8="tensorwise", goal=800.0),
    "float8, rowwise": Variant(cudnn=True, rows=8, pure=True, float8="rowwise"),
    "experts": Variant("Qwen3", cudnn=True, pure=True, goal=300.0),
    "experts, 8 rows": Variant("Qwen3", rows=8, cudnn=True, pure=True),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", nargs="+", choices=tuple(VARIANTS), default=tuple(VARIANTS), metavar="NAME")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=100.0, help="the time limit of a variant")
    parser.add_argument("--here", help="measure one variant in this process")
    parser.add_argument("--profile", action="store_true", help="print the kernels of a step")
    parser.add_argument("--list", action="store_true")
    given = parser.parse_args()
    if given.list:
        print(*(f"{name}: {asdict(variant)}" for name, variant in VARIANTS.items()), sep="\n")
        return 0
    if not has_device("cuda"):
        return 0
    if given.here:
        print(json.dumps(measure(VARIANTS[given.here], given.rounds, given.profile)))
        return 0
    found: dict[str, Any] = {}
    for name in given.only:
        found[name] = in_a_process(name, given)
        print(f"{name:40s} {found[name]}", flush=True)
    goals = {name: VARIANTS[name].goal for name in found if VARIANTS[name].goal is not None}
    missed = sorted(name for name, goal in goals.items() if found[name].get("tflops", 0.0) < (goal or 0.0))
    if given.json:
        print(json.dumps({"ratios": {}, "goals": goals, "missed": missed, "variants": found}))
    return int(bool(missed))


def in_a_process(name: str, given: argparse.Namespace) -> dict[str, Any]:
    """What `measure` returns for a variant, or its error."""
    options = ["--here", name, "--rounds", str(given.rounds), *(["--profile"] if given.profile else [])]
    try:
        ran = subprocess.run(
            [sys.executable, str(Path(__file__)), *options], capture_output=True, text=True, timeout=given.seconds
        )
    except subprocess.TimeoutExpired:
        return {"error": f"more than {given.seconds:g} s"}
    lines = ran.stdout.strip().splitlines()
    if ran.returncode or not lines:
        return {"error": " | ".join(ran.stderr.strip().splitlines()[-6:])[-1500:]}
    print(*lines[:-1], sep="\n", flush=True)
    result: dict[str, Any] = json.loads(lines[-1])
    return result


def measure(variant: Variant, rounds: int, profiled: bool) -> dict[str, Any]:
    """Milliseconds of a step and TFLOP/s, in this process."""
    if variant.cudnn:
        torch.backends.cuda.enable_flash_sdp(False)
        torch.backends.cuda.enable_mem_efficient_sdp(False)
    shape = SHAPES[variant.shape]
    drawn = torch.randint(0, shape.vocabulary, (variant.rows, LENGTH + 1), device="cuda")
    tokens, labels = drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()
    step = (by_hand if variant.by_hand else by_engine)(variant, shape, tokens, labels)
    losses = [float(step()) for _ in range(4)]
    torch.cuda.reset_peak_memory_stats()
    ms = interleave({"step": partial(timed_on_gpu, step)}, rounds)["step"]
    if profiled:
        from llama_cuda import print_profile

        print_profile("step", step)
    tflops = shape.flops_per_token(LENGTH) * tokens.numel() / (ms * 1e-3) / 1e12
    return {
        "ms": round(ms, 2),
        "tflops": round(tflops, 1),
        "of_peak": round(tflops / PEAK, 4),
        "tokens_per_second": round(tokens.numel() / (ms * 1e-3)),
        "gb": round(torch.cuda.max_memory_allocated() / 1e9, 1),
        "losses": [round(loss, 3) for loss in losses],
    }


def by_engine(variant: Variant, shape: Shape, tokens: Tensor, labels: Tensor) -> Step:
    torch.manual_seed(0)
    config = {
        "clip_grad_norm": MAX_NORM,
        "bf16": {"master_weights": not variant.pure},
        "compile": {"fullgraph": not shape.experts},
        **({"float8": {"recipe": variant.float8}} if variant.float8 else {}),
        **variant.options,
    }
    gpc = launch(config, context=ParallelContext(), verbose=False)
    options: dict[str, Any] = {"kv_heads": shape.kv_heads, "head_size": shape.head_size, "inner": shape.inner}
    if shape.experts:
        options |= {"experts": shape.experts, "qk_norm": True, "router": {"k": shape.choices, "balance_loss": 0.0}}
    sizes = shape.vocabulary, tokens.size(1), shape.hidden, shape.heads, shape.layers
    with torch.device("cuda"):
        model = Llama(*sizes, theta=THETA, eps=EPS, **options, **variant.model, context=gpc)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    engine, *_ = initialize(model, optimizer, model.criterion(), context=gpc)

    def step() -> Tensor:
        engine.zero_grad()
        outputs = engine(tokens)
        loss = engine.criterion(*(outputs if isinstance(outputs, tuple) else (outputs,)), labels)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def by_hand(variant: Variant, shape: Shape, tokens: Tensor, labels: Tensor) -> Step:
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Plain(shape, tokens.size(1))
    if variant.pure:
        turns = model.cos, model.sin
        model.bfloat16()
        model.cos, model.sin = turns
    for module in (*model.blocks, model.head):
        module.compile(fullgraph=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=not variant.pure):
            loss: Tensor = model(tokens, labels)
        loss.backward()
        clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        return loss.detach()

    return step


if __name__ == "__main__":
    sys.exit(main())
