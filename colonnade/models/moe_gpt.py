"""MoE-GPT: GPT whose feed-forward layers are mixtures of experts. The auxiliary losses travel beside the activations."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

from colonnade.context.parallel_context import ParallelContext
from colonnade.models.gpt import Head, LanguageModelLoss, TokenEmbedding
from colonnade.models.transformer import Block, is_balanced
from colonnade.nn.layer import MLP, Arrangement, SelfAttention, arrange
from colonnade.nn.layer.attention import Over
from colonnade.nn.moe import MoE, TopKRouter

Carried = tuple[Tensor, Tensor]
"""(activations, the auxiliary losses of the layers so far)"""


class MoEGPT(nn.Sequential):
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
        tied: bool = True,
        dropout: float = 0.0,
        over: Over = "ring",
        context: ParallelContext | None = None,
    ) -> None:
        here = arrange(context)
        embedding = CarryingEmbedding(vocabulary, length, hidden, dropout, over, context)
        blocks = nn.Sequential()
        for at in range(layers):
            attention = SelfAttention(
                hidden, heads, causal=True, over=over, balanced=is_balanced(True, over), arrangement=here
            )
            feed_forward: nn.Module = MLP(hidden, 4 * hidden, arrangement=here)
            if at % every == every - 1:
                chosen = TopKRouter(hidden, experts, **(router or {}), context=context)
                feed_forward = MoE(hidden, experts, chosen, context=context)
            blocks.append(CarryingBlock(attention, feed_forward, hidden, dropout, here))
        head = CarryingHead(vocabulary, hidden, embedding.tokens.weight if tied else None, context)
        super().__init__(OrderedDict(embedding=embedding, blocks=blocks, head=head))
        self._over, self._here = over, here

    def criterion(self, ignore_index: int = -100) -> MoELoss:
        """The loss of this model's logits and its auxiliary losses."""
        return MoELoss(ignore_index, over=self._over, context=self._here.context)


class CarryingEmbedding(TokenEmbedding):
    """The embedding, and no loss yet."""

    def forward(self, tokens: Tensor) -> Carried:  # type: ignore[override]
        x = super().forward(tokens)
        return x, torch.zeros((), device=x.device)


class CarryingBlock(Block):
    """A block that adds its auxiliary loss, if it has one, to those of the blocks before."""

    def __init__(self, attention: nn.Module, feed_forward: nn.Module, hidden: int, dropout: float, here: Arrangement):
        super().__init__(attention, feed_forward, hidden, dropout, here)
        self._mixes = isinstance(feed_forward, MoE)

    def forward(self, carried: Carried) -> Carried:  # type: ignore[override]
        x, loss = carried
        x = x + self.dropout(self.attention(self.first_norm(x)))
        normed = self.second_norm(x)
        y, loss = self.feed_forward(normed, loss) if self._mixes else (self.feed_forward(normed), loss)
        return x + self.dropout(y), loss


class CarryingHead(Head):
    """The head; the losses go by."""

    def forward(self, carried: Carried) -> Carried:  # type: ignore[override]
        x, loss = carried
        return super().forward(x), loss


class MoELoss(LanguageModelLoss):
    """The loss per token and the auxiliary losses."""

    def forward(self, logits: Tensor, loss: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(logits, labels) + loss
