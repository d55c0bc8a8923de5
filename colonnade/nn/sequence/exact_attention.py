"""Attention by plain matrix products: on the CPU, in float64, and for inputs that no kernel supports.

Everything is computed in at least float32. Scores exist for a limited number of query rows at a time.
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
"""The number of scores that exist at a time, which bounds the memory of a block."""


Gradients = tuple[Tensor, Tensor, Tensor]


class Kernel(ABC):
    """Forward and backward of attention between the queries and the keys of one block; one object per block and pass.

    q is (batch, heads, length, width); k and v may have fewer heads. `state` carries the RNG state of dropout to backward.
    """

    state: Sequence[Any] = ()

    def __init__(self, scale: float, mask: Mask, dropout: float = 0.0) -> None:
        self.scale, self.mask, self.dropout = scale, mask, dropout

    @abstractmethod
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """(output, log-sum-exp), the latter (batch, heads, length) in float32 at least."""

    @abstractmethod
    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        """The contributions of these keys to the gradients of q, k and v. `out` and `lse` are over all keys, not only these."""


class Exact(Kernel):
    """Plain matrix products. Outputs and gradients have the working precision."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self.state = [torch.randint(1 << 62, ())] if self.dropout else []
        out = torch.empty_like(q, dtype=working(q))
        lse = q.new_empty(q.shape[:-1], dtype=working(q))
        queries, outs, sums = (_by_key_head(tensor, k) for tensor in (q, out, lse))
        all_keys, all_values = k.unsqueeze(2), v.unsqueeze(2)
        draw = self._dropout_factors(q.device)
        for rows, keys, hidden in _tiles(q, k, self.mask):
            scores = _scores(queries[..., rows, :], all_keys[..., keys, :], self.scale, hidden)
            sums[..., rows] = scores.logsumexp(-1)
            scores.sub_(sums[..., rows].unsqueeze(-1)).exp_()
            if draw is not None:
                scores *= draw(scores)
            outs[..., rows, :] = scores @ all_values[..., keys, :].to(scores.dtype)
        return out, lse

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        totals = [torch.zeros_like(tensor, dtype=working(q)) for tensor in (q, k, v)]
        delta = (grad.to(lse.dtype) * out).sum(-1)
        queries, grads, sums, deltas, dq = (_by_key_head(tensor, k) for tensor in (q, grad, lse, delta, totals[0]))
        all_keys, all_values, dk, dv = (tensor.unsqueeze(2) for tensor in (k, v, *totals[1:]))
        draw = self._dropout_factors(q.device)
        for rows, keys, hidden in _tiles(q, k, self.mask):
            weights = _scores(queries[..., rows, :], all_keys[..., keys, :], self.scale, hidden)
            weights.sub_(sums[..., rows].unsqueeze(-1)).exp_()
            grad_rows = grads[..., rows, :].to(weights.dtype)
            d_weights = grad_rows @ all_values[..., keys, :].to(weights.dtype).mT
            dropped = weights
            if draw is not None:
                factors = draw(weights)
                dropped, d_weights = weights * factors, d_weights * factors
            dv[..., keys, :] += (dropped.mT @ grad_rows).sum(2, keepdim=True)
            # From here on `weights` has the gradient of the scores: softmax is over all keys, hence `delta` of all keys.
            weights *= (d_weights - deltas[..., rows].unsqueeze(-1)) * self.scale
            dq[..., rows, :] = weights @ all_keys[..., keys, :].to(weights.dtype)
            dk[..., keys, :] += (weights.mT @ queries[..., rows, :].to(weights.dtype)).sum(2, keepdim=True)
        return totals[0], totals[1], totals[2]

    def _dropout_factors(self, device: torch.device) -> Callable[[Tensor], Tensor] | None:
        """A function that draws the factors of one tile after another, the same in backward as in forward."""
        if not self.dropout:
            return None
        (seed,), keep = self.state, 1.0 - self.dropout
        generator = torch.Generator(device).manual_seed(int(seed))
        return lambda weights: torch.empty_like(weights).bernoulli_(keep, generator=generator).div_(keep)


def working(x: Tensor) -> torch.dtype:
    """The precision of softmax and sums."""
    return torch.promote_types(x.dtype, torch.float32)


def _by_key_head(x: Tensor, k: Tensor) -> Tensor:
    """(batch, heads, ...) -> (batch, key heads, query heads per key head, ...)"""
    return x.unflatten(1, (k.size(1), -1))


def _tiles(q: Tensor, k: Tensor, mask: Mask) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """(query rows, keys that some of them attend to, mask of hidden keys) of tiles with a limited number of scores."""
    for start, stop in pairwise(mask.documents or (0, q.size(2))):
        length = stop - start
        keys = k.size(2) if mask.documents is None else length
        step = max(16, _SCORES // max(1, q.size(0) * q.size(1) * keys))
        for row in range(0, length, step):
            rows = range(row, min(row + step, length))
            first, last = mask.seen(rows[0], length, keys).start, mask.seen(rows[-1], length, keys).stop
            hidden: Tensor | None = None
            if mask.left is not None or mask.right is not None:
                # The distance of a key behind the query's own position; positions of queries and keys are aligned at the end.
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
            yield slice(start + rows[0], start + rows[-1] + 1), slice(start + first, start + last), hidden


def _scores(q: Tensor, k: Tensor, scale: float, hidden: Tensor | None) -> Tensor:
    dtype = working(q)
    scores = (q.to(dtype) * scale) @ k.to(dtype).mT
    return scores if hidden is None else scores.masked_fill_(hidden, float("-inf"))
