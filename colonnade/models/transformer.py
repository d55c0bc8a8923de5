"""What the models share: attention over split heads and split sequences, and the block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor, nn

from colonnade.context.parallel_context import ParallelContext
from colonnade.errors import ConfigError
from colonnade.nn.layer import Arrangement, Dropout, LayerNorm, Linear, arrange
from colonnade.nn.sequence import ring_attention, ulysses_attention

Over = Literal["ring", "ulysses"]
"""How attention reaches over a split sequence."""

_OVER: dict[str, Callable[..., Tensor]] = {"ring": ring_attention, "ulysses": ulysses_attention}


class Attention(nn.Module):
    """Self-attention: heads split by the tensor mode, tokens by the sequence mode, or neither."""

    def __init__(self, hidden: int, heads: int, *, causal: bool, over: Over, context: ParallelContext | None) -> None:
        super().__init__()
        if hidden % heads or over not in _OVER:
            raise ConfigError(
                f"hidden={hidden} must be a multiple of heads={heads}, and over={over!r} one of 'ring' and 'ulysses'"
            )
        here = arrange(context)
        self.width, self._attend = hidden // heads, _OVER[over]
        self._options: dict[str, Any] = {"causal": causal, "context": here.context}
        if over == "ring":
            self._options["balanced"] = causal
        self.qkv = Linear(hidden, hidden, parts=3, unit=self.width, arrangement=here)
        self.out = Linear(hidden, hidden, split="row", unit=self.width, arrangement=here)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (-1, self.width)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return self.out(self._attend(q, k, v, **self._options).transpose(1, 2).flatten(-2))


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a norm and beside a residual connection."""

    def __init__(self, attention: Attention, feed_forward: nn.Module, hidden: int, dropout: float, here: Arrangement):
        super().__init__()
        self.first_norm, self.attention = LayerNorm(hidden, arrangement=here), attention
        self.second_norm, self.feed_forward = LayerNorm(hidden, arrangement=here), feed_forward
        self.dropout = Dropout(dropout, arrangement=here)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.first_norm(x)))
        return x + self.dropout(self.feed_forward(self.second_norm(x)))


def is_balanced(causal: bool, over: Over) -> bool:
    """Whether a model's sequences are split into balanced parts: where a ring has a causal mask."""
    return causal and over == "ring"
