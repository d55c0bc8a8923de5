"""Causal language models and GPT, written once; how they are split is the config's affair."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from colonnade.context.parallel_context import ParallelContext
from colonnade.nn.layer import (
    MLP,
    Arrangement,
    Classifier,
    CrossEntropyLoss,
    Dropout,
    Embedding,
    LayerNorm,
    LinearCrossEntropyLoss,
    SelfAttention,
    arrange,
)
from colonnade.nn.layer.attention import Over
from colonnade.nn.sequence import SharedLengths, split_sequence
from colonnade.nn.sequence.parts import sequence_place


class LanguageModel(nn.Sequential):
    """An embedding of tokens, causal blocks, a norm and a classifier, whose weight may be the embedding's.

    Takes whole tokens (batch, length), the same on all ranks of a tensor and of a sequence group, and gives the logits
    that `criterion()` takes. Layers come one after another, so `colonnade.split` can cut it for a pipeline. With
    `fused_loss` it gives activations and the classifier's weight instead, of which `criterion()` makes the loss in chunks,
    without the logits of all tokens. A subclass says in its methods what the layers are.
    """

    positions = True
    """Whether a learned vector of its position is added to each token's."""

    def __init__(
        self,
        vocabulary: int,
        length: int,
        hidden: int,
        heads: int,
        layers: int,
        *,
        tied: bool = True,
        dropout: float = 0.0,
        over: Over = "ring",
        fused_loss: bool = False,
        context: ParallelContext | None = None,
    ) -> None:
        here = arrange(context)
        make_embedding, make_block, make_head, _ = self.parts()
        embedding = make_embedding(vocabulary, length if self.positions else 0, hidden, dropout, over, context)
        blocks = nn.Sequential()
        reach: dict[str, Any] = {"causal": True, "over": over, "balanced": over == "ring", "arrangement": here}
        reach["shared_lengths"] = SharedLengths()
        for at in range(layers):
            layer = self.attention(hidden, heads, reach), self.feed_forward(at, hidden, here)
            blocks.append(make_block(*layer, hidden, dropout, here, self.norm))
        head = make_head(vocabulary, hidden, embedding.tokens.weight if tied else None, context, self.norm)
        head.keeps_gathered = fused_loss
        super().__init__(OrderedDict(embedding=embedding, blocks=blocks, head=head))
        self._over, self._here, self._fused_loss = over, here, fused_loss

    def parts(self) -> tuple[type[TokenEmbedding], type[TransformerBlock], type[Head], type[LanguageModelLoss]]:
        """The classes that the model is made of."""
        return TokenEmbedding, TransformerBlock, Head, LanguageModelLoss

    def attention(self, hidden: int, heads: int, options: dict[str, Any]) -> SelfAttention:
        """The attention of a block."""
        return SelfAttention(hidden, heads, **options)

    def feed_forward(self, at: int, hidden: int, here: Arrangement) -> nn.Module:
        """The feed-forward layer of block `at`."""
        return MLP(hidden, 4 * hidden, arrangement=here)

    def norm(self, hidden: int, arrangement: Arrangement) -> nn.Module:
        """The norm before attention, before a feed-forward layer and before the classifier."""
        return LayerNorm(hidden, arrangement=arrangement)

    def criterion(self, ignore_index: int = -100) -> LanguageModelLoss:
        """The loss of what this model gives."""
        loss = self.parts()[-1]
        return (loss.fused if self._fused_loss else loss)(ignore_index, over=self._over, context=self._here.context)


class GPT(LanguageModel):
    """Learned positions for sequences of up to `length`, LayerNorm, attention and a feed-forward layer with biases."""


class TransformerBlock(nn.Module):
    """Attention and a feed-forward layer, each behind a norm and beside a residual connection."""

    def __init__(
        self,
        attention: nn.Module,
        feed_forward: nn.Module,
        hidden: int,
        dropout: float,
        here: Arrangement,
        norm: Callable[..., nn.Module] = LayerNorm,
    ) -> None:
        super().__init__()
        self.first_norm, self.attention = norm(hidden, arrangement=here), attention
        self.second_norm, self.feed_forward = norm(hidden, arrangement=here), feed_forward
        self.dropout = Dropout(dropout, arrangement=here)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.first_norm(x)))
        return x + self.dropout(self.feed_forward(self.second_norm(x)))


class TokenEmbedding(nn.Module):
    """Whole tokens -> the vectors of this rank's tokens and, unless `length` is 0, of their positions."""

    def __init__(
        self, vocabulary: int, length: int, hidden: int, dropout: float, over: Over, context: ParallelContext | None
    ) -> None:
        super().__init__()
        self._here, self._balanced = arrange(context), over == "ring"
        self.tokens = self._table(vocabulary, hidden)
        self.positions = self._table(length, hidden) if length else None
        self.dropout = Dropout(dropout, arrangement=self._here)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(self._mine(tokens))
        if self.positions is not None:
            every = torch.arange(tokens.size(1), device=tokens.device).expand_as(tokens)
            x = x + self.positions(self._mine(every))
        return self.dropout(x)

    def _mine(self, whole: Tensor) -> Tensor:
        return split_sequence(whole, balanced=self._balanced, context=self._here.context)

    def _table(self, rows: int, hidden: int) -> Embedding:
        """Drawn whole, then cut: the first weights do not depend on the layout, and no two ranks draw the same."""
        whole = nn.Embedding(rows, hidden)
        nn.init.normal_(whole.weight, std=0.02)
        return Embedding.from_module(whole, arrangement=self._here)


class Head(nn.Module):
    """The last norm, and logits for every token, or what `LinearCrossEntropyLoss` makes them of."""

    keeps_gathered = False
    """Whether its weight is used after its forward pass, by a fused loss: ZeRO stage 3 then leaves it gathered until backward."""

    def __init__(
        self,
        vocabulary: int,
        hidden: int,
        weight: nn.Parameter | None,
        context: ParallelContext | None,
        norm: Callable[..., nn.Module] = LayerNorm,
    ) -> None:
        super().__init__()
        here = arrange(context)
        self.norm = norm(hidden, arrangement=here)
        self.classifier = Classifier(hidden, vocabulary, weight=weight, arrangement=here)

    def forward(self, x: Tensor) -> Any:
        hidden = self.norm(x)
        if not self.keeps_gathered:
            return self.classifier(hidden)
        weight = self.classifier.weight
        # Not the parameter itself: hooks on what a module gives must not add up on it. Without a backward pass to come, stage 3
        # gives gathered memory back at once.
        return hidden, weight.view_as(weight) if torch.is_grad_enabled() else weight.clone()


class LanguageModelLoss(nn.Module):
    """Cross entropy per token of the whole sequences, of which this rank has a part; labels are whole.

    What a rank gives is its part's sum over the mean number of tokens of a part, and the engine takes the mean over all
    tokens that count, however long the parts are and wherever labels are ignored.
    """

    fused: type[LanguageModelLoss]
    """The same of activations and a classifier's weight."""

    def __init__(
        self, ignore_index: int = -100, *, over: Over = "ring", context: ParallelContext | None = None
    ) -> None:
        super().__init__()
        self._here, self._balanced, self.ignore_index = arrange(context), over == "ring", ignore_index
        self._sum = self._summed(ignore_index, "sum", arrangement=self._here)

    _summed = CrossEntropyLoss

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        return self.mean((logits,), labels)

    def mean(self, outputs: Sequence[Tensor], labels: Tensor) -> Tensor:
        """The loss of what the model gives."""
        context = self._here.context
        mine = split_sequence(labels, balanced=self._balanced, context=context)
        counted = (labels != self.ignore_index).sum().double()
        return mean_over(self._sum(*outputs, mine), counted / sequence_place(context)[0])


class FusedLanguageModelLoss(LanguageModelLoss):
    """The same of a model with `fused_loss`."""

    _summed = LinearCrossEntropyLoss

    def forward(self, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        return self.mean((hidden, weight), labels)


LanguageModelLoss.fused = FusedLanguageModelLoss


def mean_over(total: Tensor, count: Tensor) -> Tensor:
    """The mean of so many, which tells the engine both: its mean is over the whole batch, over ranks and micro-batches."""
    mean = total / count.masked_fill(count == 0, 1).to(total.dtype)
    mean.sum_and_count = total, count  # type: ignore[attr-defined]
    return mean
