"""A GPT as a plain list of layers, so that a pipeline can be split anywhere. The embedding and the output layer share
one weight."""

from collections import OrderedDict

import torch
from torch import nn
from torch.nn import functional as F


class Entrance(nn.Module):
    """Embeddings of characters and of their positions."""

    def __init__(self, vocabulary, width, length):
        super().__init__()
        self.characters, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)

    def forward(self, x):
        return self.characters(x) + self.places(torch.arange(x.shape[1], device=x.device))


class Block(nn.Module):
    """Causal self-attention, then a feed-forward layer."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        mixed = F.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Exit(nn.Module):
    """Logits of the next character; `weight` is the weight of the embedding."""

    def __init__(self, weight):
        super().__init__()
        self.norm, self.weight = nn.LayerNorm(weight.shape[1]), weight

    def forward(self, x):
        return F.linear(self.norm(x), self.weight)


def gpt(vocabulary, width, heads, layers, length):
    """The full model, which `colonnade.split` splits into stages."""
    entrance = Entrance(vocabulary, width, length)
    model = nn.Sequential(
        OrderedDict(
            entrance=entrance,
            **{f"block{at}": Block(width, heads) for at in range(layers)},
            exit=Exit(entrance.characters.weight),
        )
    )
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02 / (2 * layers) ** (0.5 * name.endswith(("out.weight", "down.weight"))))
    return model


def continued(model, prompt, count, length, seed=0):
    """Generate `count` characters after a prompt."""
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            logits = model(torch.tensor([tokens[-length:]]))[0, -1]
            tokens.append(torch.multinomial(F.softmax(logits / 0.7, dim=0), 1, generator=generator).item())
    return tokens
