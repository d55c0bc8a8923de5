"""Stages for tests on real worlds, and the truth about them from one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from colonnade.parallel.split import call_layer

WIDTH = 6


class Simple(nn.Module):
    """One tensor in, one out; begins in place, as a stage cut before an activation does."""

    def __init__(self, index: int, count: int) -> None:
        super().__init__()
        self.first, self.linear, self.norm = index == 0, nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x if self.first else nn.functional.gelu(x.mul_(1.5))))


class Rich(nn.Module):
    """Dicts and tuples of floats, integers, flags and text; integer tensors decide what is computed."""

    def __init__(self, index: int, count: int) -> None:
        super().__init__()
        self.first, self.last = index == 0, index == count - 1
        self.linear, self.table = nn.Linear(WIDTH, WIDTH), nn.Embedding(4, WIDTH)
        self.unused_later = nn.Linear(WIDTH, 2)

    def forward(self, hidden: Tensor, ids: Tensor, more: Any = None, scale: float = 1.0, tag: str = "") -> Any:
        if not self.first:
            assert more == (None, True, [3, "x"]), more
            assert tag == "kept"
        assert not ids.requires_grad
        hidden = torch.tanh(self.linear(hidden)) + self.table(ids % 4) * scale
        if self.last:
            return hidden.sum(1)
        return {"hidden": hidden, "ids": ids + 1, "more": (None, True, [3, "x"]), "scale": scale / 2, "tag": "kept"}


class SideOutput(nn.Module):
    """A second float output that the next stage does not use, and a float output that needs no gradient."""

    def __init__(self, index: int, count: int) -> None:
        super().__init__()
        self.last = index == count - 1
        self.linear, self.side = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, side: Tensor | None = None, constant: Tensor | None = None) -> Any:
        hidden = torch.tanh(self.linear(x)) + (0 if constant is None else constant)
        return hidden if self.last else (hidden, self.side(x), torch.ones(WIDTH, dtype=x.dtype))


class Varying(nn.Module):
    """The number of columns between stages depends on the values of the micro-batch."""

    def __init__(self, index: int, count: int) -> None:
        super().__init__()
        self.last = index == count - 1
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        # Columns of zeros carry nothing, so leaving them out changes neither the sum nor a gradient.
        columns = int((x.abs().sum(0) > 0).sum())
        hidden = (x * self.scale[: x.size(1)])[:, :columns]
        return hidden.sum(1) if self.last else hidden


class Unsplittable(Simple):
    """Recomputes a layer in a way that autograd cannot run in part."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(checkpoint(self.linear, x, use_reentrant=True)) + self.norm(x)


class Saturating(nn.Module):
    """Its output is kept for its own backward pass."""

    def __init__(self, index: int, count: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class FrozenStart(Simple):
    """The first stage has nothing to train."""

    def __init__(self, index: int, count: int) -> None:
        super().__init__(index, count)
        self.requires_grad_(index > 0)


Kind = Callable[[int, int], nn.Module]


def build(kind: Kind, count: int) -> list[nn.Module]:
    """All stages, the same on every rank."""
    torch.manual_seed(11)
    return [kind(index, count).double() for index in range(count)]


def batch_for(kind: Kind, rows: int) -> tuple[Any, Any]:
    """Data and label of one batch, the same on every rank."""
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64)
    if kind is Rich:
        return {"hidden": x, "ids": torch.arange(rows) * 7, "scale": 0.5, "tag": "kept"}, {"target": x.sum(1)}
    if kind is Varying:
        return x.tril(), x.sum(1)
    return x, x.cos()


def criterion(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)


def run_in_one_process(stages: Sequence[nn.Module], data: Any) -> Any:
    for stage in stages:
        data = call_layer(stage, data)
    return data


def truth(kind: Kind, count: int, rows: int, calls: int = 1) -> tuple[Tensor, Tensor, dict[str, Tensor | None]]:
    """Output, loss and gradients (named `stage.parameter`) of one process on the whole batch, `calls` times."""
    stages = build(kind, count)
    for _ in range(calls):
        data, label = batch_for(kind, rows)
        output = run_in_one_process(stages, data)
        loss = criterion(output, **label) if isinstance(label, dict) else criterion(output, label)
        loss.backward()
    grads = {f"{i}.{name}": p.grad for i, stage in enumerate(stages) for name, p in stage.named_parameters()}
    return output.detach(), loss.detach(), grads
