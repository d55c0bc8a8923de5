"""What the models share: attention over split heads and split sequences, the block, and the stage of a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor, nn

from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.core import global_context
from colonnade.errors import ConfigError
from colonnade.nn.layer import Arrangement, Dropout, LayerNorm, Linear, arrange
from colonnade.nn.sequence import ring_attention, ulysses_attention
from colonnade.parallel.placement import Tied, place, placement_of
from colonnade.parallel.split import Split, split

Over = Literal["ring", "ulysses"]
"""How attention reaches over a split sequence."""

_OVER: dict[str, Callable[..., Tensor]] = {"ring": ring_attention, "ulysses": ulysses_attention}


class Attention(nn.Module):
    """Self-attention: heads split by the tensor mode, tokens by the sequence mode, or neither."""

    def __init__(self, hidden: int, heads: int, *, causal: bool, over: Over, context: ParallelContext | None) -> None:
        super().__init__()
        if hidden % heads or over not in _OVER:
            raise ConfigError(
                f"hidden={hidden} must be a multiple of heads={heads}, and over={over!r} one of 'ring' and 'ulysses'"
            )
        here = arrange(context)
        self.width, self._attend = hidden // heads, _OVER[over]
        self._options: dict[str, Any] = {"causal": causal, "context": here.context}
        if over == "ring":
            self._options["balanced"] = causal
        self.qkv = Linear(hidden, hidden, parts=3, unit=self.width, arrangement=here)
        self.out = Linear(hidden, hidden, split="row", unit=self.width, arrangement=here)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (-1, self.width)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return self.out(self._attend(q, k, v, **self._options).transpose(1, 2).flatten(-2))


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a norm and beside a residual connection."""

    def __init__(self, attention: Attention, feed_forward: nn.Module, hidden: int, dropout: float, here: Arrangement):
        super().__init__()
        self.first_norm, self.attention = LayerNorm(hidden, arrangement=here), attention
        self.second_norm, self.feed_forward = LayerNorm(hidden, arrangement=here), feed_forward
        self.dropout = Dropout(dropout, arrangement=here)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.first_norm(x)))
        return x + self.dropout(self.feed_forward(self.second_norm(x)))


def is_balanced(causal: bool, over: Over) -> bool:
    """Whether a model's sequences are split into balanced parts: where a ring has a causal mask."""
    return causal and over == "ring"


def own_stage(model: nn.Module, context: ParallelContext | None = None, num_chunks: int = 1) -> nn.Module:
    """This rank's part of a model under a pipeline, weights that several stages share being tied; else the model.

    `num_chunks` stages lie on every rank, going round; they come as an nn.ModuleList.
    """
    context = global_context if context is None else context
    ranks = context.pipeline_parallel_size
    if ranks == 1:
        return model
    stages = split(model, num_stages=ranks * num_chunks)
    _tie(stages, ranks)
    at = context.get_local_rank(ParallelMode.PIPELINE)
    mine = [stages[at + ranks * chunk] for chunk in range(num_chunks)]
    return mine[0] if num_chunks == 1 else nn.ModuleList(mine)


def _tie(stages: Split, ranks: int) -> None:
    for tie in stages.ties:
        name, first = tie[0]
        at = tuple(sorted({stage % ranks for _, stage in tie}))
        if len(at) > 1:
            weight = stages[first].get_parameter(name)
            held = placement_of(weight)
            place(weight, {**held.modes, ParallelMode.PIPELINE: Tied(at, name)}, held.shape)
