"""Plain models, not written for pipelines, whose forward passes do this and that between their layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, WORDS, LENGTH = 8, 11, 5


class Block(nn.Module):
    def __init__(self, kind: str = "full") -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)
        self.kind = kind

    def forward(self, x: Tensor, mask: Tensor, gain: Tensor) -> Tensor:
        mixed = torch.where(mask, self.norm(x), 0.0).mean(1, keepdim=True)
        return x + gain * self.down(F.gelu(self.up(self.norm(x) + mixed)))


class Gains(nn.Module):
    """No parameters, but a buffer that is saved: every stage calls it itself."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.register_buffer("rates", 1.0 / torch.arange(1, count + 1))

    def forward(self, like: Tensor) -> Tensor:
        return self.rates.to(like.dtype)


class Decoder(nn.Module):
    """Positions are a parameter of the model itself, the embedding is scaled, and each kind of layer has a mask of its own."""

    def __init__(self, blocks: int = 4, tied: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.positions = nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.register_buffer("seen", torch.zeros(()))
        self.drop, self.gains = nn.Dropout(dropout), Gains(blocks)
        self.blocks = nn.ModuleList(Block("near" if at % 2 else "full") for at in range(blocks))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, ids: Tensor, padding: Tensor | None = None) -> Tensor:
        x = self.words(ids) * math.sqrt(WIDTH) + self.positions[: ids.shape[1]]
        x = self.drop(x)
        full = torch.ones_like(x, dtype=torch.bool) if padding is None else padding[..., None].expand_as(x)
        masks = {"full": full, "near": full & (torch.arange(ids.shape[1]) > 1)[:, None].to(ids.device)}
        gains = self.gains(x)
        for at, block in enumerate(self.blocks):
            x = block(x, masks[block.kind], gain=gains[at])
        return self.head(self.norm(x) * 2)


class Outer(nn.Module):
    """A model around a model, which hands on the first embedding and pairs, and uses the embedding as its head."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

        def forward(self, pair: tuple[Tensor, Tensor | None], first: Tensor) -> tuple[Tensor, Tensor]:
            x, before = pair
            y = self.inner(x) + 0.1 * first
            return y, y if before is None else before + y

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.body = nn.ModuleDict(dict(layers=nn.ModuleList(self.Layer() for _ in range(layers))))
        self.table = nn.Embedding(WORDS, WIDTH)
        self.unused = nn.Linear(2, 2)

    def forward(self, ids: Tensor) -> Tensor:
        first = self.table(ids)
        pair: tuple[Tensor, Tensor | None] = (first, None)
        for layer in self.body["layers"]:
            pair = layer(pair, first)
            pair = (pair[0] * 0.5, pair[1])
        return F.linear(pair[1], self.table.weight)  # type: ignore[arg-type]


class Net(nn.Module):
    """Layers that also get what others returned long before, as in a U."""

    def __init__(self, in_forward: bool = False) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.down = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(2))
        self.up = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(2))
        self.join = nn.ModuleList(nn.Bilinear(WIDTH, WIDTH, WIDTH) for _ in range(2))
        self.in_forward = in_forward

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        kept = []
        for layer in self.down:
            x = layer(x)
            kept.append(x)
        for layer, join in zip(self.up, self.join, strict=True):
            x = layer(x)
            x = x + kept.pop() if self.in_forward else join(x, kept.pop())
        return x


class Writing(nn.Module):
    """Writes into tensors: into a new one what comes from a layer, and into a result that a later layer is given."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

        def forward(self, x: Tensor, more: Tensor, weights: Tensor) -> Tensor:
            return self.inner(x) * weights + more

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.layers = nn.Linear(WIDTH, WIDTH), nn.ModuleList(self.Layer() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = more = self.stem(x)
        weights = torch.zeros(x.shape[0], 2, dtype=x.dtype, device=x.device)
        weights[:, 0] = x.mean(1)
        weights = weights[:, :1]
        for at, layer in enumerate(self.layers):
            x = layer(x.clone(), more, weights)
            if at == 1:
                more.add_(1.0)
        return x


class Telling(nn.Module):
    """Layers of which one leaves something for another behind the forward pass's back."""

    class Layer(nn.Module):
        def __init__(self, notes: dict[str, Tensor]) -> None:
            super().__init__()
            self.inner, self.notes = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), notes

        def forward(self, x: Tensor) -> Tensor:
            y = self.inner(x) + self.notes.get("last", 0.0)
            self.notes["last"] = y.detach()
            return y

    def __init__(self) -> None:
        super().__init__()
        self.notes: dict[str, Tensor] = {}
        self.layers = nn.ModuleList(self.Layer(self.notes) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        self.notes.clear()
        for layer in self.layers:
            x = layer(x)
        return x


def run_all(stages: Sequence[nn.Module], *args: Any, **kwargs: Any) -> Any:
    """The stages one after another."""
    first, *others = stages
    value = first(*args, **kwargs)
    for stage in others:
        value = stage(**value)
    return value


def ids(rows: int = 3, length: int = LENGTH) -> Tensor:
    return torch.arange(rows * length).view(rows, length) % WORDS


class Layer(nn.Module):
    """A block with a saved buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.register_buffer("rate", torch.full((1,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.rate * self.inner(x)


class Aside(nn.Module):
    """Its first layer also returns what only its head is given; parameters of its own are used before and after layers."""

    class First(Layer):
        def forward(self, x: Tensor) -> tuple[Tensor, int, Tensor]:  # type: ignore[override]
            return super().forward(x), 3, self.inner(x) * 2

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.join = nn.Bilinear(WIDTH, WIDTH, WIDTH)

        def forward(self, x: Tensor, aside: Tensor) -> Tensor:
            return self.join(x, aside)

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.full((WIDTH,), 1.5)), nn.Parameter(torch.ones(WIDTH))
        self.first, self.layers = self.First(), nn.ModuleList(Layer() for _ in range(3))
        self.head = self.Head()
        self.kinds = nn.Parameter(torch.arange(3), requires_grad=False)
        self.register_module("nothing", None)
        self.register_buffer("rate", torch.full((1,), 0.5))
        self.register_buffer("again", self.rate)

    def forward(self, x: Tensor) -> Tensor:
        x, number, aside = self.first(x * self.scale * self.rate)
        for at, layer in enumerate(self.layers):
            x = layer(x) if at else layer(x) + self.shift
        return self.head(x * number, aside)


class Late(nn.Module):
    """What is made between two layers goes into the second layer after that."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.layers = nn.Linear(WIDTH, WIDTH), nn.ModuleList(Layer() for _ in range(2))
        self.join = nn.Bilinear(WIDTH, WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        double = x * 2
        x = self.layers[0](x)
        return self.layers[1](self.join(x, double))


class Twofold(nn.Module):
    """Runs its layers twice, and one function with and without numbers that come from parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.act, self.layers, self.once_more = nn.Tanh(), nn.ModuleList(Layer() for _ in range(2)), False
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.act(x)
        for layer in [*self.layers, *self.layers]:
            x = self.act(layer(x)) * weight * self.gain
            x = x * torch.full_like(x, 2.0) + x.new_zeros(x.shape)
        return self.act(x) if self.once_more else x


class Around(nn.Module):
    """A model around a model."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Decoder(tied=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.inner(ids) * 2


class Keyed(nn.Module):
    """Layers in a dict, asked in every way that a dict can be; one norm stands beside them and in each."""

    class Layer(nn.Module):
        def __init__(self, norm: nn.Module) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(WIDTH, WIDTH), norm

        def forward(self, x: Tensor) -> Tensor:
            return x + self.norm(self.linear(x))

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.ends = nn.ModuleDict({"first": nn.Linear(WIDTH, WIDTH), "last": nn.Linear(WIDTH, 2)})
        self.layers = nn.ModuleList(self.Layer(self.norm) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        assert "first" in self.ends
        assert "middle" not in self.ends
        assert list(self.ends) == list(self.ends.keys()) == [name for name, _ in self.ends.items()] == ["first", "last"]
        assert len(self.ends) == len(list(self.ends.values())) == 2
        assert self.ends["last"] is self.ends.last is dict(self.ends.items())["last"] is list(self.ends.values())[1]
        x = self.ends["first"](x)
        for layer in self.layers:
            x = layer(x)
        return self.ends["last"](self.norm(x))


class Gated(nn.Module):
    """What a function of several results makes of the stem's is given to every layer; a plain object goes along."""

    class Pair(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x * 2, torch.ones(1, dtype=x.dtype)

    class Layer(Layer):
        def forward(self, x: Tensor, gate: Tensor, notes: Any) -> Tensor:  # type: ignore[override]
            return super().forward(x) * gate

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.pair, self.layers = (
            nn.Linear(WIDTH, WIDTH),
            self.Pair(),
            nn.ModuleList(self.Layer() for _ in range(3)),
        )

    def notes(self, gate: Tensor) -> Any:
        return SimpleNamespace(flag=True)

    def forward(self, x: Tensor) -> Tensor:
        gate, one = self.pair(self.stem(x))
        gate = gate * one
        for layer in self.layers:
            x = layer(x, gate, self.notes(gate))
        return x


class Residual(nn.Module):
    """What goes past each layer is added to its result, outside of all layers."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.stem, self.layers = nn.Linear(WIDTH, WIDTH), nn.ModuleList(Layer() for _ in range(3))
        self.in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x).add_(x) if self.in_place else layer(x) + x
        return x


class Borrowing(Outer):
    """Uses the weight of a layer that it never calls, and that another layer has too."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        first = self.table(ids)
        pair: tuple[Tensor, Tensor | None] = (first, None)
        for layer in self.body["layers"]:
            pair = layer(pair, first)
        return F.linear(pair[0], self.head.weight)
