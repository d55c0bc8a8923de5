"""Ring attention: every rank attends to the keys and values of all ranks of the sequence group, one block after another.

A rank holds its own part of queries, keys and values, the block it works on and the next one, so memory is that of
length / ranks. The backward pass goes round again, and the gradients of a block go home to the rank that has it.
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
from colonnade.nn.sequence.attention_kernels import kernel_for
from colonnade.nn.sequence.exact_attention import working
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
    """softmax(q k^T) v over the whole sequence, of which every rank of the sequence group has a part.

    q, k, v and the result are (batch, heads, length here, width), as for scaled_dot_product_attention; k and v may
    have fewer heads. `window`: how many keys a query sees before its own, and behind it if not causal. `documents`:
    cumulative lengths of what the whole sequence consists of, as [0, 5, 9]; a query sees its own document alone.
    `dropout`: of attention weights, in training. `sinks`: (heads), the score of one more key that every query of a head
    sees, and which has no value. `lengths`: how many tokens each rank has; without it the ranks ask each other. `balanced`: the parts are those of split_sequence(balanced=True). Without a sequence group it is attention in
    one process.
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
    """Attention round the ring of `members`, or here alone without."""
    if not 0 <= dropout < 1:
        raise LayoutError(f"dropout={dropout} of attention weights: the share that is dropped, from 0 to below 1")
    if members is None and sight.is_plain and sinks is None:
        options: dict[str, Any] = {"is_causal": sight.causal, "enable_gqa": q.size(1) != k.size(1)}
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, scale=scale, **options)
    plan = _RingPlan(
        parts, members.at if members else 0, sight, q.size(-1) ** -0.5 if scale is None else scale, dropout
    )
    return _attended(q, k, v, sinks, plan, members)


@torch.compiler.disable
def _attended(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, plan: _RingPlan, members: Members | None
) -> Tensor:
    """Compiled code is left for it: it has kernels of its own, and would be compiled anew for every length."""
    out: Tensor = _Attention.apply(q, k, v, sinks, plan, members)
    return out


def check_heads(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Refuse shapes that attention over a split sequence cannot mean."""
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if {q.dim(), k.dim()} != {4} or k.shape != v.shape or q.size(1) % k.size(1):
        raise LayoutError(
            f"{shapes}: give (batch, heads, length, width), k and v of one shape, with as many heads as q or a divisor"
        )
    if q.size(2) != k.size(2) or q.size(0) != k.size(0):
        raise LayoutError(f"{shapes}: self-attention has as many keys as queries on every rank")


@dataclass(frozen=True)
class _RingPlan:
    """Who has which keys, and what the queries here see of them."""

    parts: Parts
    at: int
    sight: Sight
    scale: float
    dropout: float = 0.0

    @property
    def turns(self) -> list[Turn]:
        """What there is to attend to, block after block."""
        return ring_turns(self.sight, self.parts, self.at)


class Softmax:
    """The softmax of the queries here over more and more keys, in float32 at least."""

    def __init__(self, q: Tensor) -> None:
        self._q = q
        self._known: tuple[Tensor, Tensor] | None = None

    def add(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        """Put the softmax over other keys beside it, of these rows of queries."""
        if self._known is None and out.shape == self._q.shape:
            self._known = out, lse
            return
        known, sums = self.result(working(self._q))
        known, sums = known[:, :, rows], sums[:, :, rows]
        share = torch.sigmoid(lse - sums).unsqueeze(-1)  # of the new keys
        known.lerp_(out.to(known.dtype), share)
        torch.logaddexp(sums, lse, out=sums)

    def dilute(self, sinks: Tensor) -> None:
        """Put one more key of each head beside it, whose value is 0."""
        out, lse = self.result(working(self._q))
        total = torch.logaddexp(lse, sinks.to(lse.dtype).unsqueeze(-1))
        self._known = out * torch.exp(lse - total).unsqueeze(-1), total

    def result(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(output, log of the sum of exponentials); a query that has seen no key yet has 0 and -inf."""
        out, lse = self._known or (
            torch.zeros_like(self._q),
            self._q.new_full(self._q.shape[:-1], float("-inf"), dtype=working(self._q)),
        )
        self._known = out.to(dtype), lse
        return self._known


class _Total:
    """A sum of parts, each of some rows: as it came while there is one of all rows, in float32 at least from the second on."""

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


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, plan: _RingPlan, members: Members | None
    ) -> Tensor:
        softmax, kernels = Softmax(q), []
        for turn, keys, values in _round(k, v, plan, members):
            for piece in turn.pieces:
                block = q[:, :, piece.queries], keys[:, :, piece.keys], values[:, :, piece.keys]
                kernels.append(kernel_for(*block, plan.scale, piece.mask, plan.dropout))
                softmax.add(piece.queries, *kernels[-1].forward(*block))
        if sinks is not None:
            softmax.dilute(sinks)
        out, lse = softmax.result(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.kernels, ctx.plan, ctx.members = kernels, plan, members
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        plan, members, kernels = ctx.plan, ctx.members, iter(ctx.kernels)
        grad = grad if grad.stride(-1) == 1 else grad.contiguous()  # as of a sum, which kernels refuse
        dq, dk, dv = (_Total(tensor) for tensor in (q, k, v))
        coming: tuple[slice, Swap] | None = None
        for turn, keys, values in _round(k, v, plan, members):
            found = (_Total(keys), _Total(values)) if turn.ahead else (dk, dv)
            for piece in turn.pieces:
                part, queries, result, sums = (tensor[:, :, piece.queries] for tensor in (grad, q, out, lse))
                block = keys[:, :, piece.keys], values[:, :, piece.keys]
                more_q, *more = next(kernels).backward(part, queries, *block, result, sums)
                dq.add(piece.queries, more_q)
                for total, added in zip(found, more, strict=True):
                    total.add(piece.keys, added)
            _take_home(coming, dk, dv)
            # To the rank that has these keys, in the dtype that the kernels give: the sum is in float32, at home.
            message = [total.result(k.dtype) for total in found] if turn.ahead else []
            coming = (turn.sent, _swap(torch.stack(message), turn.sent, -turn.ahead, members)) if message else None
        _take_home(coming, dk, dv)
        towards = None
        if sinks is not None:  # a key whose value is 0, seen by the queries here
            share = torch.exp(sinks.unsqueeze(-1) - lse)
            towards = -(share * (grad.to(lse.dtype) * out).sum(-1)).sum((0, 2)).to(sinks.dtype)
        return dq.result(q.dtype), dk.result(k.dtype), dv.result(v.dtype), towards, None, None


def _take_home(coming: tuple[slice, Swap] | None, dk: _Total, dv: _Total) -> None:
    if coming is not None:
        rows, swap = coming
        for total, part in zip((dk, dv), swap.wait(), strict=True):
            total.add(rows, part)


def _round(k: Tensor, v: Tensor, plan: _RingPlan, members: Members | None) -> Iterator[tuple[Turn, Tensor, Tensor]]:
    """(turn, keys, values), this rank's own first. The next block travels while the caller works on this one.

    A block goes straight from the rank that has it to the one that needs it, keys and values in one message.
    """

    def fetch(turn: Turn) -> Swap:
        return _swap(torch.stack([k[:, :, turn.sent], v[:, :, turn.sent]]), turn.received, turn.ahead, members)

    turns = plan.turns
    keys, values = k[:, :, turns[0].received], v[:, :, turns[0].received]
    for turn, following in zip_longest(turns, turns[1:]):
        coming = fetch(following) if following is not None else None
        yield turn, keys, values
        if coming is not None:
            keys, values = coming.wait()


def _swap(block: Tensor, received: slice, ahead: int, members: Members | None) -> Swap:
    """Start to send a block so many places ahead, and to receive so many rows from as many places before."""
    assert members is not None
    shape = [*block.shape]
    shape[3] = received.stop - received.start
    onward, before = (members.ranks[(members.at + step) % members.size] for step in (ahead, -ahead))
    return Swap(block, block.new_empty(shape), onward, before, members.group)
