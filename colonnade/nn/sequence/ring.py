"""Ring attention (Liu et al.): every rank attends to the keys and values of all ranks, one block after another.

A rank has its own part of queries, keys and values, the current block and the next one, so memory is that of length / ranks.
The backward pass receives all blocks again and sends the gradients of a block to the rank that owns it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.core import given_or_global
from colonnade.errors import LayoutError
from colonnade.nn.sequence.attention_kernels import kernel_for, working
from colonnade.nn.sequence.masks import Sight, Turn, ring_turns
from colonnade.nn.sequence.parts import Parts, parts_of
from colonnade.parallel.wire import Members, Swap, members_of


def ring_attention(
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
    balanced: bool = False,
    context: ParallelContext | None = None,
) -> Tensor:
    """Compute softmax(q k^T) v over the full sequence, of which every rank of the sequence group has a part.

    Without a sequence group, this is plain attention.

    Args:
        q: Queries (batch, heads, local length, width), as for scaled_dot_product_attention; the result has the same shape.
        k: Keys; they may have fewer heads.
        v: Values, of the shape of k.
        causal: Whether a query sees only its own and earlier keys.
        window: The number of keys that a query sees before its own and, if not causal, after it; None for all.
        documents: Cumulative lengths of the documents in the full sequence, such as [0, 5, 9]; a query sees its own document.
        dropout: Dropout of attention weights, from 0 to below 1; pass 0 in evaluation.
        scale: Factor of the scores; defaults to width ** -0.5.
        sinks: (heads), the score of an additional key without a value, seen by every query of a head.
        lengths: The number of tokens on each rank; by default the ranks exchange them.
        balanced: Whether the parts are those of split_sequence(balanced=True).
        context: Defaults to the global one.

    Collective over the sequence group.

    Example::

        from colonnade.nn.sequence import ring_attention

        gpc = colonnade.launch(dict(parallel=dict(sequence=2)))
        q = k = v = torch.randn(2, 4, 8, 16)  # batch, heads, this rank's 8 of 16 tokens, width
        output = ring_attention(q, k, v, causal=True)
    """
    check_heads(q, k, v)
    context = given_or_global(context)
    parts = parts_of(q.size(2), lengths, balanced, context)
    sight = Sight.of(causal, window, documents, sum(parts.lengths))
    members = members_of(ParallelMode.SEQUENCE, context)
    return attention_over(q, k, v, parts, sight, scale, dropout, members, sinks)


def attention_over(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    parts: Parts,
    sight: Sight,
    scale: float | None,
    dropout: float,
    members: Members | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute attention over the ring of `members`, or local attention if `members` is None."""
    if not 0 <= dropout < 1:
        raise LayoutError(f"dropout of attention weights is {dropout}; it must be at least 0 and less than 1")
    if members is None and sight.is_plain and sinks is None:
        options: dict[str, Any] = {"is_causal": sight.causal, "enable_gqa": q.size(1) != k.size(1)}
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, scale=scale, **options)
    scale = q.size(-1) ** -0.5 if scale is None else scale
    ring = _Ring(parts, members.at if members else 0, sight, scale, dropout, members)
    return _apply(q, k, v, sinks, ring)


@torch.compiler.disable
def _apply(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, ring: _Ring) -> Tensor:
    """Not compiled: attention has its own kernels, and would be recompiled for every length."""
    out: Tensor = _Attention.apply(q, k, v, sinks, ring)
    return out


def check_heads(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise if the shapes of q, k and v are inconsistent."""
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if {q.dim(), k.dim()} != {4} or k.shape != v.shape or q.size(1) % k.size(1):
        raise LayoutError(
            f"attention got tensors with wrong shapes ({shapes}). Pass q, k and v of shape (batch, heads, length, "
            "width). k and v must have the same shape. The number of heads of q must be a multiple of the number of "
            "heads of k."
        )
    if q.size(2) != k.size(2) or q.size(0) != k.size(0):
        raise LayoutError(f"attention got {shapes}. Self-attention needs as many keys as queries on every rank.")


class Softmax:
    """Combines the attention of local queries to the keys of one block after another, in float32 or float64."""

    def __init__(self, q: Tensor) -> None:
        self._q = q
        self._known: tuple[Tensor, Tensor] | None = None

    def add(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        """Add the attention output and log-sum-exp of these query rows over further keys."""
        if self._known is None and out.shape == self._q.shape:
            self._known = out, lse
            return
        known, sums = self.result(working(self._q))
        known, sums = known[:, :, rows], sums[:, :, rows]
        weight = torch.sigmoid(lse - sums).unsqueeze(-1)  # exp(lse) / (exp(lse) + exp(sums)), without overflow
        known.lerp_(out.to(known.dtype), weight)
        torch.logaddexp(sums, lse, out=sums)

    def dilute(self, sinks: Tensor) -> None:
        """Add one further key per head, whose value is 0 and whose score is `sinks`."""
        out, lse = self.result(working(self._q))
        total = torch.logaddexp(lse, sinks.to(lse.dtype).unsqueeze(-1))
        self._known = out * torch.exp(lse - total).unsqueeze(-1), total

    def result(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return (output, log-sum-exp); 0 and -inf for a query that has seen no key."""
        out, lse = self._known or (
            torch.zeros_like(self._q),
            self._q.new_full(self._q.shape[:-1], float("-inf"), dtype=working(self._q)),
        )
        self._known = out.to(dtype), lse
        return self._known


class _Total:
    """A sum of contributions to some rows. A single contribution to all rows is kept unchanged, without a copy in float32."""

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._sum: Tensor | None = None

    def add(self, rows: slice, part: Tensor) -> None:
        if self._sum is None and part.shape == self._like.shape:
            self._sum = part
        else:
            total = self.result(working(self._like))
            total[:, :, rows] += part

    def result(self, dtype: torch.dtype) -> Tensor:
        self._sum = torch.zeros_like(self._like, dtype=dtype) if self._sum is None else self._sum.to(dtype)
        return self._sum


@dataclass(frozen=True)
class _Ring:
    """The distribution of the keys, the mask, and the communication of one attention."""

    parts: Parts
    at: int
    sight: Sight
    scale: float
    dropout: float
    members: Members | None

    def blocks(self, k: Tensor, v: Tensor) -> Iterator[tuple[Turn, Tensor, Tensor]]:
        """Yield (turn, keys, values), this rank's own keys first. The next block is received while the caller computes.

        A block is sent directly from its owner to the rank that needs it, keys and values in one message.
        """
        turns = ring_turns(self.sight, self.parts, self.at)
        keys, values = k[:, :, turns[0].received], v[:, :, turns[0].received]
        for turn, following in zip_longest(turns, turns[1:]):
            receiving: Swap | None = None
            if following is not None:
                sent = torch.stack([k[:, :, following.sent], v[:, :, following.sent]])
                receiving = self.swap(sent, following.received, following.ahead)
            yield turn, keys, values
            if receiving is not None:
                keys, values = receiving.wait()

    def swap(self, block: Tensor, received: slice, ahead: int) -> Swap:
        """Start to send a block to the rank `ahead` positions later in the ring, and to receive rows from the rank `ahead` positions earlier."""
        members = self.members
        assert members is not None
        shape = [*block.shape]
        shape[3] = received.stop - received.start
        target, source = (members.ranks[(members.at + step) % members.size] for step in (ahead, -ahead))
        return Swap(block, block.new_empty(shape), target, source, members.group)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, ring: _Ring) -> Tensor:
        softmax, kernels = Softmax(q), []
        for turn, keys, values in ring.blocks(k, v):
            for piece in turn.pieces:
                block = q[:, :, piece.queries], keys[:, :, piece.keys], values[:, :, piece.keys]
                kernels.append(kernel_for(*block, ring.scale, piece.mask, ring.dropout))
                softmax.add(piece.queries, *kernels[-1].forward(*block))
        if sinks is not None:
            softmax.dilute(sinks)
        out, lse = softmax.result(q.dtype)
        # Received keys are not kept: backward receives them again. Kernels keep only the RNG state of dropout.
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.kernels, ctx.ring = kernels, ring
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        ring, kernels = ctx.ring, iter(ctx.kernels)
        grad = (
            grad if grad.stride(-1) == 1 else grad.contiguous()
        )  # kernels reject an expanded gradient, as that of sum()
        dq, dk, dv = (_Total(tensor) for tensor in (q, k, v))
        returning: tuple[slice, Swap] | None = None
        for turn, keys, values in ring.blocks(k, v):
            dkeys, dvalues = (_Total(keys), _Total(values)) if turn.ahead else (dk, dv)
            for piece in turn.pieces:
                part, queries, result, sums = (tensor[:, :, piece.queries] for tensor in (grad, q, out, lse))
                block = keys[:, :, piece.keys], values[:, :, piece.keys]
                more_q, more_k, more_v = next(kernels).backward(part, queries, *block, result, sums)
                dq.add(piece.queries, more_q)
                dkeys.add(piece.keys, more_k)
                dvalues.add(piece.keys, more_v)
            # Gradients of a block go to its owner while the next block is computed. They are sent in the dtype of the kernels;
            # the owner sums them in float32.
            if returning is not None:
                _add_returned(*returning, dk, dv)
            returning = None
            if turn.ahead:
                message = torch.stack([dkeys.result(k.dtype), dvalues.result(k.dtype)])
                returning = turn.sent, ring.swap(message, turn.sent, -turn.ahead)
        if returning is not None:
            _add_returned(*returning, dk, dv)
        dsinks = None
        if sinks is not None:
            # A key with value 0: only the softmax weight that it takes from the other keys depends on it.
            weight = torch.exp(sinks.unsqueeze(-1) - lse)
            dsinks = -(weight * (grad.to(lse.dtype) * out).sum(-1)).sum((0, 2)).to(sinks.dtype)
        return dq.result(q.dtype), dk.result(k.dtype), dv.result(v.dtype), dsinks, None


def _add_returned(rows: slice, swap: Swap, dk: _Total, dv: _Total) -> None:
    for total, part in zip((dk, dv), swap.wait(), strict=True):
        total.add(rows, part)
