"""The mixture-of-experts layer: route, send tokens to their experts, bring back what they make of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import overload

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.errors import ConfigError, ScheduleError
from colonnade.nn.layer import arrange, gather_output, partition_input
from colonnade.nn.moe.dispatch import Order, Scope, Traffic, combine, dispatch, exchange, order
from colonnade.nn.moe.experts import Experts
from colonnade.nn.moe.router import Routing, SwitchRouter, TopKRouter, joined, loss_of
from colonnade.parallel.collectives import copy, gather, reduce, scatter, split_sizes


@dataclass(frozen=True)
class Statistics:
    """What the router of one rank did at the last forward pass, as device tensors."""

    assignments: Tensor
    """For each expert, how many assignments of this rank's tokens chose it."""
    dropped: Tensor
    """How many of them were dropped."""


class MoE(nn.Module):
    """A feed-forward layer of many experts, each token using few: (..., hidden) -> the same shape.

    `experts`: their number, or an Experts. `router`: SwitchRouter unless given. `shared`: a layer that every token goes
    through besides, such as MLP(hidden, inner); what it gives is added. Experts lie on the expert mode of the
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
        shared: nn.Module | None = None,
        context: ParallelContext | None = None,
    ) -> None:
        super().__init__()
        if isinstance(experts, int):
            inner = 4 * hidden if inner is None else inner
            experts = Experts(hidden, inner, experts, activation=activation, gated=gated, bias=bias, context=context)
        self.router = router or SwitchRouter(hidden, experts.experts, context=context)
        self.experts = experts
        self.shared = shared
        if self.router.experts != experts.experts:
            raise ConfigError(
                f"the router knows {self.router.experts} experts, but there are {experts.experts}; give both one number"
            )
        if not (shared is None or isinstance(shared, nn.Module)):
            raise ConfigError(
                f"shared={shared!r}: give a layer that takes and gives {hidden} features, such as MLP, or None"
            )
        self._arrangement = arrange(context)  # the tensor mode's; experts take whole tokens, whatever it makes of them
        self.sums: Tensor | None = None
        """What the auxiliary loss of the last forward pass is made of, until auxiliary_loss(model) takes it."""
        self.statistics: Statistics | None = None

    def forward(self, x: Tensor, loss: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """The layer's output; with `loss`, (output, loss and this layer's auxiliary loss), for pipelines.

        `loss` is what the layer before gave. The first gets no_losses(): then nothing is added up over the ranks before
        auxiliary_loss(loss) makes a loss of it. Or it gets a scalar, to which every layer adds its own at once.
        """
        scope, here = self.experts.scope, self._arrangement
        entered = gather_output(x, arrangement=here)
        tokens = entered.reshape(-1, entered.size(-1))
        shares = split_sizes(len(tokens), ParallelMode.TENSOR, context=scope.context) if scope.shares_tokens else ()
        if scope.shares_tokens:
            tokens = scatter(tokens, ParallelMode.TENSOR, 0, shares, context=scope.context)
        routing = self.router(tokens)
        traffic = Traffic(routing.kept, scope.expert, scope.context) if scope.expert > 1 else None
        # All this is under way before the host waits for the sizes of the traffic.
        sent = order(routing.experts, routing.chosen, routing.limits)
        sums = self.router.sums(routing)
        shared = None if self.shared is None else self.shared(x)
        self.statistics = Statistics(routing.chosen, routing.chosen.sum() - routing.kept.sum())
        out = self._mixed(tokens, routing, sent, traffic)
        if scope.shares_tokens:
            out = gather(out, ParallelMode.TENSOR, 0, shares, context=scope.context)
        out = partition_input(out.view_as(entered), arrangement=here)
        out = out if shared is None else out + shared
        if loss is not None:
            return out, loss if sums is None else self._added(loss, sums)
        self._keep(sums)
        return out

    def _mixed(self, tokens: Tensor, routing: Routing, sent: Order, traffic: Traffic | None) -> Tensor:
        weights, context = routing.weights, self.experts.scope.context
        if self.experts.splits_inner:
            tokens = copy(tokens, ParallelMode.TENSOR, context=context)
            weights = copy(weights, ParallelMode.TENSOR, context=context)
        if traffic is None:
            rows = self.experts(dispatch(tokens, sent), routing.kept)
            out = combine(rows, weights.T.to(rows.dtype), sent)
        else:
            made = partial(traffic.by_expert, experts=self.experts)
            out = exchange(tokens, weights.T, sent, traffic, made, context)
        return reduce(out, ParallelMode.TENSOR, context=context) if self.experts.splits_inner else out

    def _added(self, loss: Tensor, sums: Tensor) -> Tensor:
        if not loss.dim():
            return loss + loss_of(sums, self.experts.scope)
        if loss.dim() != 2 or len(loss) != 3:
            raise ScheduleError(
                f"moe(x, loss) takes what the layer before gave, no_losses(x) or a scalar, not {tuple(loss.shape)}"
            )
        return joined([loss, sums])

    def _keep(self, sums: Tensor | None) -> None:
        if sums is not None and self.experts.scope.context.pipeline_parallel_size > 1:
            raise ScheduleError(
                "under a pipeline the loss is computed at the last stage, and this layer's auxiliary loss would be lost: "
                "call y, loss = moe(x, loss), hand (y, loss) on from stage to stage, and add it in the criterion; or set "
                "balance_loss=0 and z_loss=0 on the router and balance by bias_rate"
            )
        self.sums = sums


def no_losses(like: Tensor) -> Tensor:
    """The auxiliary losses of no layer, on the device of `like`: what the first layer is given, y, loss = moe(x, loss)."""
    return torch.zeros(3, 1, device=like.device)


@overload
def auxiliary_loss(of: Tensor, *, context: ParallelContext | None = None) -> Tensor: ...


@overload
def auxiliary_loss(of: nn.Module, *, context: ParallelContext | None = None) -> Tensor | float: ...


def auxiliary_loss(of: nn.Module | Tensor, *, context: ParallelContext | None = None) -> Tensor | float:
    """The sum of the auxiliary losses of all MoE layers' last forward passes; each is taken once.

    Of a model, or of what its layers handed on from no_losses(). Losses over the batch take one all-reduce for all
    layers, and one in backward.
    """
    if isinstance(of, Tensor):
        return loss_of(of, Scope.of(context))
    layers = [module for module in of.modules() if isinstance(module, MoE) and module.sums is not None]
    if not layers:
        return 0.0
    sums = joined([layer.sums for layer in layers if layer.sums is not None])
    for layer in layers:
        layer.sums = None
    first, *_ = layers
    return loss_of(sums, first.experts.scope)
