"""Ring attention: keys and values travel round the sequence group, and every rank attends to all of them in turn.

A rank holds its own part of queries, keys and values and one travelling block, so memory is that of length / ranks.
The backward pass goes round again with keys, values and their gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.core import given_or_global
from colonnade.errors import LayoutError
from colonnade.nn.sequence.block import attend, attend_backward, merge, working
from colonnade.nn.sequence.parts import Parts, Segment, parts_of, sequence_place
from colonnade.parallel.collectives.wire import Swap


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    lengths: Sequence[int] | None = None,
    balanced: bool = False,
    context: ParallelContext | None = None,
) -> Tensor:
    """softmax(q k^T) v over the whole sequence, of which every rank of the sequence group has a part.

    q, k, v and the result are (batch, heads, length here, width), as for scaled_dot_product_attention; k and v may
    have fewer heads. `lengths`: how many tokens each rank has; without it the ranks ask each other. `balanced`: the
    parts are those of split_sequence(balanced=True). Without a sequence group it is attention in one process.
    """
    check_heads(q, k, v)
    context = given_or_global(context)
    parts = parts_of(q.size(2), lengths, balanced, context)
    if len(parts.lengths) == 1:
        grouped = q.size(1) != k.size(1)
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=grouped)
    plan = _Plan(parts, sequence_place(context)[1], causal, q.size(-1) ** -0.5 if scale is None else scale)
    by_key_head = q.unflatten(1, (k.size(1), -1))
    out = _RingAttention.apply(by_key_head, k.unsqueeze(2), v.unsqueeze(2), plan, _Ring.of(context))
    return out.reshape(q.shape)


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
class _Plan:
    """Which pairs of (queries here, keys of a rank) there are to attend, and how."""

    parts: Parts
    at: int
    causal: bool
    scale: float

    def pairs(self, other: int) -> Iterator[tuple[slice, slice, bool]]:
        """(query rows, key rows, whether the causal mask lies inside) for the keys of rank `other`."""
        for queries in self.parts.segments[self.at]:
            for keys in self.parts.segments[other]:
                hidden = self.causal and keys.start > queries.start
                if queries.length and keys.length and not hidden:
                    yield _rows(queries), _rows(keys), self.causal and keys.start == queries.start


def _rows(segment: Segment) -> slice:
    return slice(segment.local, segment.local + segment.length)


class _Ring:
    """Sends to the next rank of a group and receives from the one before, while something else is computed."""

    def __init__(self, group: dist.ProcessGroup, following: int, before: int) -> None:
        self._group, self._following, self._before = group, following, before

    @staticmethod
    def of(context: ParallelContext) -> _Ring:
        mode = ParallelMode.SEQUENCE
        return _Ring(context.get_group(mode), context.get_next_global_rank(mode), context.get_prev_global_rank(mode))

    def pass_on(self, block: Tensor, length: int) -> Swap:
        """Start to send `block` (length in the last dimension but one) and to receive one of `length`."""
        arriving = block.new_empty(*block.shape[:-2], length, block.size(-1))
        return Swap(block, arriving, self._following, self._before, self._group)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: _Plan, ring: _Ring) -> Tensor:
        out = torch.zeros_like(q, dtype=working(q))
        lse = q.new_full(q.shape[:-1], float("-inf"), dtype=working(q))
        for other, block, _ in _round(k, v, plan, ring):
            keys, values = block
            for rows, seen, masked in plan.pairs(other):
                more = attend(q[..., rows, :], keys[..., seen, :], values[..., seen, :], plan.scale, masked)
                out[..., rows, :], lse[..., rows] = merge(out[..., rows, :], lse[..., rows], *more)
        result = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, result, lse)
        ctx.plan, ctx.ring = plan, ring
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        plan, ring = ctx.plan, ctx.ring
        delta = (grad.to(lse.dtype) * out).sum(-1)
        dq = torch.zeros_like(q, dtype=lse.dtype)
        on_its_way: Swap | None = None
        for other, block, following in _round(k, v, plan, ring):
            found = _gradients(grad, delta, q, block, lse, dq, plan, other)
            if on_its_way is not None:
                found = on_its_way.wait().add_(found)
            on_its_way = ring.pass_on(found, plan.parts.lengths[following])
        assert on_its_way is not None
        dk, dv = on_its_way.wait()
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None


def _round(k: Tensor, v: Tensor, plan: _Plan, ring: _Ring) -> Iterator[tuple[int, Tensor, int]]:
    """(rank, its keys and values, the rank that comes next) once for each rank of the ring, this one first.

    The next block travels while the caller works on this one.
    """
    size, block = len(plan.parts.lengths), torch.stack([k, v])
    for step in range(size):
        other, following = (plan.at - step) % size, (plan.at - step - 1) % size
        moving = ring.pass_on(block, plan.parts.lengths[following]) if step < size - 1 else None
        yield other, block, following
        if moving is not None:
            block = moving.wait()


def _gradients(
    grad: Tensor, delta: Tensor, q: Tensor, block: Tensor, lse: Tensor, dq: Tensor, plan: _Plan, other: int
) -> Tensor:
    """What the queries here add to the gradients of a block of keys and values; their own is added to `dq`."""
    found = torch.zeros_like(block, dtype=lse.dtype)
    keys, values = block
    for rows, seen, masked in plan.pairs(other):
        parts = (q[..., rows, :], keys[..., seen, :], values[..., seen, :], lse[..., rows])
        more_q, more_k, more_v = attend_backward(grad[..., rows, :], delta[..., rows], *parts, plan.scale, masked)
        dq[..., rows, :] += more_q
        found[0][..., seen, :] += more_k
        found[1][..., seen, :] += more_v
    return found
