"""Ulysses attention (DeepSpeed-Ulysses): all-to-all from split sequences to split heads, full-sequence attention, and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.core import given_or_global
from colonnade.errors import LayoutError
from colonnade.nn.sequence.masks import Sight
from colonnade.nn.sequence.parts import Parts, parts_of, sequence_rank
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
    """Compute softmax(q k^T) v over the full sequence, of which every rank of the sequence group has a contiguous part.

    Arguments are those of `ring_attention`. Each rank attends over full sequences for 1/ranks of the heads, so the
    number of heads (of k and v too) must be a multiple of the number of ranks, and each rank needs memory for full
    sequences.

    Collective over the sequence group.
    """
    check_heads(q, k, v)
    context = given_or_global(context)
    size, at = sequence_rank(context)
    for name, tensor in (("q", q), ("k and v", k)):
        if tensor.size(1) % size:
            raise LayoutError(
                f"ulysses attention got {name} with {tensor.size(1)} heads, which cannot be divided evenly over "
                f"{size} ranks. Use a multiple of {size} heads, fewer ranks, or ring attention, which does not split "
                "heads.",
                code="C032",
            )
    all_lengths = parts_of(q.size(2), lengths, False, context).lengths
    sight, full = Sight.of(causal, window, documents, sum(all_lengths)), Parts((sum(all_lengths),))
    if size == 1:
        return attention_over(q, k, v, full, sight, scale, dropout, sinks=sinks)
    if sinks is not None:
        sinks = sinks.chunk(size)[at]

    # (batch, heads, local length, width) -> (batch, heads / ranks, full length, width), q, k and v in one all-to-all. Rows are
    # (rank, head, token), so that the rows for a rank are contiguous.
    batch, _, length, width = q.shape
    local_heads = [x.size(1) // size for x in (q, k, v)]
    total = sum(local_heads)
    by_rank = [x.permute(1, 2, 0, 3).unflatten(0, (size, -1)) for x in (q, k, v)]
    rows = torch.cat(by_rank, 1).reshape(size * total * length, batch * width)
    sizes = [total * other for other in all_lengths]
    received = all_to_all(rows, ParallelMode.SEQUENCE, [total * length] * size, sizes, context=context)
    parts = [part.view(total, -1, batch, width) for part in received.split(sizes)]
    q, k, v = (x.permute(2, 0, 1, 3) for x in torch.cat(parts, 1).split(local_heads))

    out = attention_over(q, k, v, full, sight, scale, dropout, sinks=sinks)

    # And back: (batch, heads / ranks, full length, width) -> (batch, heads, local length, width).
    heads = out.size(1)
    rows = torch.cat([x.reshape(-1, batch * width) for x in out.permute(1, 2, 0, 3).split(list(all_lengths), 1)])
    sizes = [heads * other for other in all_lengths]
    received = all_to_all(rows, ParallelMode.SEQUENCE, sizes, [heads * length] * size, context=context)
    return received.view(heads * size, length, batch, width).permute(2, 0, 1, 3)
