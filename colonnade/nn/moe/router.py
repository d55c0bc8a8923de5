"""Routers: which experts a token goes to and with which weights, and what keeps the experts equally busy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.errors import ConfigError
from colonnade.nn.moe.dispatch import Scope, counted
from colonnade.parallel.placement import Replicate, place

Over = Literal["batch", "rank"]
"""What a capacity or an auxiliary loss is taken over: the tokens of all ranks together, or each rank's own."""


@dataclass(frozen=True)
class Routing:
    """Where the tokens of one rank go. Assignments lie choice by choice: all first choices, then all second ones."""

    experts: Tensor
    """(choices, tokens): the chosen experts."""
    weights: Tensor
    """(choices, tokens): what an expert's output is multiplied by."""
    counts: Tensor
    """(choices, experts): how many tokens chose each expert."""
    chosen: Tensor
    """(experts): how many assignments chose each."""
    limits: Tensor | None
    """(experts): how many of this rank's assignments each expert takes, the first ones; None: all."""
    logits: Tensor
    scores: Tensor
    """(tokens, experts): what the choice was made by; the auxiliary losses are made of them."""

    @property
    def kept(self) -> Tensor:
        """(experts): how many assignments each expert takes."""
        return self.chosen if self.limits is None else self.limits


class TopKRouter(nn.Module):
    """Sends each token to the `k` experts with the highest scores.

    `score`: "softmax" over the experts, or "sigmoid" of each. `normalize`: the weights of a token's experts add up to
    one, and they are multiplied by `scale`. `groups`: the experts lie in so many groups, one after another, as on nodes,
    and a token goes to experts of the `top_groups` alone in which the two best experts have the highest scores together.
    `capacity`: an expert takes at most capacity x (assignments / experts) of them and the rest are dropped, by
    order: first choices before second ones, then in the order of ranks and tokens; None drops nothing. `balance_loss`
    and `z_loss`: the weights of the auxiliary losses. `over`: whether capacity and losses are those of the joined
    batch, as in one process, or each rank's own. `bias_rate`: step of the bias that balances without a loss; see
    balance_experts. `noise`: relative noise on the router's input in training.
    """

    steps: Tensor
    load: Tensor

    def __init__(
        self,
        hidden: int,
        experts: int,
        k: int = 2,
        *,
        score: Literal["softmax", "sigmoid"] = "softmax",
        normalize: bool = True,
        scale: float = 1.0,
        groups: int = 1,
        top_groups: int = 1,
        capacity: float | None = None,
        balance_loss: float = 0.01,
        z_loss: float = 0.0,
        over: Over = "batch",
        bias_rate: float = 0.0,
        noise: float = 0.0,
        context: ParallelContext | None = None,
    ) -> None:
        super().__init__()
        _check(experts, k, score, capacity, over, noise, groups, top_groups)
        self.experts, self.k, self.score, self.normalize = experts, k, score, normalize
        self.capacity, self.balance_loss, self.z_loss, self.over = capacity, balance_loss, z_loss, over
        self.bias_rate, self.noise, self.scale = bias_rate, noise, scale
        self.groups, self.top_groups = groups, top_groups
        self.scope = Scope.of(context)
        self.weight = nn.Parameter(torch.empty(experts, hidden))
        nn.init.normal_(self.weight, std=hidden**-0.5)
        if self.scope.shares_tokens:
            place(self.weight, {ParallelMode.TENSOR: Replicate(owes="sum")})
        # Whole numbers: they stay exact when the model is cast to half precision.
        self.register_buffer("steps", torch.zeros(experts, dtype=torch.int64))
        self.register_buffer("load", torch.zeros(experts, dtype=torch.int64), persistent=False)

    @property
    def bias(self) -> Tensor:
        """What is added to the scores for the choice alone."""
        return self.steps.double() * self.bias_rate

    @property
    def has_loss(self) -> bool:
        """Whether there is an auxiliary loss to add to the loss."""
        return self.training and bool(self.balance_loss or self.z_loss)

    def forward(self, x: Tensor) -> Routing:
        """Route tokens (tokens, hidden)."""
        logits = self._logits(x)
        scores = logits.softmax(-1) if self.score == "softmax" else logits.sigmoid()
        with torch.no_grad():
            # The bias decides who is chosen, and only that.
            ranking = scores + self.bias if self.bias_rate else scores
            experts = self._of_best_groups(ranking).topk(self.k, dim=-1).indices
            by_choice = experts.T.contiguous()
            counts = counted(by_choice, self.experts)
            chosen = counts.sum(0)
            if self.training and self.bias_rate:
                self.load += chosen
            limits = None if self.capacity is None else self._limits(counts, self.capacity)
        weights = scores.gather(1, experts)
        if self.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        if self.scale != 1.0:
            weights = weights * self.scale
        return Routing(by_choice, weights.T, counts, chosen, limits, logits, scores)

    def _of_best_groups(self, ranking: Tensor) -> Tensor:
        """The scores that the choice is made by, without those of the groups that a token does not go to."""
        if self.top_groups == self.groups:
            return ranking
        grouped = ranking.unflatten(1, (self.groups, -1))
        together = grouped.topk(min(2, grouped.size(-1)), dim=-1).values.sum(-1)
        best = together.topk(self.top_groups, dim=-1).indices
        others = torch.ones_like(together, dtype=torch.bool).scatter_(1, best, False)
        return grouped.masked_fill(others.unsqueeze(-1), -torch.inf).flatten(1)

    def _logits(self, x: Tensor) -> Tensor:
        """In at least float32: who is chosen must not hang on a rounding."""
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        if self.training and self.noise:
            x = x * torch.empty_like(x).uniform_(1 - self.noise, 1 + self.noise)
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x, self.weight.to(x.dtype))

    def _limits(self, counts: Tensor, capacity: float) -> Tensor:
        """How many of this rank's assignments to each expert lie below the capacity: a prefix of them, by order."""
        everyone, at = self.scope.gathered(counts) if self.over == "batch" else (counts.unsqueeze(0), 0)
        share = everyone.sum().double() * (capacity / self.experts)
        # How many come before mine at each choice: all of earlier choices, and those of earlier ranks at this one.
        total = everyone.sum(0)
        before = total.cumsum(0) - total + everyone[:at].sum(0)
        most = (share.ceil().to(torch.int64) - before).clamp(min=0)
        return torch.minimum(counts, most).sum(0)

    def sums(self, routing: Routing) -> Tensor | None:
        """What the auxiliary losses are made of, to be added up over the ranks by loss_of; None where there are none.

        balance_loss x experts x sum(share of assignments x mean probability), and z_loss x mean(logsumexp^2).
        """
        if not self.has_loss:
            return None
        scores, weighted, factors = routing.scores, [], []
        tokens = scores.new_full((1,), len(scores))
        if self.balance_loss:
            probabilities = scores if self.score == "softmax" else scores / scores.sum(-1, keepdim=True)
            weighted.append(probabilities.sum(0) * (self.balance_loss * self.experts / self.k))
            factors.append(routing.chosen.to(scores.dtype))
        if self.z_loss:
            weighted.append(routing.logits.logsumexp(-1).square().sum().reshape(1) * self.z_loss)
            factors.append(tokens)
        sums = torch.stack([torch.cat(weighted), torch.cat(factors), tokens.expand(sum(map(len, factors)))])
        own = F.pad(_of(sums).reshape(1, 1), (0, 0, 0, 2)) if self.over == "rank" else sums.new_zeros(3, 1)
        return own if self.over == "rank" else torch.cat([own, sums], 1)

    def extra_repr(self) -> str:
        return f"experts={self.experts}, k={self.k}, capacity={self.capacity}, over={self.over!r}"


class SwitchRouter(TopKRouter):
    """Sends each token to one expert and multiplies what comes back by its probability; options as for TopKRouter."""

    def __init__(self, hidden: int, experts: int, **options: Any) -> None:
        super().__init__(hidden, experts, 1, normalize=False, **options)


def balance_experts(model: nn.Module) -> None:
    """After an optimizer step: move the bias of every router that has a bias_rate. Collective over the batch's ranks.

    An expert that took more than its share since the last call loses `bias_rate`, one that took less gains it.
    """
    routers = [module for module in model.modules() if isinstance(module, TopKRouter) and module.bias_rate]
    if not routers:
        return
    with torch.no_grad():
        first, *_ = routers
        loads = first.scope.summed(torch.cat([router.load for router in routers]))
        for router, load in zip(routers, loads.split([router.experts for router in routers]), strict=True):
            router.steps += (load.sum() - load * router.experts).sign()
            router.load.zero_()


def joined(sums: Sequence[Tensor]) -> Tensor:
    """The sums of several routers as one: (3, n). Column 0 has losses that are each rank's own, already made."""
    return torch.cat([torch.stack([each[:, :1] for each in sums]).sum(0), *(each[:, 1:] for each in sums)], 1)


def loss_of(sums: Tensor, scope: Scope) -> Tensor:
    """The auxiliary losses that `sums` are the sums of; those over the batch are added up over its ranks at once."""
    own = sums[0, 0]
    return own if sums.size(1) == 1 else own + _of(scope.summed(sums[:, 1:]))


def _of(sums: Tensor) -> Tensor:
    """Sums over tokens times how often, over tokens squared."""
    weighted, factors, tokens = sums
    return (weighted * factors / tokens.clamp(min=1).square()).sum()


def _check(
    experts: int, k: int, score: str, capacity: float | None, over: str, noise: float, groups: int, top_groups: int
) -> None:
    size = experts // max(1, groups)
    room = f"between 1 and all {groups} groups, of {size} experts each, with at least k={k} in them"
    problems = [
        (not 1 <= k <= experts, f"k={k}: a token goes to between 1 and all {experts} experts"),
        (score not in ("softmax", "sigmoid"), f"score={score!r}: allowed are 'softmax' and 'sigmoid'"),
        (over not in ("batch", "rank"), f"over={over!r}: allowed are 'batch' and 'rank'"),
        (capacity is not None and not capacity > 0, f"capacity={capacity}: a factor above 0, or None to drop nothing"),
        (not 0 <= noise < 1, f"noise={noise}: from 0 to below 1"),
        (size * groups != experts, f"groups={groups}: a number that divides the {experts} experts"),
        (top_groups > groups or top_groups * size < k, f"top_groups={top_groups}: {room}"),
    ]
    for wrong, message in problems:
        if wrong:
            raise ConfigError(f"router: {message}")
