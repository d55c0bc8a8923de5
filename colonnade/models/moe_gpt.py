"""MoE-GPT: GPT with mixtures of experts. Auxiliary losses are passed from block to block together with the activations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from colonnade.models.gpt import (
    GPT,
    FusedLanguageModelLoss,
    Head,
    LanguageModelLoss,
    TokenEmbedding,
    TransformerBlock,
    mean_over,
)
from colonnade.nn.layer import Arrangement
from colonnade.nn.moe import MoE, TopKRouter, auxiliary_loss, no_losses

XAndLoss = tuple[Tensor, Tensor]
"""(activations, sums for the auxiliary losses of the layers so far)"""


class MoEGPT(GPT):
    """GPT with `experts` experts in every `every`-th block; `router` has the options of TopKRouter.

    Returns (logits, auxiliary losses), which `criterion()` takes, also at the end of a pipeline.
    """

    def __init__(
        self,
        vocabulary: int,
        length: int,
        hidden: int,
        heads: int,
        layers: int,
        experts: int,
        *,
        every: int = 2,
        router: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self._experts, self._every, self._router = experts, every, router or {}
        super().__init__(vocabulary, length, hidden, heads, layers, **options)

    def parts(self) -> tuple[type[TokenEmbedding], type[TransformerBlock], type[Head], type[LanguageModelLoss]]:
        return MoEEmbedding, MoEBlock, MoEHead, MoELoss

    def feed_forward(self, at: int, hidden: int, here: Arrangement) -> nn.Module:
        if at % self._every != self._every - 1:
            return super().feed_forward(at, hidden, here)
        router = TopKRouter(hidden, self._experts, **self._router, context=here.context)
        return MoE(hidden, self._experts, router, context=here.context)


class MoEEmbedding(TokenEmbedding):
    """The embedding. Returns (vectors, empty auxiliary loss)."""

    def forward(self, tokens: Tensor) -> XAndLoss:  # type: ignore[override]
        x = super().forward(tokens)
        return x, no_losses(x)


class MoEBlock(TransformerBlock):
    """A block that adds its auxiliary loss, if it has experts, to the losses of the previous blocks."""

    def forward(self, x_and_loss: XAndLoss) -> XAndLoss:  # type: ignore[override]
        x, loss = x_and_loss
        x = x + self.dropout(self.attention(self.first_norm(x)))
        normed = self.second_norm(x)
        has_experts = isinstance(self.feed_forward, MoE)
        y, loss = self.feed_forward(normed, loss) if has_experts else (self.feed_forward(normed), loss)
        return x + self.dropout(y), loss


class MoEHead(Head):
    """The head. Returns the logits, and the auxiliary losses of all layers, which it all-reduces together."""

    def forward(self, x_and_loss: XAndLoss) -> Any:  # type: ignore[override]
        x, loss = x_and_loss
        output, auxiliary = super().forward(x), auxiliary_loss(loss, context=self.classifier.arrangement.context)
        return (*output, auxiliary) if self.keeps_gathered else (output, auxiliary)


class MoELoss(LanguageModelLoss):
    """The mean loss per token plus the auxiliary losses."""

    def forward(self, logits: Tensor, loss: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        return self.with_losses((logits,), loss, labels)

    def with_losses(self, outputs: Sequence[Tensor], loss: Tensor, labels: Tensor) -> Tensor:
        """Return the sum of the loss of the model's outputs and the auxiliary losses."""
        total, count = self.mean(outputs, labels).sum_and_count  # type: ignore[attr-defined]
        return mean_over(total + loss * count.to(total.dtype), count)


class FusedMoELoss(MoELoss, FusedLanguageModelLoss):
    """`MoELoss` for a model with `fused_loss`."""

    def forward(self, hidden: Tensor, weight: Tensor, loss: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        return self.with_losses((hidden, weight), loss, labels)


MoELoss.fused = FusedMoELoss
