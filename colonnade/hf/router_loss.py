"""The auxiliary loss of routers, of the joined batch: transformers makes it of each rank's tokens, and it is not linear in them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from colonnade.context.parallel_context import ParallelContext
from colonnade.errors import ConfigError
from colonnade.nn.moe.scope import Scope
from colonnade.parallel.forward import override_forward


def join_router_loss(model: nn.Module, context: ParallelContext) -> None:
    """Let the auxiliary loss that a model of transformers adds to its loss be that of all ranks' tokens; in place.

    Each rank has the same then, and adds it to its mean loss. Does nothing where no rank has tokens of its own, and to a
    model that has no such loss. One that is made in another way than most is refused.
    """
    config, scope = getattr(model, "config", None), Scope.of(context)
    if not hasattr(config, "output_router_logits") or not scope.distinct:
        return
    source = sys.modules[type(model).__module__]
    if not hasattr(source, "load_balancing_loss_func") or not hasattr(model, "router_aux_loss_coef"):
        if config is not None and config.output_router_logits:
            raise ConfigError(
                f"{type(model).__name__} has output_router_logits=True, and its auxiliary loss is not known to be that of the joined "
                f"batch; set model.config.output_router_logits = False, or leave no ranks for data parallelism",
                code="C061",
            )
        return

    def forward(self: Any, before: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        output = before(self, *args, **kwargs)
        own, loss = getattr(output, "aux_loss", None), getattr(output, "loss", None)
        if isinstance(own, Tensor) and loss is not None:
            choices = getattr(self, "num_experts_per_tok", None) or self.config.num_experts_per_tok
            output.aux_loss = _loss_of(scope.summed(_sums(output.router_logits, kwargs.get("attention_mask"), choices)))
            output.loss = loss + self.router_aux_loss_coef * (output.aux_loss - own)
        return output

    override_forward(model, forward)


def _sums(logits: tuple[Tensor, ...], mask: Tensor | None, choices: int) -> Tensor:
    """(3, experts): how many assignments chose each, its probabilities, and how many tokens; over all layers."""
    every = torch.cat([layer.to(logits[0].device) for layer in logits])
    scores = every.softmax(-1, dtype=torch.promote_types(every.dtype, torch.float32))
    weights = scores.new_ones(len(scores)) if mask is None else mask.reshape(-1).to(scores).repeat(len(logits))
    chosen = F.one_hot(scores.topk(choices).indices, scores.size(-1)).sum(1).to(scores)
    tokens = weights.sum().expand(scores.size(-1))
    return torch.stack([weights @ chosen, weights @ scores, tokens])


def _loss_of(sums: Tensor) -> Tensor:
    chosen, scores, tokens = sums
    return len(chosen) * (chosen * scores / tokens.clamp(min=1).square()).sum()
