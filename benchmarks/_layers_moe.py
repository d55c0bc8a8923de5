"""The case `moe` of layers.py: our MoE layer, and the same written by hand with all_to_all_single and grouped_mm.

Two ranks, eight experts, top 2 without drops; forward and backward. _kernels_experts.py measures the same on a GPU.
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
    return _timer(HandWritten(RANKS, HIDDEN, INNER, EXPERTS, CHOICES))


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

    def __init__(self, ranks: int, hidden: int, inner: int, experts: int, choices: int, gated: bool = False) -> None:
        super().__init__()
        self.ranks, self.experts, self.choices, here = ranks, experts, choices, experts // ranks
        self.router = nn.Linear(hidden, experts, bias=False)
        nn.init.normal_(self.router.weight, std=hidden**-0.5)
        self.up, self.down = _weight(here, hidden, inner), _weight(here, inner, hidden)
        self.gate = _weight(here, hidden, inner) if gated else None

    def forward(self, x: Tensor) -> Tensor:
        logits = F.linear(x.float(), self.router.weight.float())
        weights, experts = logits.softmax(-1).topk(self.choices)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        order = experts.flatten().argsort(stable=True)
        counts = torch.zeros(self.experts, dtype=torch.int64, device=x.device)
        counts.scatter_add_(0, experts.flatten(), torch.ones_like(order))
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts)
        arrived = theirs.view(self.ranks, -1)
        send, receive = torch.stack([counts.view(self.ranks, -1), arrived]).sum(-1).tolist()
        rows = Exchange.apply(x[order // self.choices], send, receive)
        experts_of_rows = torch.arange(arrived.size(1), device=x.device).repeat(self.ranks)
        local = experts_of_rows.repeat_interleave(theirs, output_size=len(rows)).argsort(stable=True)
        made = self.made(rows[local], arrived.sum(0).cumsum(0, dtype=torch.int32))
        rows = Exchange.apply(made[_inverse(local)], receive, send)
        # A sum of gathered rows: index_add would add them with atomics on a GPU.
        back = rows[_inverse(order)].view(len(x), self.choices, -1)
        return (back * weights.unsqueeze(-1)).sum(1)

    def made(self, rows: Tensor, ends: Tensor) -> Tensor:
        inside = F.grouped_mm(rows, self.up, offs=ends)
        inside = F.gelu(inside) if self.gate is None else F.silu(F.grouped_mm(rows, self.gate, offs=ends)) * inside
        return F.grouped_mm(inside, self.down, offs=ends)


def _weight(experts: int, inputs: int, outputs: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(experts, inputs, outputs).uniform_(-(inputs**-0.5), inputs**-0.5))


def _inverse(order: Tensor) -> Tensor:
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


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
