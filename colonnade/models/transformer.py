"""What the models share: the block, and how their sequences are split."""

from __future__ import annotations

from torch import Tensor, nn

from colonnade.nn.layer import Arrangement, Dropout, LayerNorm
from colonnade.nn.layer.attention import Over


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a norm and beside a residual connection."""

    def __init__(self, attention: nn.Module, feed_forward: nn.Module, hidden: int, dropout: float, here: Arrangement):
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
