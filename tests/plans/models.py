"""Plain torch models that know nothing of parallelism, and plans for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

HIDDEN, HEADS, INNER, WORDS, LENGTH = 16, 4, 32, 26, 6
IGNORED = -100


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head_dim = HIDDEN // HEADS
        self.q_proj, self.v_proj = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.k_proj = nn.Linear(HIDDEN, HIDDEN, bias=False)  # softmax takes no notice of a bias here
        self.o_proj = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, INNER), nn.Linear(INNER, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.attention, self.mlp = Attention(), MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    """Tokens to logits, as a language model."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


PLAN: dict[str, Any] = {
    **{f"blocks.*.attention.{name}_proj": "colwise" for name in "qkv"},
    "blocks.*.attention.o_proj": "rowwise",
    "blocks.*.mlp.up": "colwise",
    "blocks.*.mlp.down": "rowwise",
}


def build(kind: type[nn.Module] = Model, seed: int = 0) -> nn.Module:
    """The same on every rank, in fp64, with biases and norms that are not at their start."""
    torch.manual_seed(seed)
    model = kind().double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() < 2:
                parameter.add_(torch.randn_like(parameter) / 5)
    return model


def tokens(batch: int, seed: int = 1) -> Tensor:
    return torch.randint(0, WORDS, (batch, LENGTH), generator=torch.Generator().manual_seed(seed))


def labels(batch: int) -> Tensor:
    """As many ignored in some rows as to make the counts uneven between rows."""
    found = tokens(batch, seed=2)
    for row in range(batch):
        found[row, : row % 4] = IGNORED
    return found


def summed_loss(logits: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """(sum, count): a criterion that says how many tokens it counted."""
    total = F.cross_entropy(logits.flatten(0, -2), wanted.flatten(), ignore_index=IGNORED, reduction="sum")
    return total, (wanted != IGNORED).sum()
