"""Self-attention layers for split sequences: the projections of each token where it lies, attention over all ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor, nn

from colonnade.context.parallel_context import ParallelContext
from colonnade.errors import ConfigError
from colonnade.nn.sequence.ring import ring_attention
from colonnade.nn.sequence.ulysses import ulysses_attention


class _SelfAttention(nn.Module, ABC):
    """Projections to queries, keys and values, attention, and a projection back.

    Takes and gives (batch, length here, hidden). The parameters are whole on every rank; what their gradients owe over
    the sequence group follows from that.
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        *,
        causal: bool = False,
        kv_heads: int | None = None,
        bias: bool = True,
        context: ParallelContext | None = None,
    ) -> None:
        super().__init__()
        kv_heads = kv_heads or heads
        if hidden % heads or heads % kv_heads:
            raise ConfigError(
                f"hidden={hidden} is not a multiple of heads={heads}, or heads not of kv_heads={kv_heads}; choose numbers "
                f"that divide each other"
            )
        self.width, self.causal, self._context = hidden // heads, causal, context
        self._sizes = [hidden, kv_heads * self.width, kv_heads * self.width]
        self.qkv = nn.Linear(hidden, sum(self._sizes), bias=bias)
        self.out = nn.Linear(hidden, hidden, bias=bias)

    def forward(self, x: Tensor, lengths: Sequence[int] | None = None) -> Tensor:
        projected = self.qkv(x).split(self._sizes, -1)
        q, k, v = (part.unflatten(-1, (-1, self.width)).transpose(1, 2) for part in projected)
        return self.out(self._attend(q, k, v, lengths).transpose(1, 2).flatten(2))

    @abstractmethod
    def _attend(self, q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int] | None) -> Tensor:
        """Attention over the whole sequence, of this rank's queries."""


class RingSelfAttention(_SelfAttention):
    """Self-attention by ring_attention: any number of heads and memory of length / ranks.

    `balanced`: parts are those of split_sequence(balanced=True), which share the work of a causal mask evenly.
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        *,
        causal: bool = False,
        kv_heads: int | None = None,
        bias: bool = True,
        balanced: bool = False,
        context: ParallelContext | None = None,
    ) -> None:
        super().__init__(hidden, heads, causal=causal, kv_heads=kv_heads, bias=bias, context=context)
        self.balanced = balanced

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int] | None) -> Tensor:
        return ring_attention(
            q, k, v, causal=self.causal, lengths=lengths, balanced=self.balanced, context=self._context
        )


class UlyssesSelfAttention(_SelfAttention):
    """Self-attention by ulysses_attention: heads are shared among the ranks, each has whole sequences."""

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int] | None) -> Tensor:
        return ulysses_attention(q, k, v, causal=self.causal, lengths=lengths, context=self._context)
