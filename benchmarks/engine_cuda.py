"""The engine on one GPU: bf16, torch.compile, clipping and the flat step, over the same written by hand in torch; and with CUDA graphs.

`python benchmarks/engine_cuda.py --json` prints one object last; times are medians of CUDA events, interleaved.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _measure import has_device, interleave, report, timed_on_gpu
from _models import Block
from torch import Tensor, nn

from colonnade import initialize, launch
from colonnade.context.parallel_context import ParallelContext

GOALS = {"engine": 1.00, "engine, recorded": 1 / 1.5}
"""Over the same by hand; `recorded`: with `cuda_graph`, over the same by hand without torch.compile."""


class Model(nn.Module):
    """About 100 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(16384, 768)
        self.blocks = nn.Sequential(*(Block(768, 12) for _ in range(12)))
        self.head = nn.Linear(768, 16384, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.tokens(x)))


def loss_of(model: Callable[[Tensor], Tensor], tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())


def by_hand(tokens: Tensor, compiles: bool = True) -> Callable[[], None]:
    torch.manual_seed(0)
    model = Model().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    compiled = torch.compile(model) if compiles else model

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = loss_of(compiled, tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def by_engine(tokens: Tensor) -> Callable[[], None]:
    torch.manual_seed(0)
    gpc = launch({"clip_grad_norm": 1.0, "bf16": True}, context=ParallelContext(), verbose=False)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    engine, *_ = initialize(model, optimizer, context=gpc)
    compiled = torch.compile(model)

    def step() -> None:
        engine.zero_grad()
        engine.backward(loss_of(compiled, tokens))
        engine.step()

    return step


def recorded(tokens: Tensor, compiles: bool = False) -> Callable[[], None]:
    """The engine with `cuda_graph`."""
    torch.manual_seed(0)
    config = {
        "clip_grad_norm": 1.0,
        "bf16": True,
        "cuda_graph": True,
        "compile": {"blocks": False} if compiles else False,
    }
    gpc = launch(config, context=ParallelContext(), verbose=False)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    engine, *_ = initialize(model, optimizer, _loss_of_logits, context=gpc)

    def step() -> None:
        engine.zero_grad()
        engine.execute_schedule(iter([(tokens, tokens)]), return_output_label=False)
        engine.step()

    return step


def _loss_of_logits(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=30)
    arguments = parser.parse_args()
    if not has_device("cuda"):
        return 0
    tokens = torch.randint(0, 16384, (8, 512), device="cuda")
    steps = {
        "ours": by_engine(tokens),
        "theirs": by_hand(tokens),
        "theirs, eager": by_hand(tokens, compiles=False),
        "recorded": recorded(tokens),
        "recorded, compiled": recorded(tokens, compiles=True),
    }
    turns = {name: partial(timed_on_gpu, step) for name, step in steps.items()}
    interleave(turns, 8)
    medians = interleave(turns, arguments.rounds)
    dist.destroy_process_group()
    ratios = {
        "engine": medians["ours"] / medians["theirs"],
        "engine, recorded": medians["recorded"] / medians["theirs, eager"],
        "engine, recorded and compiled": medians["recorded, compiled"] / medians["theirs"],
    }
    return 0 if report(ratios, GOALS, arguments.json, milliseconds=medians) else 1


if __name__ == "__main__":
    sys.exit(main())
