"""Llama and similar models: RMSNorm, rotary positions, grouped-query attention, SwiGLU, optionally experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.nn import functional as F

from colonnade.context.parallel_context import ParallelContext
from colonnade.core import given_or_global
from colonnade.models.gpt import Head, LanguageModel, LanguageModelLoss, TokenEmbedding, TransformerBlock
from colonnade.models.moe_gpt import MoEBlock, MoEEmbedding, MoEHead, MoELoss
from colonnade.nn.layer import MLP, Arrangement, RMSNorm, Rotary, SelfAttention
from colonnade.nn.moe import MoE, TopKRouter


class Llama(LanguageModel):
    """Llama architecture: RMSNorm, rotary positions, grouped-query attention and SwiGLU, without biases.

    With experts the model returns (logits, auxiliary losses), like MoEGPT. Arguments that are not listed are those of
    `LanguageModel`.

    Args:
        length: The expected length of sequences, for the rotary tables; longer sequences work too.
        kv_heads: The number of key and value heads; defaults to `heads`.
        head_size: The width of a head; defaults to hidden / heads.
        inner: The width of SwiGLU; defaults to 8/3 of hidden, rounded up to a multiple of 64.
        theta: The base of the rotary frequencies; see `Rotary`.
        rotary_scaling: See `Rotary`.
        qk_norm: Whether there is an RMSNorm over each head of queries and keys.
        eps: The eps of the norms.
        experts: The number of experts in every `every`-th block, in place of one feed-forward layer; 0 for none.
        every: The distance between blocks with experts.
        router: Options of `TopKRouter`.
        moe: Options of `MoE`.
        options: `dropout`, `over` and `fused_loss`.
    """

    positions = False

    def __init__(
        self,
        vocabulary: int,
        length: int,
        hidden: int,
        heads: int,
        layers: int,
        *,
        kv_heads: int | None = None,
        head_size: int | None = None,
        inner: int | None = None,
        theta: float = 10000.0,
        rotary_scaling: Mapping[str, Any] | None = None,
        qk_norm: bool = False,
        eps: float = 1e-5,
        tied: bool = False,
        experts: int = 0,
        every: int = 1,
        router: Mapping[str, Any] | None = None,
        moe: Mapping[str, Any] | None = None,
        context: ParallelContext | None = None,
        **options: Any,
    ) -> None:
        self._inner, self._eps = inner or -(-8 * hidden // (3 * 64)) * 64, eps
        self._experts, self._every, self._router, self._moe = experts, every, router or {}, moe or {}
        device = given_or_global(context).device
        rotary = Rotary(head_size or hidden // heads, theta, rotary_scaling, length=length, device=device)
        norm_eps = eps if qk_norm else None
        self._attention: dict[str, Any] = {"kv_heads": kv_heads, "head_size": head_size, "qk_norm": norm_eps}
        self._attention["rotary"] = rotary
        super().__init__(vocabulary, length, hidden, heads, layers, tied=tied, context=context, **options)

    def parts(self) -> tuple[type[TokenEmbedding], type[TransformerBlock], type[Head], type[LanguageModelLoss]]:
        return (MoEEmbedding, MoEBlock, MoEHead, MoELoss) if self._experts else super().parts()

    def attention(self, hidden: int, heads: int, options: dict[str, Any]) -> SelfAttention:
        return SelfAttention(hidden, heads, bias=False, **self._attention, **options)

    def feed_forward(self, at: int, hidden: int, here: Arrangement) -> nn.Module:
        options: dict[str, Any] = {"inner": self._inner, "activation": F.silu, "gated": True, "bias": False}
        if not self._experts or at % self._every != self._every - 1:
            return MLP(hidden, arrangement=here, **options)
        router = TopKRouter(hidden, self._experts, **self._router, context=here.context)
        return MoE(hidden, self._experts, router, **{**options, **self._moe}, context=here.context)

    def norm(self, hidden: int, arrangement: Arrangement) -> nn.Module:
        return RMSNorm(hidden, self._eps, arrangement=arrangement)
