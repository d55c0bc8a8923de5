"""Ulysses attention: all-to-all from split sequences to split heads, attention over whole sequences, and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.core import given_or_global
from colonnade.errors import LayoutError
from colonnade.nn.sequence.masks import Sight
from colonnade.nn.sequence.parts import Parts, parts_of, sequence_place
from colonnade.nn.sequence.ring import attention_over, check_heads
from colonnade.parallel.collectives import all_to_all


def ulysses_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: int | None = None,
    documents: Sequence[int] | Tensor | None = None,
    dropout: float = 0.0,
    scale: float | None = None,
    sinks: Tensor | None = None,
    lengths: Sequence[int] | None = None,
    context: ParallelContext | None = None,
) -> Tensor:
    """softmax(q k^T) v over the whole sequence, of which every rank of the sequence group has a contiguous part.

    As ring_attention; but each rank attends over whole sequences for its share of the heads, so the number of heads
    (of k and v too) is a multiple of the number of ranks, and memory is that of whole sequences.
    """
    check_heads(q, k, v)
    context = given_or_global(context)
    size, at = sequence_place(context)
    for name, tensor in (("q", q), ("k and v", k)):
        if tensor.size(1) % size:
            raise LayoutError(
                f"ulysses attention: {name} have {tensor.size(1)} heads, which {size} ranks cannot share evenly; use a "
                f"multiple of {size} heads, fewer ranks, or ring attention, which splits no heads",
                code="C032",
            )
    all_lengths = parts_of(q.size(2), lengths, False, context).lengths
    sight, whole = Sight.of(causal, window, documents, sum(all_lengths)), Parts((sum(all_lengths),))
    if size == 1:
        return attention_over(q, k, v, whole, sight, scale, dropout, sinks=sinks)
    if sinks is not None:
        sinks = sinks.chunk(size)[at]
    q, k, v = _to_heads([q, k, v], all_lengths, context)
    out = attention_over(q, k, v, whole, sight, scale, dropout, sinks=sinks)
    return _to_sequence(out, all_lengths, at, context)


def _to_heads(tensors: Sequence[Tensor], lengths: Sequence[int], context: ParallelContext) -> list[Tensor]:
    """(batch, heads, length here, width) -> (batch, heads / ranks, whole length, width), of all in one message."""
    (batch, _, length, width), *_ = (x.shape for x in tensors)
    size, shares = len(lengths), [x.size(1) // len(lengths) for x in tensors]
    by_rank = [x.permute(1, 2, 0, 3).unflatten(0, (size, -1)) for x in tensors]
    rows = torch.cat(by_rank, 1).reshape(size * sum(shares) * length, batch * width)
    sizes = [sum(shares) * other for other in lengths]
    arrived = all_to_all(rows, ParallelMode.SEQUENCE, [sum(shares) * length] * size, sizes, context=context)
    parts = [part.view(sum(shares), -1, batch, width) for part in arrived.split(sizes)]
    return [x.permute(2, 0, 1, 3) for x in torch.cat(parts, 1).split(shares)]


def _to_sequence(x: Tensor, lengths: Sequence[int], at: int, context: ParallelContext) -> Tensor:
    """(batch, heads / ranks, whole length, width) -> (batch, heads, length here, width)."""
    batch, share, _, width = x.shape
    parts = x.permute(1, 2, 0, 3).split(list(lengths), 1)
    rows = torch.cat([part.reshape(-1, batch * width) for part in parts])
    sizes = [share * other for other in lengths]
    mine = [share * lengths[at]] * len(lengths)
    arrived = all_to_all(rows, ParallelMode.SEQUENCE, sizes, mine, context=context)
    return arrived.view(share * len(lengths), lengths[at], batch, width).permute(2, 0, 1, 3)
