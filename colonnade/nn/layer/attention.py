"""Self-attention with the heads split over the ranks, as the tensor mode splits the inner hidden dimension."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from colonnade.errors import ConfigError
from colonnade.nn.layer.arrangement import Arrangement, arrange
from colonnade.nn.layer.dropout import stream_of
from colonnade.nn.layer.entry import partition_input
from colonnade.nn.layer.linear import Linear


class SelfAttention(nn.Module):
    """Multi-head self-attention, [batch, sequence, hidden] in the outer spread to the same.

    `qkv.weight` is [3, hidden, hidden]: query, key and value, each split by heads. In the 1d mode the number of
    heads need not be a multiple of the ranks, but each rank needs one.
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        *,
        causal: bool = False,
        dropout: float = 0.0,
        bias: bool = True,
        arrangement: Arrangement | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        source: nn.MultiheadAttention | None = None,
    ) -> None:
        super().__init__()
        self.arrangement = arrangement or arrange()
        self.head_size = _head_size(hidden, heads, self.arrangement)
        self.causal, self.dropout = causal, dropout
        options: dict[str, Any] = {"unit": self.head_size, "arrangement": self.arrangement}
        options.update({"device": device, "dtype": dtype})
        first, last = (None, None) if source is None else (_joint_projection(source), source.out_proj)
        self.qkv = Linear(hidden, hidden, bias, parts=3, source=first, **options)
        self.out = Linear(hidden, hidden, bias, split="row", source=last, **options)

    @classmethod
    def from_module(
        cls, module: nn.MultiheadAttention, *, causal: bool = False, arrangement: Arrangement | None = None
    ) -> SelfAttention:
        """This rank's heads of a whole torch.nn.MultiheadAttention, the same on every rank; batch first here."""
        if module.in_proj_weight is None or module.bias_k is not None or module.add_zero_attn:
            raise ConfigError(
                "only attention with kdim = vdim = embed_dim, without bias_kv and zero_attn, can be taken"
            )
        return cls(
            module.embed_dim,
            module.num_heads,
            causal=causal,
            dropout=module.dropout,
            bias=module.in_proj_bias is not None,
            arrangement=arrangement,
            source=module,
        )

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """`mask` as of scaled_dot_product_attention: [sequence, sequence], or [batch or 1, 1, ...] with whole batch."""
        if mask is not None and mask.dim() == 4 and len(mask) > 1:
            mask = partition_input(mask, sequence=None, hidden=None, side="inner", arrangement=self.arrangement)
        query, key, value = (self._by_head(part) for part in self.qkv(x).chunk(3, -1))
        dropped = self.dropout if self.training else 0.0
        with stream_of(self.arrangement, "inner"):
            mixed = F.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, dropout_p=dropped, is_causal=self.causal
            )
        return self.out(mixed.transpose(1, 2).flatten(-2))

    def _by_head(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_size)).transpose(1, 2)


def _head_size(hidden: int, heads: int, arrangement: Arrangement) -> int:
    if hidden % heads:
        raise ConfigError(f"hidden={hidden} is no multiple of heads={heads}")
    size = hidden // heads
    fewest = min(arrangement.hidden_sizes(hidden, "inner", size))
    if fewest == 0:
        raise ConfigError(f"heads={heads}: some ranks of {arrangement.inner.hidden} would have none; take fewer ranks")
    return size


def _joint_projection(source: nn.MultiheadAttention) -> nn.Linear:
    """Query, key and value as one torch.nn.Linear."""
    joint = nn.Linear(source.embed_dim, 3 * source.embed_dim, False, device="meta")
    joint.weight = source.in_proj_weight
    if source.in_proj_bias is not None:
        joint.bias = source.in_proj_bias
    return joint
