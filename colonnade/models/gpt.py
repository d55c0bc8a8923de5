"""Causal language models, and GPT; the config determines how they are sharded."""

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
from colonnade.nn.sequence.parts import sequence_rank


class LanguageModel(nn.Sequential):
    """Token embedding, causal blocks, a norm and a classifier; subclasses choose the layers by overriding methods.

    Takes full tokens (batch, length), the same on all ranks of a tensor and of a sequence group, and returns the logits that
    `criterion()` takes. It is an nn.Sequential, so `colonnade.split` can split it into pipeline stages.

    Args:
        vocabulary: The number of token ids.
        length: The longest sequence with learned positions.
        hidden: The width of activations.
        heads: The number of attention heads.
        layers: The number of blocks.
        tied: Whether embedding and classifier share their weight.
        dropout: The dropout of embeddings and residual branches.
        over: The attention under context parallelism, "ring" or "ulysses".
        fused_loss: Return activations and the classifier's weight instead of logits; `criterion()` then computes the loss in
            chunks, without the logits of all tokens.
        context: Defaults to the global one.
    """

    positions = True
    """Whether positions are learned vectors, added to those of the tokens."""

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
        options: dict[str, Any] = {"causal": True, "over": over, "balanced": over == "ring", "arrangement": here}
        options["shared_lengths"] = SharedLengths()
        for at in range(layers):
            layer = self.attention(hidden, heads, options), self.feed_forward(at, hidden, here)
            blocks.append(make_block(*layer, hidden, dropout, here, self.norm))
        head = make_head(vocabulary, hidden, embedding.tokens.weight if tied else None, context, self.norm)
        head.keeps_gathered = fused_loss
        super().__init__(OrderedDict(embedding=embedding, blocks=blocks, head=head))
        self._over, self._here, self._fused_loss = over, here, fused_loss

    def parts(self) -> tuple[type[TokenEmbedding], type[TransformerBlock], type[Head], type[LanguageModelLoss]]:
        """Return the classes of embedding, blocks, head and loss."""
        return TokenEmbedding, TransformerBlock, Head, LanguageModelLoss

    def attention(self, hidden: int, heads: int, options: dict[str, Any]) -> SelfAttention:
        """Make the attention of a block."""
        return SelfAttention(hidden, heads, **options)

    def feed_forward(self, at: int, hidden: int, here: Arrangement) -> nn.Module:
        """Make the feed-forward layer of the block with index `at`."""
        return MLP(hidden, 4 * hidden, arrangement=here)

    def norm(self, hidden: int, arrangement: Arrangement) -> nn.Module:
        """Make the norm before attention, before a feed-forward layer or before the classifier."""
        return LayerNorm(hidden, arrangement=arrangement)

    def criterion(self, ignore_index: int = -100) -> LanguageModelLoss:
        """Make the loss for the output of this model."""
        loss = self.parts()[-1]
        return (loss.fused if self._fused_loss else loss)(ignore_index, over=self._over, context=self._here.context)


class GPT(LanguageModel):
    """GPT-2 architecture: learned positions, LayerNorm before each layer, GELU feed-forward layers, biases."""


class TransformerBlock(nn.Module):
    """Attention and a feed-forward layer, each with a norm before it and a residual connection."""

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
    """Maps full tokens to the embedding vectors of this rank's tokens, and adds position vectors unless `length` is 0."""

    def __init__(
        self, vocabulary: int, length: int, hidden: int, dropout: float, over: Over, context: ParallelContext | None
    ) -> None:
        super().__init__()
        self._here, self._balanced = arrange(context), over == "ring"
        self.tokens = self._table(vocabulary, hidden)
        self.positions = self._table(length, hidden) if length else None
        self.dropout = Dropout(dropout, arrangement=self._here)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(self._local(tokens))
        if self.positions is not None:
            positions = torch.arange(tokens.size(1), device=tokens.device).expand_as(tokens)
            x = x + self.positions(self._local(positions))
        return self.dropout(x)

    def _local(self, full: Tensor) -> Tensor:
        return split_sequence(full, balanced=self._balanced, context=self._here.context)

    def _table(self, rows: int, hidden: int) -> Embedding:
        # Drawn in full, then sharded, so that initial weights do not depend on the layout.
        full = nn.Embedding(rows, hidden)
        nn.init.normal_(full.weight, std=0.02)
        return Embedding.from_module(full, arrangement=self._here)


class Head(nn.Module):
    """The last norm and the classifier. Returns the logits of every token or, for a fused loss, the inputs of the loss."""

    keeps_gathered = False
    """Whether a fused loss uses the weight after the forward pass; ZeRO stage 3 then keeps it gathered until backward."""

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
        # A view, because hooks on module outputs would accumulate on the parameter itself. Without a backward pass, ZeRO stage 3
        # frees the gathered weight after this forward pass, hence the copy.
        return hidden, weight.view_as(weight) if torch.is_grad_enabled() else weight.clone()


class LanguageModelLoss(nn.Module):
    """Cross-entropy per token of the full sequences, from this rank's logits and full labels.

    The value on a rank is the sum over its own tokens, divided by the mean number of counted tokens per sequence rank. The
    engine averages over all counted tokens, whatever the lengths of the parts and the distribution of ignored labels.
    """

    fused: type[LanguageModelLoss]
    """The class for activations and a classifier's weight (`fused_loss`)."""

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
        """Return the mean loss per counted token, from the outputs of the model and full labels."""
        context = self._here.context
        local_labels = split_sequence(labels, balanced=self._balanced, context=context)
        counted = (labels != self.ignore_index).sum().double()
        return mean_over(self._sum(*outputs, local_labels), counted / sequence_rank(context)[0])


class FusedLanguageModelLoss(LanguageModelLoss):
    """`LanguageModelLoss` for a model with `fused_loss`, which returns activations and the classifier's weight."""

    _summed = LinearCrossEntropyLoss

    def forward(self, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        return self.mean((hidden, weight), labels)


LanguageModelLoss.fused = FusedLanguageModelLoss


def mean_over(total: Tensor, count: Tensor) -> Tensor:
    """Return total / count, with an attribute `sum_and_count`.

    The engine computes the mean over all ranks and micro-batches from it.
    """
    mean = total / count.masked_fill(count == 0, 1).to(total.dtype)
    mean.sum_and_count = total, count  # type: ignore[attr-defined]
    return mean
