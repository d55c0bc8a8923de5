"""Llama and what is built like it: RMSNorm, rotary positions, grouped-query attention, SwiGLU, experts if wanted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.nn import functional as F

from colonnade.context.parallel_context import ParallelContext
from colonnade.core import given_or_global
from colonnade.models.gpt import Head, LanguageModel, LanguageModelLoss, TokenEmbedding, TransformerBlock
from colonnade.models.moe_gpt import CarryingBlock, CarryingEmbedding, CarryingHead, MoELoss
from colonnade.nn.layer import MLP, Arrangement, RMSNorm, Rotary, SelfAttention
from colonnade.nn.moe import MoE, TopKRouter


class Llama(LanguageModel):
    """As GPT, with RMSNorm, rotary positions, grouped-query attention (`kv_heads`) and SwiGLU of width `inner`, no biases.

    `length`: how long sequences are meant to be; longer ones work. `inner`: 8/3 of hidden, in multiples of 64, unless
    given. `theta` and `rotary_scaling`: see `Rotary`. `qk_norm`: an RMSNorm over each head of queries and keys. With
    `experts`, every `every`-th block has so many instead of one feed-forward layer; `router` are the options of
    TopKRouter, `moe` those of MoE. The model then gives (logits, auxiliary losses), as MoEGPT does.
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
        return (CarryingEmbedding, CarryingBlock, CarryingHead, MoELoss) if self._experts else super().parts()

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
