"""The feed-forward part of a transformer: a column and a row weight with an activation between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from colonnade.errors import ConfigError
from colonnade.nn.layer.arrangement import Arrangement, arrange
from colonnade.nn.layer.linear import Linear


class MLP(nn.Module):
    """down(activation(up(x))), in the outer spread to the same; the wide activation in between is split."""

    def __init__(
        self,
        hidden: int,
        inner: int,
        *,
        activation: Callable[[Tensor], Tensor] = F.gelu,
        bias: bool = True,
        arrangement: Arrangement | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        source: tuple[nn.Linear, nn.Linear] | None = None,
    ) -> None:
        super().__init__()
        options: dict[str, Any] = {"arrangement": arrangement or arrange(), "device": device, "dtype": dtype}
        up, down = source or (None, None)
        self.activation = activation
        self.up = Linear(hidden, inner, bias, source=up, **options)
        self.down = Linear(inner, hidden, bias, split="row", source=down, **options)

    @classmethod
    def from_module(cls, module: nn.Sequential, *, arrangement: Arrangement | None = None) -> MLP:
        """This rank's part of a whole nn.Sequential(Linear, activation, Linear), the same on every rank."""
        layers: tuple[Any, ...] = tuple(module)
        if [isinstance(layer, nn.Linear) for layer in layers] != [True, False, True]:
            raise ConfigError(f"an MLP is taken from nn.Sequential(Linear, activation, Linear), not from {module}")
        up, activation, down = layers
        return cls(up.in_features, up.out_features, activation=activation, arrangement=arrangement, source=(up, down))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)))
