"""MoE-GPT: GPT whose feed-forward layers are mixtures of experts. The auxiliary losses travel beside the activations."""

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

Carried = tuple[Tensor, Tensor]
"""(activations, what the auxiliary losses of the layers so far are made of)"""


class MoEGPT(GPT):
    """As GPT, with `experts` experts in every `every`-th block; `router` are the options of TopKRouter.

    Gives (logits, auxiliary losses), which `criterion()` takes, also at the end of a pipeline.
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
        return CarryingEmbedding, CarryingBlock, CarryingHead, MoELoss

    def feed_forward(self, at: int, hidden: int, here: Arrangement) -> nn.Module:
        if at % self._every != self._every - 1:
            return super().feed_forward(at, hidden, here)
        router = TopKRouter(hidden, self._experts, **self._router, context=here.context)
        return MoE(hidden, self._experts, router, context=here.context)


class CarryingEmbedding(TokenEmbedding):
    """The embedding, and no loss yet."""

    def forward(self, tokens: Tensor) -> Carried:  # type: ignore[override]
        x = super().forward(tokens)
        return x, no_losses(x)


class CarryingBlock(TransformerBlock):
    """A block that adds its auxiliary loss, if it has one, to those of the blocks before."""

    def forward(self, carried: Carried) -> Carried:  # type: ignore[override]
        x, loss = carried
        x = x + self.dropout(self.attention(self.first_norm(x)))
        normed = self.second_norm(x)
        mixes = isinstance(self.feed_forward, MoE)
        y, loss = self.feed_forward(normed, loss) if mixes else (self.feed_forward(normed), loss)
        return x + self.dropout(y), loss


class CarryingHead(Head):
    """The head; here the losses are made, with one all-reduce for all layers."""

    def forward(self, carried: Carried) -> Any:  # type: ignore[override]
        x, loss = carried
        found, auxiliary = super().forward(x), auxiliary_loss(loss, context=self.classifier.arrangement.context)
        return (*found, auxiliary) if self.keeps_gathered else (found, auxiliary)


class MoELoss(LanguageModelLoss):
    """The loss per token and the auxiliary losses."""

    def forward(self, logits: Tensor, loss: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        return self.with_losses((logits,), loss, labels)

    def with_losses(self, outputs: Sequence[Tensor], loss: Tensor, labels: Tensor) -> Tensor:
        """The loss of what the model gives, and the auxiliary losses."""
        total, count = self.mean(outputs, labels).sum_and_count  # type: ignore[attr-defined]
        return mean_over(total + loss * count.to(total.dtype), count)


class FusedMoELoss(MoELoss, FusedLanguageModelLoss):
    """The same of a model with `fused_loss`."""

    def forward(self, hidden: Tensor, weight: Tensor, loss: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        return self.with_losses((hidden, weight), loss, labels)


MoELoss.fused = FusedMoELoss
