"""Torch's kernels for one block of attention: forward returns the log-sum-exp, backward takes one over more keys.

q is (batch, heads, length, width); k and v may have fewer heads and are not expanded. Torch's own rules decide which kernels
may be used, so `torch.nn.attention.sdpa_kernel` applies: cuDNN before flash before memory-efficient attention. The CPU and
float64 use `Exact`, and so does any input that no kernel supports, with a warning.
"""

from __future__ import annotations

from functools import cache, lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from colonnade.logging import get_dist_logger
from colonnade.nn.sequence.exact_attention import Exact, Gradients, Kernel
from colonnade.nn.sequence.masks import Mask

aten = torch.ops.aten


class Cudnn(Kernel):
    """cuDNN attention: the fastest on recent GPUs; no windows and no documents."""

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
    """Flash attention, with windows and documents."""

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
    """Memory-efficient attention: for float32, and for old GPUs; no windows and no documents."""

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
    """The fastest kernel that supports these inputs."""
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
        f"context parallelism: no attention kernel of torch supports {dtype}, head size {width}{also} on this GPU; it is "
        f"computed by plain matrix products, which are many times slower. Use bfloat16 and a head size that is a multiple of "
        f"8, at most 256",
        ranks=[0],
    )
