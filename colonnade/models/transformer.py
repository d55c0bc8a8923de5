"""What the models share: the block."""

from __future__ import annotations

from torch import Tensor, nn

from colonnade.nn.layer import Arrangement, Dropout, LayerNorm


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
