"""Routers: the experts and weights of each token, and load balancing."""

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
"""The scope of capacity and auxiliary losses: the tokens of all ranks (the global batch), or each rank's own."""


@dataclass(frozen=True)
class Routing:
    """The assignments of one rank's tokens to experts, ordered by choice: all first choices, then all second ones."""

    experts: Tensor
    """(choices, tokens): the chosen experts."""
    weights: Tensor
    """(choices, tokens): the factors of the experts' outputs."""
    counts: Tensor
    """(choices, experts): the number of tokens that chose each expert."""
    chosen: Tensor
    """(experts): the number of assignments to each expert."""
    limits: Tensor | None
    """(experts): the number of this rank's assignments that each expert accepts; later ones are dropped.

    None: all are accepted.
    """
    logits: Tensor
    scores: Tensor
    """(tokens, experts): the router's scores, from which the auxiliary losses are computed."""

    @property
    def kept(self) -> Tensor:
        """The number of assignments that each expert accepts, (experts)."""
        return self.chosen if self.limits is None else self.limits


class TopKRouter(nn.Module):
    """Sends each token to the `k` experts with the highest scores.

    Args:
        hidden: The width of the tokens.
        experts: The number of experts.
        k: The number of experts per token.
        score: "softmax" over the experts, or "sigmoid" of each.
        normalize: Whether the weights of a token's experts add up to one.
        scale: Factor of the weights.
        groups: The number of groups into which consecutive experts are divided, for example one per node.
        top_groups: The number of groups whose experts a token may use: those whose two best experts have the highest
        total score. capacity: An expert accepts at most capacity x (assignments / experts); the rest is dropped, second
        choices first, then
            in reverse order of ranks and tokens. None drops nothing.
        balance_loss: Weight of the load-balancing loss.
        z_loss: Weight of the router z-loss.
        over: Whether capacity and losses are those of the global "batch", as in a single process, or of each "rank".
        bias_rate: Step of the bias for balancing without a loss; see `balance_experts`.
        noise: Relative noise on the router's input in training.
        context: Defaults to the global one.
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
        size = experts // max(1, groups)
        allowed_groups = f"must be from 1 to groups={groups}, with at least k={k} experts in them ({size} per group)"
        problems = [
            (not 1 <= k <= experts, f"k={k}: must be from 1 to experts={experts}"),
            (score not in ("softmax", "sigmoid"), f"score={score!r}: allowed are 'softmax' and 'sigmoid'"),
            (over not in ("batch", "rank"), f"over={over!r}: allowed are 'batch' and 'rank'"),
            (
                capacity is not None and not capacity > 0,
                f"capacity={capacity}: must be above 0, or None to drop nothing",
            ),
            (not 0 <= noise < 1, f"noise={noise}: must be from 0 to below 1"),
            (size * groups != experts, f"groups={groups}: must divide experts={experts}"),
            (top_groups > groups or top_groups * size < k, f"top_groups={top_groups}: {allowed_groups}"),
        ]
        for is_wrong, message in problems:
            if is_wrong:
                raise ConfigError(f"router: {message}")
        self.experts, self.k, self.score, self.normalize = experts, k, score, normalize
        self.capacity, self.balance_loss, self.z_loss, self.over = capacity, balance_loss, z_loss, over
        self.bias_rate, self.noise, self.scale = bias_rate, noise, scale
        self.groups, self.top_groups = groups, top_groups
        self.scope = Scope.of(context)
        self.weight = nn.Parameter(torch.empty(experts, hidden))
        nn.init.normal_(self.weight, std=hidden**-0.5)
        if self.scope.shares_tokens:
            place(self.weight, {ParallelMode.TENSOR: Replicate(owes="sum")})
        # Integers stay exact when the model is cast to half precision.
        self.register_buffer("steps", torch.zeros(experts, dtype=torch.int64))
        self.register_buffer("load", torch.zeros(experts, dtype=torch.int64), persistent=False)

    @property
    def bias(self) -> Tensor:
        """The bias on the scores that influences which experts are chosen, but not their weights."""
        return self.steps.double() * self.bias_rate

    @property
    def has_loss(self) -> bool:
        """Whether the router has an auxiliary loss."""
        return self.training and bool(self.balance_loss or self.z_loss)

    def forward(self, x: Tensor) -> Routing:
        """Choose the experts of tokens (tokens, hidden)."""
        # In float32 at least, even under autocast, so that rounding does not change the choice.
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        if self.training and self.noise:
            x = x * torch.empty_like(x).uniform_(1 - self.noise, 1 + self.noise)
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(x, self.weight.to(x.dtype))
        scores = logits.softmax(-1) if self.score == "softmax" else logits.sigmoid()
        with torch.no_grad():
            # The bias affects the choice, but not the weights.
            ranking = scores + self.bias if self.bias_rate else scores
            if self.top_groups < self.groups:
                grouped = ranking.unflatten(1, (self.groups, -1))
                group_scores = grouped.topk(min(2, grouped.size(-1)), dim=-1).values.sum(-1)
                best = group_scores.topk(self.top_groups, dim=-1).indices
                excluded = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, best, False)
                ranking = grouped.masked_fill(excluded.unsqueeze(-1), -torch.inf).flatten(1)
            experts = ranking.topk(self.k, dim=-1).indices
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

    def _limits(self, counts: Tensor, capacity: float) -> Tensor:
        """The number of this rank's assignments to each expert within the capacity."""
        gathered, at = self.scope.gathered(counts) if self.over == "batch" else (counts.unsqueeze(0), 0)
        limit = (gathered.sum().double() * (capacity / self.experts)).ceil().to(torch.int64)
        # Assignments of this rank are preceded by all earlier choices, and by earlier ranks at the same choice.
        total = gathered.sum(0)
        before = total.cumsum(0) - total + gathered[:at].sum(0)
        return torch.minimum(counts, (limit - before).clamp(min=0)).sum(0)

    def sums(self, routing: Routing) -> Tensor | None:
        """Return sums over this rank's tokens, from which `loss_of` computes the auxiliary losses; None without losses.

        The losses are balance_loss x experts x sum(fraction of assignments x mean probability), and z_loss x
        mean(logsumexp^2).
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
        # Column 0 is a loss over this rank's tokens; the other columns are sums over the global batch.
        local = F.pad(_weighted_mean(sums).reshape(1, 1), (0, 0, 0, 2)) if self.over == "rank" else sums.new_zeros(3, 1)
        return local if self.over == "rank" else torch.cat([local, sums], 1)

    def extra_repr(self) -> str:
        return f"experts={self.experts}, k={self.k}, capacity={self.capacity}, over={self.over!r}"


class SwitchRouter(TopKRouter):
    """Sends each token to one expert, whose output is multiplied by the router's probability. Options as for TopKRouter."""

    def __init__(self, hidden: int, experts: int, **options: Any) -> None:
        super().__init__(hidden, experts, 1, normalize=False, **options)


def balance_experts(model: nn.Module) -> None:
    """Update the bias of every router with a bias_rate; call it after the optimizer step.

    The bias decreases by `bias_rate` for an expert whose load since the last call is above the average, and increases
    for an expert whose load is below.

    Collective over the ranks with tokens of the global batch.
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
    """Concatenate the `sums` of several routers to one tensor of shape (3, n). The losses in column 0 are added."""
    return torch.cat([torch.stack([part[:, :1] for part in sums]).sum(0), *(part[:, 1:] for part in sums)], 1)


def loss_of(sums: Tensor, scope: Scope) -> Tensor:
    """Compute the total auxiliary loss from the `sums` of routers, with one all-reduce for losses over the global batch."""
    local = sums[0, 0]
    return local if sums.size(1) == 1 else local + _weighted_mean(scope.summed(sums[:, 1:]))


def _weighted_mean(sums: Tensor) -> Tensor:
    """(sum of weights) x (sum of factors) / tokens squared, added over the columns."""
    weighted, factors, tokens = sums
    return (weighted * factors / tokens.clamp(min=1).square()).sum()
