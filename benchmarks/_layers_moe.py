"""The case `moe` of layers.py: our MoE layer, and the same written by hand with torch's all_to_all_single.

Two ranks, eight experts, top 2 without drops; forward and backward.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from colonnade import launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.nn.moe import MoE, TopKRouter

GOAL = 1.05
RANKS, TOKENS, HIDDEN, INNER, EXPERTS, CHOICES = 2, 1024, 256, 512, 8, 2


def ours() -> Callable[[str], float]:
    """The layer as a user has it."""
    context = launch({"parallel": {"expert": RANKS}}, context=ParallelContext(), verbose=False)
    torch.manual_seed(0)
    router = TopKRouter(HIDDEN, EXPERTS, CHOICES, balance_loss=0.0, context=context)
    return _timer(MoE(HIDDEN, EXPERTS, router, inner=INNER, bias=False, context=context))


def by_hand() -> Callable[[str], float]:
    """What a person would write with torch alone."""
    torch.manual_seed(0)
    return _timer(HandWritten())


class Exchange(torch.autograd.Function):
    """all_to_all_single of uneven rows, and back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, send: list[int], receive: list[int]) -> Tensor:
        ctx.sizes = send, receive
        out = x.new_empty(sum(receive), x.size(1))
        dist.all_to_all_single(out, x.contiguous(), receive, send)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        send, receive = ctx.sizes
        out = grad.new_empty(sum(send), grad.size(1))
        dist.all_to_all_single(out, grad.contiguous(), send, receive)
        return out, None, None


class HandWritten(nn.Module):
    """Sort by expert, exchange sizes, exchange rows, sort by local expert, compute, and all of it back."""

    def __init__(self) -> None:
        super().__init__()
        self.here = EXPERTS // RANKS
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        nn.init.normal_(self.router.weight, std=HIDDEN**-0.5)
        self.up = nn.ModuleList(nn.Linear(HIDDEN, INNER, bias=False) for _ in range(self.here))
        self.down = nn.ModuleList(nn.Linear(INNER, HIDDEN, bias=False) for _ in range(self.here))

    def forward(self, x: Tensor) -> Tensor:
        weights, experts = self.router(x).softmax(-1).topk(CHOICES)
        weights = weights / weights.sum(-1, keepdim=True)
        order = experts.flatten().argsort(stable=True)
        counts = experts.flatten().bincount(minlength=EXPERTS)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts)
        sent, arrived = counts.view(RANKS, -1).tolist(), theirs.view(RANKS, -1).tolist()
        send, receive = [sum(row) for row in sent], [sum(row) for row in arrived]
        rows = Exchange.apply(x[order // CHOICES], send, receive)
        local = torch.arange(self.here).repeat(RANKS).repeat_interleave(theirs).argsort(stable=True)
        parts = rows[local].split([sum(column) for column in zip(*arrived, strict=True)])
        made = torch.cat([self.down[at](F.gelu(self.up[at](part))) for at, part in enumerate(parts)])
        back = torch.empty_like(local)
        back[local] = torch.arange(len(local))
        rows = Exchange.apply(made[back], receive, send) * weights.flatten()[order].unsqueeze(1)
        return torch.zeros_like(x).index_add(0, order // CHOICES, rows)


def _timer(layer: nn.Module) -> Callable[[str], float]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(TOKENS, HIDDEN, generator=generator).requires_grad_()
    grad = torch.randn(TOKENS, HIDDEN, generator=generator)

    def answer(command: str) -> float:
        layer.zero_grad(set_to_none=True)
        x.grad = None
        dist.barrier()
        begin = time.perf_counter()
        layer(x).backward(grad)
        return time.perf_counter() - begin

    return answer
