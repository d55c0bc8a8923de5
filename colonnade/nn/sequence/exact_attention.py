"""Attention of some queries to some keys by plain arithmetic: the reference, on the CPU, in float64, and for what no kernel takes.

Everything is computed in at least float32. The scores are held for a limited number of query rows at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from colonnade.nn.sequence.masks import Mask

_SCORES = 1 << 24
"""How many scores are held at once: what bounds the memory of a block."""


Gradients = tuple[Tensor, Tensor, Tensor]


class Kernel(ABC):
    """Attention of the queries of one block to its keys alone, there and back; one object for each block of a pass.

    q is (batch, heads, length, width); k and v may have fewer heads. `state` is what its dropout needs in backward.
    """

    state: Sequence[Any] = ()

    def __init__(self, scale: float, mask: Mask, dropout: float = 0.0) -> None:
        self.scale, self.mask, self.dropout = scale, mask, dropout

    @abstractmethod
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """(output, log of the sum of exponentials), the latter (batch, heads, length) in float32 at least."""

    @abstractmethod
    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        """What these keys add to the gradients of q, k and v. `out` and `lse` are over all keys, not only these."""


class Exact(Kernel):
    """Plain arithmetic. Outputs and gradients are of the working precision."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self.state = [torch.randint(1 << 62, ())] if self.dropout else []
        out = torch.empty_like(q, dtype=working(q))
        lse = q.new_empty(q.shape[:-1], dtype=working(q))
        queries, outs, sums = (_by_key_head(tensor, k) for tensor in (q, out, lse))
        every_key, every_value = k.unsqueeze(2), v.unsqueeze(2)
        kept = self._kept(q.device)
        for rows, keys, hidden in _tiles(q, k, self.mask):
            scores = _scores(queries[..., rows, :], every_key[..., keys, :], self.scale, hidden)
            sums[..., rows] = scores.logsumexp(-1)
            scores.sub_(sums[..., rows].unsqueeze(-1)).exp_()
            if kept is not None:
                scores *= kept(scores)
            outs[..., rows, :] = scores @ every_value[..., keys, :].to(scores.dtype)
        return out, lse

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        found = [torch.zeros_like(tensor, dtype=working(q)) for tensor in (q, k, v)]
        delta = (grad.to(lse.dtype) * out).sum(-1)
        queries, grads, sums, deltas, dq = (_by_key_head(tensor, k) for tensor in (q, grad, lse, delta, found[0]))
        every_key, every_value, dk, dv = (tensor.unsqueeze(2) for tensor in (k, v, *found[1:]))
        kept = self._kept(q.device)
        for rows, keys, hidden in _tiles(q, k, self.mask):
            weights = _scores(queries[..., rows, :], every_key[..., keys, :], self.scale, hidden)
            weights.sub_(sums[..., rows].unsqueeze(-1)).exp_()
            part = grads[..., rows, :].to(weights.dtype)
            towards = part @ every_value[..., keys, :].to(weights.dtype).mT
            dropped = weights
            if kept is not None:
                factors = kept(weights)
                dropped, towards = weights * factors, towards * factors
            dv[..., keys, :] += (dropped.mT @ part).sum(2, keepdim=True)
            weights *= (towards - deltas[..., rows].unsqueeze(-1)) * self.scale
            dq[..., rows, :] = weights @ every_key[..., keys, :].to(weights.dtype)
            dk[..., keys, :] += (weights.mT @ queries[..., rows, :].to(weights.dtype)).sum(2, keepdim=True)
        return found[0], found[1], found[2]

    def _kept(self, device: torch.device) -> Callable[[Tensor], Tensor] | None:
        """What the dropout multiplies weights by, tile after tile: in backward the same as in forward."""
        if not self.dropout:
            return None
        (seed,), share = self.state, 1.0 - self.dropout
        generator = torch.Generator(device).manual_seed(int(seed))
        return lambda weights: torch.empty_like(weights).bernoulli_(share, generator=generator).div_(share)


def working(x: Tensor) -> torch.dtype:
    """The precision that softmax and sums are computed in."""
    return torch.promote_types(x.dtype, torch.float32)


def _by_key_head(x: Tensor, k: Tensor) -> Tensor:
    """(batch, heads, ...) -> (batch, key heads, query heads per key head, ...)"""
    return x.unflatten(1, (k.size(1), -1))


def _tiles(q: Tensor, k: Tensor, mask: Mask) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """(rows of queries, the keys that some of them see, which of those each does not), of a limited number of scores."""
    for start, stop in pairwise(mask.documents or (0, q.size(2))):
        length = stop - start
        keys = k.size(2) if mask.documents is None else length
        step = max(16, _SCORES // max(1, q.size(0) * q.size(1) * keys))
        for row in range(0, length, step):
            rows = range(row, min(row + step, length))
            first, last = mask.seen(rows[0], length, keys).start, mask.seen(rows[-1], length, keys).stop
            seen = slice(start + first, start + last)
            yield slice(start + rows[0], start + rows[-1] + 1), seen, _hidden(rows, first, last, length, keys, mask, q)


def _hidden(rows: range, first: int, last: int, length: int, keys: int, mask: Mask, q: Tensor) -> Tensor | None:
    if mask.left is None and mask.right is None:
        return None
    # How far a key stands behind the one that is at the same place as the query, counted from the ends.
    behind = (
        torch.arange(first, last, device=q.device)
        - torch.arange(rows.start, rows.stop, device=q.device).unsqueeze(-1)
        - (keys - length)
    )
    hidden = torch.zeros_like(behind, dtype=torch.bool)
    if mask.left is not None:
        hidden |= behind < -mask.left
    if mask.right is not None:
        hidden |= behind > mask.right
    return hidden


def _scores(q: Tensor, k: Tensor, scale: float, hidden: Tensor | None) -> Tensor:
    dtype = working(q)
    scores = (q.to(dtype) * scale) @ k.to(dtype).mT
    return scores if hidden is None else scores.masked_fill_(hidden, float("-inf"))
