"""LayerNorm and RMSNorm over a hidden dimension that may be split."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from colonnade.context.parallel_mode import ParallelMode
from colonnade.errors import ConfigError
from colonnade.nn.layer.arrangement import Arrangement, arrange
from colonnade.nn.layer.linear import own
from colonnade.nn.layer.spread import gives, size_of, takes
from colonnade.parallel import collectives


class _Norm(nn.Module):
    """What the two have in common: parameters along the hidden dimension of the outer spread."""

    def __init__(self, size: int, arrangement: Arrangement | None) -> None:
        super().__init__()
        self.arrangement = arrangement or arrange()
        self.size = size
        self.arrangement.hidden_sizes(size, "outer")  # says now what cannot be split

    @abstractmethod
    def _normalized(self, x: Tensor) -> Tensor: ...

    def forward(self, x: Tensor) -> Tensor:
        takes(self, self.arrangement, x, "outer", self.size)
        return gives(self, self.arrangement, self._normalized(x), self.arrangement.outer)

    def _own(self, whole: Tensor | None) -> nn.Parameter | None:
        if whole is None:
            return None
        part = self.arrangement.take_along_hidden(whole.detach(), "outer")
        return own(part, self.arrangement.outer.along_hidden(), tuple(whole.shape), whole)

    @property
    def _cut_by(self) -> ParallelMode | None:
        """The mode that splits the hidden dimension among several ranks."""
        mode = self.arrangement.outer.hidden
        return mode if mode is not None and size_of(mode, self.arrangement.context) > 1 else None

    def extra_repr(self) -> str:
        return f"{self.size}, {self.arrangement}"


class LayerNorm(_Norm):
    """torch.nn.LayerNorm over the hidden dimension, in the outer spread.

    Where that is split, each rank's mean and squares are gathered (one small collective each way) and joined by
    the pairwise formula, which does not cancel as a plain sum of squares does.
    """

    def __init__(
        self,
        normalized_shape: int,
        eps: float = 1e-5,
        *,
        bias: bool = True,
        arrangement: Arrangement | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        source: nn.LayerNorm | None = None,
    ) -> None:
        super().__init__(normalized_shape, arrangement)
        whole = source or nn.LayerNorm(normalized_shape, eps, bias=bias, device=device, dtype=dtype)
        self.eps = whole.eps
        self.weight, self.bias = self._own(whole.weight), self._own(whole.bias)

    @classmethod
    def from_module(cls, module: nn.LayerNorm, *, arrangement: Arrangement | None = None) -> LayerNorm:
        """This rank's part of a whole torch.nn.LayerNorm over one dimension, the same on every rank."""
        return cls(_one_dimension(module), arrangement=arrangement, source=module)

    def _normalized(self, x: Tensor) -> Tensor:
        mode = self._cut_by
        if mode is None:
            return F.layer_norm(x, (self.size,), self.weight, self.bias, self.eps)
        exact = x.to(torch.promote_types(x.dtype, torch.float32))  # statistics are not for half precision
        mean, variance = self._moments(exact, mode)
        y = ((exact - mean) * torch.rsqrt(variance + self.eps)).to(x.dtype)
        y = y if self.weight is None else y * self.weight
        return y if self.bias is None else y + self.bias

    def _moments(self, x: Tensor, mode: ParallelMode) -> tuple[Tensor, Tensor]:
        context = self.arrangement.context
        ranks, here = size_of(mode, context), x.shape[-1]
        mine = x.mean(-1, keepdim=True)
        stats = torch.cat([mine, (x - mine).square().sum(-1, keepdim=True)], -1)
        everyone = collectives.all_gather(stats, mode, -1, (2,) * ranks, context=context)
        means, squares = everyone[..., 0::2], everyone[..., 1::2]
        mean = means.mean(-1, keepdim=True)
        total = squares.sum(-1, keepdim=True) + here * (means - mean).square().sum(-1, keepdim=True)
        return mean, total / self.size


class RMSNorm(_Norm):
    """torch.nn.RMSNorm over the hidden dimension, in the outer spread."""

    def __init__(
        self,
        normalized_shape: int,
        eps: float | None = None,
        *,
        arrangement: Arrangement | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        source: nn.RMSNorm | None = None,
    ) -> None:
        super().__init__(normalized_shape, arrangement)
        whole = source or nn.RMSNorm(normalized_shape, eps, device=device, dtype=dtype)
        self.eps = whole.eps
        self.weight = self._own(whole.weight)

    @classmethod
    def from_module(cls, module: nn.RMSNorm, *, arrangement: Arrangement | None = None) -> RMSNorm:
        """This rank's part of a whole torch.nn.RMSNorm over one dimension, the same on every rank."""
        return cls(_one_dimension(module), arrangement=arrangement, source=module)

    def _normalized(self, x: Tensor) -> Tensor:
        mode, context = self._cut_by, self.arrangement.context
        if mode is None:
            return F.rms_norm(x, (self.size,), self.weight, self.eps)
        exact = x.to(torch.promote_types(x.dtype, torch.float32))  # statistics are not for half precision
        squares = collectives.reduce(exact.square().sum(-1, keepdim=True), mode, context=context)
        mean = collectives.copy(squares, mode, context=context) / self.size
        eps = torch.finfo(exact.dtype).eps if self.eps is None else self.eps
        y = (exact * torch.rsqrt(mean + eps)).to(x.dtype)
        return y if self.weight is None else y * self.weight


def _one_dimension(module: nn.LayerNorm | nn.RMSNorm) -> int:
    if len(module.normalized_shape) != 1:
        raise ConfigError(
            f"a norm over {tuple(module.normalized_shape)} cannot be taken over: only one over the last dimension can"
        )
    (size,) = module.normalized_shape
    return int(size)
