"""Attention of some queries to some keys, as parts of a softmax over more keys: the pieces that a ring puts together.

Tensors are (batch, key heads, query heads per key head, length, width); keys and values have one query head per key head.
Everything is computed in at least float32. The scores of a block are held for a limited number of query rows at once.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

_SCORES = 1 << 24
"""How many scores are held at once: what bounds the memory of a block."""


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """(output, log of the sum of exponentials) of the softmax over these keys alone.

    `causal`: query i sees the keys up to i; else it sees all. Both are of the working precision.
    """
    out = torch.empty_like(q, dtype=working(q))
    lse = q.new_empty(q.shape[:-1], dtype=working(q))
    for rows, keys in _tiles(q, k, causal):
        scores = _scores(q, k, rows, keys, scale, causal)
        lse[..., rows] = scores.logsumexp(-1)
        scores.sub_(lse[..., rows].unsqueeze(-1)).exp_()
        out[..., rows, :] = scores @ v[..., keys, :].to(scores.dtype)
    return out, lse


def merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    """The softmax over two sets of keys from the softmax over each. A set that is empty has lse -inf."""
    total = torch.logaddexp(lse, more_lse)
    return (
        out * (lse - total).exp().unsqueeze(-1) + more * (more_lse - total).exp().unsqueeze(-1),
        total,
    )


def attend_backward(
    grad: Tensor, delta: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """What these keys add to the gradients of q, k and v.

    `lse` is over all keys, not only these; `delta` is the sum of grad x output over the width.
    """
    grads = [torch.zeros_like(tensor, dtype=working(q)) for tensor in (q, k, v)]
    dq, dk, dv = grads
    for rows, keys in _tiles(q, k, causal):
        weights = _scores(q, k, rows, keys, scale, causal).sub_(lse[..., rows].unsqueeze(-1)).exp_()
        part = grad[..., rows, :].to(weights.dtype)
        dv[..., keys, :] += (weights.mT @ part).sum(2, keepdim=True)
        weights *= part @ v[..., keys, :].to(weights.dtype).mT - delta[..., rows].unsqueeze(-1)
        weights *= scale
        dq[..., rows, :] = weights @ k[..., keys, :].to(weights.dtype)
        dk[..., keys, :] += (weights.mT @ q[..., rows, :].to(weights.dtype)).sum(2, keepdim=True)
    return dq, dk, dv


def working(x: Tensor) -> torch.dtype:
    """The precision that softmax and sums are computed in."""
    return torch.promote_types(x.dtype, torch.float32)


def _tiles(q: Tensor, k: Tensor, causal: bool) -> Iterator[tuple[slice, slice]]:
    """(rows of queries, the keys that they can see), each with a limited number of scores."""
    length, keys = q.size(-2), k.size(-2)
    heads = q.size(0) * q.size(1) * q.size(2)
    step = max(16, _SCORES // max(1, heads * keys))
    for start in range(0, length, step):
        stop = min(start + step, length)
        yield slice(start, stop), slice(0, stop if causal else keys)


def _scores(q: Tensor, k: Tensor, rows: slice, keys: slice, scale: float, causal: bool) -> Tensor:
    dtype = working(q)
    scores = (q[..., rows, :].to(dtype) * scale) @ k[..., keys, :].to(dtype).mT
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu_(rows.start + 1)
        scores.masked_fill_(hidden, float("-inf"))
    return scores
