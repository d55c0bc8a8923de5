"""LayerNorm and RMSNorm over a hidden dimension that may be sharded."""

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
from colonnade.nn.layer.spread import check_input, mark_output, size_of
from colonnade.parallel import collectives


class _Norm(nn.Module):
    """Base class: a norm with parameters along the hidden dimension of the outer spread."""

    def __init__(self, size: int, arrangement: Arrangement | None) -> None:
        super().__init__()
        self.arrangement = arrangement or arrange()
        self.size = size
        self.arrangement.hidden_sizes(size, "outer")  # raises if the size cannot be sharded

    @abstractmethod
    def _normalized(self, x: Tensor) -> Tensor: ...

    def forward(self, x: Tensor) -> Tensor:
        check_input(self, self.arrangement, x, "outer", self.size)
        return mark_output(self, self.arrangement, self._normalized(x), self.arrangement.outer)

    def _own(self, full: Tensor | None) -> nn.Parameter | None:
        if full is None:
            return None
        shard = self.arrangement.take_along_hidden(full.detach(), "outer")
        return own(shard, self.arrangement.outer.along_hidden(), tuple(full.shape), full)

    @property
    def _hidden_mode(self) -> ParallelMode | None:
        """The mode that shards the hidden dimension over more than one rank."""
        mode = self.arrangement.outer.hidden
        return mode if mode is not None and size_of(mode, self.arrangement.context) > 1 else None

    def extra_repr(self) -> str:
        return f"{self.size}, {self.arrangement}"


class LayerNorm(_Norm):
    """torch.nn.LayerNorm over the hidden dimension, for activations in the outer spread.

    If the hidden dimension is sharded, the means and centred squares of all ranks are all-gathered (one small
    collective each in forward and backward) and combined by the pairwise formula, which does not suffer from
    cancellation like a plain sum of squares.
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
        full = source or nn.LayerNorm(normalized_shape, eps, bias=bias, device=device, dtype=dtype)
        self.eps = full.eps
        self.weight, self.bias = self._own(full.weight), self._own(full.bias)

    @classmethod
    def from_module(cls, module: nn.LayerNorm, *, arrangement: Arrangement | None = None) -> LayerNorm:
        """Make this rank's shard of a torch.nn.LayerNorm over one dimension, with the same weights on every rank."""
        return cls(_one_dimension(module), arrangement=arrangement, source=module)

    def _normalized(self, x: Tensor) -> Tensor:
        mode = self._hidden_mode
        if mode is None:
            return F.layer_norm(x, (self.size,), self.weight, self.bias, self.eps)
        exact = x.to(torch.promote_types(x.dtype, torch.float32))  # half precision is too coarse for statistics
        context = self.arrangement.context
        local_mean = exact.mean(-1, keepdim=True)
        stats = torch.cat([local_mean, (exact - local_mean).square().sum(-1, keepdim=True)], -1)
        gathered = collectives.all_gather(stats, mode, -1, (2,) * size_of(mode, context), context=context)
        means, squares = gathered[..., 0::2], gathered[..., 1::2]
        # All shards have the same size, so the mean is that of the means.
        mean = means.mean(-1, keepdim=True)
        total = squares.sum(-1, keepdim=True) + exact.shape[-1] * (means - mean).square().sum(-1, keepdim=True)
        y = ((exact - mean) * torch.rsqrt(total / self.size + self.eps)).to(x.dtype)
        y = y if self.weight is None else y * self.weight
        return y if self.bias is None else y + self.bias


class RMSNorm(_Norm):
    """torch.nn.RMSNorm over the hidden dimension, for activations in the outer spread."""

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
        full = source or nn.RMSNorm(normalized_shape, eps, device=device, dtype=dtype)
        self.eps = full.eps
        self.weight = self._own(full.weight)

    @classmethod
    def from_module(cls, module: nn.RMSNorm, *, arrangement: Arrangement | None = None) -> RMSNorm:
        """Make this rank's shard of a torch.nn.RMSNorm over one dimension, with the same weights on every rank."""
        return cls(_one_dimension(module), arrangement=arrangement, source=module)

    def _normalized(self, x: Tensor) -> Tensor:
        mode, context = self._hidden_mode, self.arrangement.context
        if mode is None:
            return F.rms_norm(x, (self.size,), self.weight, self.eps)
        exact = x.to(torch.promote_types(x.dtype, torch.float32))  # half precision is too coarse for statistics
        squares = collectives.reduce(exact.square().sum(-1, keepdim=True), mode, context=context)
        mean = collectives.copy(squares, mode, context=context) / self.size
        eps = torch.finfo(exact.dtype).eps if self.eps is None else self.eps
        y = (exact * torch.rsqrt(mean + eps)).to(x.dtype)
        return y if self.weight is None else y * self.weight


def _one_dimension(module: nn.LayerNorm | nn.RMSNorm) -> int:
    if len(module.normalized_shape) != 1:
        raise ConfigError(
            f"a norm over the dimensions {tuple(module.normalized_shape)} cannot be converted. Only a norm over the "
            "last dimension can be converted."
        )
    (size,) = module.normalized_shape
    return int(size)
