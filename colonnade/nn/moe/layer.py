"""The mixture-of-experts layer: route, send tokens to their experts, bring back what they make of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.errors import ConfigError, ScheduleError
from colonnade.nn.layer import arrange, gather_output, partition_input
from colonnade.nn.moe.dispatch import Order, Traffic, combine, dispatch, order
from colonnade.nn.moe.experts import Experts
from colonnade.nn.moe.router import Routing, SwitchRouter, TopKRouter
from colonnade.nn.moe.scope import Scope
from colonnade.parallel.collectives import all_to_all, copy, gather, reduce, scatter, split_sizes


@dataclass(frozen=True)
class Statistics:
    """What the router of one rank did at the last forward pass, as device tensors."""

    assignments: Tensor
    """For each expert, how many assignments of this rank's tokens chose it."""
    dropped: Tensor
    """How many of them were dropped."""


class MoE(nn.Module):
    """A feed-forward layer of many experts, each token using few: (..., hidden) -> the same shape.

    `experts`: their number, or an Experts. `router`: SwitchRouter unless given. Experts lie on the expert mode of the
    context; tokens go to them and back by two all-to-alls, of any sizes, also none. A token whose assignments are all
    dropped gives zeros, so put the layer beside a residual connection.
    """

    def __init__(
        self,
        hidden: int,
        experts: int | Experts,
        router: TopKRouter | None = None,
        *,
        inner: int | None = None,
        activation: Callable[[Tensor], Tensor] = F.gelu,
        gated: bool = False,
        bias: bool = True,
        context: ParallelContext | None = None,
    ) -> None:
        super().__init__()
        if isinstance(experts, int):
            inner = 4 * hidden if inner is None else inner
            experts = Experts(hidden, inner, experts, activation=activation, gated=gated, bias=bias, context=context)
        self.router = router or SwitchRouter(hidden, experts.experts, context=context)
        self.experts = experts
        if self.router.experts != experts.experts:
            raise ConfigError(
                f"the router knows {self.router.experts} experts, but there are {experts.experts}; give both one number"
            )
        self._arrangement = arrange(context)  # the tensor mode's; experts take whole tokens, whatever it makes of them
        self.loss: Tensor | None = None
        """The auxiliary loss of the last forward pass, until auxiliary_loss(model) takes it."""
        self.statistics: Statistics | None = None

    def forward(self, x: Tensor, loss: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """The layer's output; with `loss`, (output, loss + this layer's auxiliary loss), for pipelines."""
        scope, here = self.experts.scope, self._arrangement
        entered = gather_output(x, arrangement=here)
        tokens = entered.reshape(-1, entered.size(-1))
        shares = split_sizes(len(tokens), ParallelMode.TENSOR, context=scope.context) if scope.shares_tokens else ()
        if scope.shares_tokens:
            tokens = scatter(tokens, ParallelMode.TENSOR, 0, shares, context=scope.context)
        routing = self.router(tokens)
        out = self._mixed(tokens, routing, scope)
        if scope.shares_tokens:
            out = gather(out, ParallelMode.TENSOR, 0, shares, context=scope.context)
        out = partition_input(out.view_as(entered), arrangement=here)
        if loss is not None:
            return out, loss if routing.loss is None else loss + routing.loss
        self._keep(routing.loss, scope)
        return out

    def _mixed(self, tokens: Tensor, routing: Routing, scope: Scope) -> Tensor:
        weights, context = routing.weights.to(tokens.dtype), scope.context
        if self.experts.splits_inner:
            tokens = copy(tokens, ParallelMode.TENSOR, context=context)
            weights = copy(weights, ParallelMode.TENSOR, context=context)
        sent = order(routing)
        dropped = routing.counts.sum() - sent.counts.sum()
        self.statistics = Statistics(routing.counts.sum(0), dropped)
        traffic = Traffic.of(sent.counts, scope.expert, context)
        count = sum(traffic.send)
        rows = self._visit(dispatch(tokens, sent, count), traffic, context)
        out = combine(rows * _weights_of(weights, sent, count), sent, count)
        return reduce(out, ParallelMode.TENSOR, context=context) if self.experts.splits_inner else out

    def _visit(self, rows: Tensor, traffic: Traffic, context: ParallelContext) -> Tensor:
        """Send rows to the experts' ranks and bring back what the experts make of them."""
        mode = ParallelMode.EXPERT
        there = all_to_all(rows, mode, traffic.send, traffic.arrivals, context=context)
        made = self.experts(traffic.by_expert(there), traffic.per_expert)
        return all_to_all(traffic.by_rank(made), mode, traffic.arrivals, traffic.send, context=context)

    def _keep(self, loss: Tensor | None, scope: Scope) -> None:
        if loss is not None and scope.context.pipeline_parallel_size > 1:
            raise ScheduleError(
                "under a pipeline the loss is computed at the last stage, and this layer's auxiliary loss would be lost: "
                "call y, loss = moe(x, loss), hand (y, loss) on from stage to stage, and add it in the criterion; or set "
                "balance_loss=0 and z_loss=0 on the router and balance by bias_rate"
            )
        self.loss = loss


def auxiliary_loss(model: nn.Module) -> Tensor | float:
    """The sum of the auxiliary losses of all MoE layers' last forward passes; each is taken once."""
    total: Tensor | float = 0.0
    for module in model.modules():
        if isinstance(module, MoE) and module.loss is not None:
            total, module.loss = total + module.loss, None
    return total


def _weights_of(weights: Tensor, sent: Order, count: int) -> Tensor:
    """(choices, tokens) -> the weight of each row that is sent."""
    return torch.index_select(weights.flatten(), 0, sent.rows[:count]).unsqueeze(1)
