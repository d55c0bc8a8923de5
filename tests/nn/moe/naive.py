"""Mixtures of experts token by token, in plain loops: the truth that layers are compared with."""

from __future__ import annotations

from math import ceil

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from colonnade.context.parallel_context import ParallelContext
from colonnade.nn.moe import MoE
from tests.nn.sequence.training import numbers

HIDDEN = 6


class Net(nn.Module):
    """Linear, experts beside a residual connection, head."""

    def __init__(self, moe: MoE) -> None:
        super().__init__()
        self.inside = nn.Linear(HIDDEN, HIDDEN)
        self.moe = moe
        self.head = nn.Linear(HIDDEN, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.inside(x)
        return self.head(x + self.moe(x))


class Naive(Net):
    """The same in loops. `loss` is the auxiliary loss of the last forward pass, `dropped` the assignments dropped."""

    def __init__(self, moe: MoE) -> None:
        super().__init__(moe)
        assert moe.experts.scope.context.world_size == 1
        self.loss: Tensor = torch.zeros(())
        self.dropped: list[tuple[int, int]] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.inside(x)
        tokens = x.reshape(-1, HIDDEN)
        return self.head(x + self.mixed(tokens).view_as(x))

    def mixed(self, tokens: Tensor) -> Tensor:
        router = self.moe.router
        logits = tokens @ router.weight.T
        scores = logits.softmax(-1) if router.score == "softmax" else logits.sigmoid()
        chosen = self.allowed(scores + router.bias).topk(router.k).indices
        router.load += torch.bincount(chosen.flatten(), minlength=router.experts)
        weights = scores.gather(1, chosen)
        weights = router.scale * (weights / weights.sum(1, keepdim=True) if router.normalize else weights)
        self.loss = self.auxiliary(logits, scores, chosen)
        kept = self.kept(chosen)
        rows = []
        for token in range(len(tokens)):
            row = torch.zeros(HIDDEN, dtype=tokens.dtype)
            for choice in range(router.k):
                if (choice, token) in kept:
                    row = row + weights[token, choice] * self.expert(int(chosen[token, choice]), tokens[token])
            rows.append(row)
        mixed = torch.stack(rows)
        return mixed if self.moe.shared is None else mixed + self.moe.shared(tokens)

    def allowed(self, scores: Tensor) -> Tensor:
        """The scores of experts in the best groups: those whose two best experts have the highest scores together."""
        router, allowed = self.moe.router, torch.full_like(scores, -torch.inf)
        size = router.experts // router.groups
        for token, row in enumerate(scores.tolist()):
            groups = [slice(at * size, (at + 1) * size) for at in range(router.groups)]
            groups.sort(key=lambda group: -sum(sorted(row[group])[-2:]))
            for group in groups[: router.top_groups]:
                allowed[token, group] = scores[token, group]
        return allowed

    def kept(self, chosen: Tensor) -> set[tuple[int, int]]:
        """First come, first served: first choices before second ones, then by token."""
        router = self.moe.router
        capacity = float("inf")
        if router.capacity is not None:
            capacity = ceil(chosen.numel() * (router.capacity / router.experts))
        taken, kept, self.dropped = [0] * router.experts, set(), []
        for choice in range(router.k):
            for token, expert in enumerate(chosen[:, choice].tolist()):
                if taken[expert] < capacity:
                    kept.add((choice, token))
                else:
                    self.dropped.append((choice, token))
                taken[expert] += 1
        return kept

    def expert(self, at: int, x: Tensor) -> Tensor:
        experts = self.moe.experts
        inside = x @ experts.up[at]
        inside = inside + experts.up_bias[at] if experts.up_bias is not None else inside
        inside = F.gelu(x @ experts.gate[at]) * inside if experts.gate is not None else F.gelu(inside)
        out = inside @ experts.down[at]
        return out + experts.down_bias[at] if experts.down_bias is not None else out

    def auxiliary(self, logits: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
        router = self.moe.router
        share = torch.stack([(chosen == expert).double().mean() for expert in range(router.experts)])
        probability = (scores / scores.sum(1, keepdim=True)).mean(0)
        balance = router.experts * (share * probability).sum()
        return router.balance_loss * balance + router.z_loss * (logits.logsumexp(1) ** 2).mean()


def alone() -> ParallelContext:
    """The context of one process."""
    return ParallelContext()


def batch(part: int, step: int, rows: int = 5) -> tuple[Tensor, Tensor]:
    seed = 1000 * step + part
    return numbers(rows, 2, HIDDEN, seed=seed), numbers(rows, 2, 3, seed=5000 + seed)
