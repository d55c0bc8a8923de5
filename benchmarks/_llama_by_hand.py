"""A Llama written by hand in torch, which the benchmarks on a GPU train in place of the library's."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

THETA, EPS = 500000.0, 1e-5


class Shape(NamedTuple):
    """The sizes of a Llama. With `experts`, every layer has that many, of width `inner`, and a token uses `choices` of them."""

    vocabulary: int
    hidden: int
    heads: int
    kv_heads: int
    inner: int
    layers: int
    head_size: int = 128
    experts: int = 0
    choices: int = 1

    @property
    def width(self) -> int:
        """The width of all query heads."""
        return self.heads * self.head_size

    def flops_per_token(self, length: int) -> int:
        """Operations of the forward and backward passes per token: 6 per weight of the matrix products that it goes through
        (embeddings are no product), and 6 x layers x heads x head size x length for causal attention."""
        attention = 2 * self.hidden * (self.width + self.kv_heads * self.head_size)
        layer = attention + 3 * self.hidden * self.inner * self.choices + self.hidden * self.experts
        return 6 * (self.layers * layer + self.vocabulary * self.hidden + self.layers * self.width * length)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.size = shape.head_size
        self.q = nn.Linear(shape.hidden, shape.width, bias=False)
        self.out = nn.Linear(shape.width, shape.hidden, bias=False)
        self.k, self.v = (nn.Linear(shape.hidden, shape.kv_heads * self.size, bias=False) for _ in range(2))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (each(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for each in (self.q, self.k, self.v))
        q, k = turned(q, cos, sin), turned(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(shape.hidden, EPS), nn.RMSNorm(shape.hidden, EPS)
        self.attention = Attention(shape)
        self.gate, self.up = (nn.Linear(shape.hidden, shape.inner, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.inner, shape.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), cos, sin)
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Head(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(shape.hidden, EPS)
        self.classifier = nn.Linear(shape.hidden, shape.vocabulary, bias=False)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.classifier(self.norm(x)).flatten(0, 1).float(), labels.flatten())


class Plain(nn.Module):
    """The model; called with labels, it returns the mean loss."""

    def __init__(self, shape: Shape, length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.head = Head(shape)
        size = shape.head_size
        angles = torch.arange(length).unsqueeze(1) / THETA ** (torch.arange(0, size, 2) / size)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.head(x, labels)
