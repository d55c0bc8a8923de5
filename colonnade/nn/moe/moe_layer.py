"""The mixture-of-experts layer: route tokens, send them to their experts, combine the outputs."""

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
from colonnade.nn.moe.dispatch import Scope, Traffic, combine, dispatch, exchange, order
from colonnade.nn.moe.experts import Experts
from colonnade.nn.moe.router import SwitchRouter, TopKRouter, joined, loss_of
from colonnade.parallel.collectives import copy, gather, reduce, scatter, split_sizes


@dataclass(frozen=True)
class Statistics:
    """Routing statistics of one rank in the last forward pass, as device tensors."""

    assignments: Tensor
    """(experts), the number of assignments of this rank's tokens to each expert."""
    dropped: Tensor
    """The number of dropped assignments."""


class MoE(nn.Module):
    """A mixture-of-experts feed-forward layer: (..., hidden) -> the same shape.

    Experts are sharded over the expert mode of the context; tokens are sent to them and back by two all-to-alls of any
    sizes. The output is zero for a token whose assignments are all dropped, so the layer needs a residual connection.

    Args:
        hidden: The width of the tokens.
        experts: The number of experts, or an `Experts`.
        router: Defaults to `SwitchRouter`.
        inner: The inner width of an expert; defaults to 4 * hidden. Like `activation`, `gated` and `bias`, it is used if
            `experts` is a number.
        activation: The activation of the experts.
        gated: Whether the experts are gated; see `Experts`.
        bias: Whether the experts have biases.
        shared: A layer for every token, such as MLP(hidden, inner), whose output is added.
        context: Defaults to the global one.

    Example::

        from colonnade.nn.moe import MoE, TopKRouter

        gpc = colonnade.launch(dict(parallel=dict(expert=2)))
        layer = MoE(hidden=16, experts=4, router=TopKRouter(16, 4, k=2))  # two experts on each rank
        tokens = torch.randn(8, 16)
        output = tokens + layer(tokens)
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
                f"the router has {self.router.experts} experts, but the layer has {experts.experts}. Use the same "
                "number for both."
            )
        if not (shared is None or isinstance(shared, nn.Module)):
            raise ConfigError(
                f"shared is {shared!r}; pass a layer from {hidden} to {hidden} features, such as MLP, or None"
            )
        self._arrangement = arrange(context)
        self.sums: Tensor | None = None
        """Sums for the auxiliary loss of the last forward pass, until auxiliary_loss(model) consumes them."""
        self.statistics: Statistics | None = None

    def forward(self, x: Tensor, loss: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Return the layer's output; with `loss`, for pipelines, (output, loss including this layer's auxiliary loss).

        Args:
            x: Tokens in the outer spread.
            loss: The loss from the previous layer. For the first layer, it is no_losses(), if auxiliary_loss() reduces the result
                over the ranks once; or a scalar, to which every layer adds its own reduced loss.
        """
        scope, here = self.experts.scope, self._arrangement
        # Experts take full tokens in every tensor mode.
        entered = gather_output(x, arrangement=here)
        tokens = entered.reshape(-1, entered.size(-1))
        sizes = split_sizes(len(tokens), ParallelMode.TENSOR, context=scope.context) if scope.shares_tokens else ()
        if scope.shares_tokens:
            tokens = scatter(tokens, ParallelMode.TENSOR, 0, sizes, context=scope.context)

        routing = self.router(tokens)
        # The exchange of sizes starts here, and the following work is queued before the host waits for them in exchange().
        traffic = Traffic(routing.kept, scope.expert, scope.context) if scope.expert > 1 else None
        sent = order(routing.experts, routing.chosen, routing.limits)
        sums = self.router.sums(routing)
        shared = None if self.shared is None else self.shared(x)
        self.statistics = Statistics(routing.chosen, routing.chosen.sum() - routing.kept.sum())

        weights = routing.weights
        if self.experts.splits_inner:
            # Tensor ranks compute partial outputs of the same tokens, so gradients of tokens and weights are partial too.
            tokens = copy(tokens, ParallelMode.TENSOR, context=scope.context)
            weights = copy(weights, ParallelMode.TENSOR, context=scope.context)
        if traffic is None:
            rows = self.experts(dispatch(tokens, sent), routing.kept)
            out = combine(rows, weights.T.to(rows.dtype), sent)
        else:
            run = partial(traffic.by_expert, experts=self.experts)
            out = exchange(tokens, weights.T, sent, traffic, run, scope.context)
        if self.experts.splits_inner:
            out = reduce(out, ParallelMode.TENSOR, context=scope.context)

        if scope.shares_tokens:
            out = gather(out, ParallelMode.TENSOR, 0, sizes, context=scope.context)
        out = partition_input(out.view_as(entered), arrangement=here)
        out = out if shared is None else out + shared
        if loss is None:
            if sums is not None and scope.context.pipeline_parallel_size > 1:
                raise ScheduleError(
                    "under a pipeline the loss is computed at the last stage, so the auxiliary loss of this layer "
                    "would be lost. Call y, loss = moe(x, loss), pass (y, loss) from stage to stage, and add the "
                    "loss in the criterion. Or set balance_loss=0 and z_loss=0 on the router, and balance the "
                    "experts by bias_rate."
                )
            self.sums = sums
            return out
        if sums is None:
            return out, loss
        if not loss.dim():
            return out, loss + loss_of(sums, scope)
        if loss.dim() != 2 or len(loss) != 3:
            raise ScheduleError(
                f"the loss given to moe(x, loss) has shape {tuple(loss.shape)}. Pass the loss of the previous layer, "
                "no_losses(x) or a scalar."
            )
        return out, joined([loss, sums])


def no_losses(like: Tensor) -> Tensor:
    """Return the `loss` to pass to the first MoE layer of a pipeline (`y, loss = moe(x, loss)`), on the device of `like`."""
    return torch.zeros(3, 1, device=like.device)


@overload
def auxiliary_loss(of: Tensor, *, context: ParallelContext | None = None) -> Tensor: ...


@overload
def auxiliary_loss(of: nn.Module, *, context: ParallelContext | None = None) -> Tensor | float: ...


def auxiliary_loss(of: nn.Module | Tensor, *, context: ParallelContext | None = None) -> Tensor | float:
    """Return the sum of the auxiliary losses of all MoE layers in their last forward passes, and clear these losses.

    `of` is a model, or the loss that its layers passed on from no_losses(). Losses over the global batch need one
    all-reduce for all layers, and one in backward.

    Collective over the ranks with tokens of the global batch.
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
