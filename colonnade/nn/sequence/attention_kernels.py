"""The attention kernels for one block: forward returns the log-sum-exp, and backward accepts that over all blocks.

q is (batch, heads, length, width); k and v may have fewer heads and are not expanded. Torch's own rules determine which
of its kernels may be used, so `torch.nn.attention.sdpa_kernel` applies: cuDNN before flash before memory-efficient
attention. The CPU and float64 use `Exact`: plain matrix products in at least float32, with scores for a limited number
of query rows at a time. `Exact` is also used, with a warning, for an input that no kernel supports.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import cache, lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from colonnade.logging import get_dist_logger
from colonnade.nn.sequence.masks import Mask

_SCORES = 1 << 24
"""The number of scores that exist at a time, which bounds the memory of a block."""


Gradients = tuple[Tensor, Tensor, Tensor]


class Kernel(ABC):
    """Forward and backward of attention between the queries and the keys of one block.

    Each block and pass has its own object.

    q is (batch, heads, length, width); k and v may have fewer heads. `state` carries the RNG state of dropout to
    backward.
    """

    state: Sequence[Any] = ()

    def __init__(self, scale: float, mask: Mask, dropout: float = 0.0) -> None:
        self.scale, self.mask, self.dropout = scale, mask, dropout

    @abstractmethod
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return (output, log-sum-exp). The latter is (batch, heads, length), in float32 or float64."""

    @abstractmethod
    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        """Return the contribution of these keys to the gradients of q, k and v.

        `out` and `lse` are over the keys of all blocks.
        """


class Exact(Kernel):
    """Attention by plain matrix products. Outputs and gradients have the dtype `working(q)`."""

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
        """A function that draws the dropout factors of one tile after another; backward gets the same factors as forward."""
        if not self.dropout:
            return None
        (seed,), keep = self.state, 1.0 - self.dropout
        generator = torch.Generator(device).manual_seed(int(seed))
        return lambda weights: torch.empty_like(weights).bernoulli_(keep, generator=generator).div_(keep)


def working(x: Tensor) -> torch.dtype:
    """Return the dtype of softmax and sums: float32 or float64."""
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


aten = torch.ops.aten


class Cudnn(Kernel):
    """cuDNN attention, the fastest kernel on recent GPUs. Supports neither windows nor documents."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse, _, _, _, _, *self.state, _ = aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, self.dropout, self.mask.is_causal, False, scale=self.scale
        )
        return out, lse.squeeze(-1)

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        given = (grad, q, k, v, out, lse.unsqueeze(-1).contiguous(), *self.state, None, None, None)
        found: Gradients = aten._scaled_dot_product_cudnn_attention_backward(
            *given, q.size(2), k.size(2), self.dropout, self.mask.is_causal, scale=self.scale
        )
        return found


class Flash(Kernel):
    """Flash attention. Supports windows and documents."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        tensors = [self._to_layout(x) for x in (q, k, v)]
        out, lse, *self.state, _ = aten._flash_attention_forward(
            *tensors, *self._lengths(q, k), self.dropout, False, False, **self._options()
        )
        if self.mask.documents is not None:
            out, lse = out.unflatten(0, (q.size(0), -1)), lse.unflatten(1, (q.size(0), -1)).transpose(0, 1)
        return out.transpose(1, 2), lse

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        tensors = [self._to_layout(x) for x in (grad, q, k, v, out)]
        lse = lse if self.mask.documents is None else lse.transpose(0, 1).flatten(1)
        found = aten._flash_attention_backward(
            *tensors, lse.contiguous(), *self._lengths(q, k), self.dropout, False, *self.state, **self._options()
        )
        if self.mask.documents is not None:
            found = [x.unflatten(0, (q.size(0), -1)) for x in found]
        dq, dk, dv = (x.transpose(1, 2) for x in found)
        return dq, dk, dv

    def _to_layout(self, x: Tensor) -> Tensor:
        """(batch, length, heads, width), or (tokens, heads, width) with documents."""
        x = x.transpose(1, 2)
        return x if self.mask.documents is None else x.flatten(0, 1)

    def _options(self) -> dict[str, Any]:
        left, right = (-1 if side is None else side for side in (self.mask.left, self.mask.right))
        return {"scale": self.scale, "window_size_left": left, "window_size_right": right}

    def _lengths(self, q: Tensor, k: Tensor) -> tuple[Any, Any, int, int]:
        """Cumulative lengths and the longest length, of queries and of keys."""
        documents = self.mask.documents
        if documents is None:
            return None, None, q.size(2), k.size(2)
        ends = _cumulative(documents, q.size(0), q.device)
        longest = max(stop - start for start, stop in pairwise(documents))
        return ends, ends, longest, longest


@lru_cache(maxsize=64)
def _cumulative(documents: tuple[int, ...], batch: int, device: torch.device) -> Tensor:
    """Cumulative lengths of the documents of all rows, concatenated, on the device; cached, because every layer needs them."""
    ends = [row * documents[-1] + end for row in range(batch) for end in documents[:-1]]
    return torch.tensor([*ends, batch * documents[-1]], dtype=torch.int32, device=device)


class Efficient(Kernel):
    """Memory-efficient attention, for float32 and for old GPUs. Supports neither windows nor documents."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        # The kernel needs as many key heads as query heads: one call for each query head per key head.
        groups = q.size(1) // k.size(1)
        results = [
            aten._scaled_dot_product_efficient_attention(
                q[:, group::groups], k, v, None, True, self.dropout, self.mask.is_causal, scale=self.scale
            )
            for group in range(groups)
        ]
        outs, sums, *states = zip(*results, strict=True)
        self.state = [*zip(*states, strict=True)]
        lse = torch.stack(sums, 2).flatten(1, 2)[..., : q.size(2)]  # padded by the kernel to a multiple of 32
        return torch.stack(outs, 2).flatten(1, 2), lse

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        groups = q.size(1) // k.size(1)
        lse = F.pad(lse, (0, -q.size(2) % 32), value=float("inf"))
        results = []
        for group, state in enumerate(self.state):
            part, queries, result, sums = (x[:, group::groups] for x in (grad, q, out, lse))
            # In half precision the kernel assumes the memory layout of its own output and ignores strides.
            result = result.transpose(1, 2).contiguous().transpose(1, 2)
            given = (part, queries, k, v, None, result, sums.contiguous(), *state, self.dropout)
            results.append(
                aten._scaled_dot_product_efficient_attention_backward(
                    *given, (True, True, True, False), self.mask.is_causal, scale=self.scale
                )
            )
        dq, dk, dv, _ = zip(*results, strict=True)
        return torch.stack(dq, 2).flatten(1, 2), sum(dk[1:], dk[0]), sum(dv[1:], dv[0])


def kernel_for(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Mask, dropout: float) -> Kernel:
    """Return the fastest kernel that supports these inputs."""
    if not q.is_cuda or q.dtype == torch.float64:
        return Exact(scale, mask, dropout)
    cuda = torch.backends.cuda
    causal = mask.is_causal and q.size(2) == k.size(2)
    plain = causal or mask.is_full
    params = cuda.SDPAParams(q, k, v, None, dropout, causal, q.size(1) != k.size(1))
    if plain and cuda.can_use_cudnn_attention(params):
        return Cudnn(scale, mask, dropout)
    if cuda.can_use_flash_attention(params):
        return Flash(scale, mask, dropout)
    equal_heads = cuda.SDPAParams(q[:, : k.size(1)], k, v, None, dropout, causal, False)
    if plain and cuda.can_use_efficient_attention(equal_heads):
        return Efficient(scale, mask, dropout)
    _warn_slow(str(q.dtype), q.size(3), "" if plain else ", a window or documents")
    return Exact(scale, mask, dropout)


@cache
def _warn_slow(dtype: str, width: int, also: str) -> None:
    get_dist_logger().warning(
        f"no attention kernel of torch supports the combination of {dtype}, head size {width}{also} on this GPU. "
        "Context parallelism then computes attention with plain matrix products, which are many times slower. Use "
        "bfloat16 and a head size that is a multiple of 8 and at most 256.",
        ranks=[0],
    )
