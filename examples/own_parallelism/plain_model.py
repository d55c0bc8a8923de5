"""The model of the example in plain torch: the reference for the parallel model."""

from torch import nn
from torch.nn import functional as F


class Attention(nn.Module):
    """Self-attention in one process; the rows of `qkv` are sorted by head."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        samples, places, width = x.shape
        qkv = self.qkv(x).view(samples, places, self.heads, 3, width // self.heads)
        q, k, v = (qkv[:, :, :, at].transpose(1, 2) for at in range(3))
        return self.out(
            F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
        )


class Residual(nn.Module):
    """x + inner(norm(x))"""

    def __init__(self, width, inner):
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(width), inner

    def forward(self, x):
        return x + self.inner(self.norm(x))


def layers(attention, features, width, heads, depth):
    """The layers in order, with `attention(width, heads)` for attention."""
    yield nn.Linear(features, width)
    for _ in range(depth):
        yield Residual(width, attention(width, heads))
        yield Residual(
            width,
            nn.Sequential(
                nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
            ),
        )
    yield nn.LayerNorm(width)
    yield nn.Linear(width, features)
