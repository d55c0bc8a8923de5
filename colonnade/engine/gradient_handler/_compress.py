"""PowerSGD on buckets: a matrix travels as two thin factors, and what they miss is added to the next gradient.

The mean over time is therefore right, a single step is an approximation. Vectors go uncompressed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from colonnade.engine.gradient_handler._bucket import Bucket
from colonnade.engine.gradient_handler._options import PowerSGD


class LowRankSum:
    """Sum of a bucket over the ranks by one power iteration per step, warm-started, with error feedback.

    With S the sum of the ranks' matrices M: P = orthonormal columns of S Q, then Q = S^T P, and P Q^T stands
    for S. Each rank keeps M - P (M^T P)^T, which adds up to exactly what the sum has lost.
    """

    rescale = 1.0

    def __init__(self, bucket: Bucket, group: dist.ProcessGroup, settings: PowerSGD) -> None:
        self._group = group
        self._start_step = settings.start_step
        self._step = 0
        views = [view.reshape(view.shape[0], -1) if view.dim() > 1 else view for view in bucket.views]
        # A view that would have to be copied, or that the factors would not make smaller, goes as it is.
        thin = [_worth_it(flat, view, settings.rank) for flat, view in zip(views, bucket.views, strict=True)]
        self._matrices = [view for view, small in zip(views, thin, strict=True) if small]
        self._vectors = [view for view, small in zip(bucket.views, thin, strict=True) if not small]
        self._errors = [torch.zeros_like(matrix) for matrix in self._matrices]
        self._right = [_random(matrix, settings.rank, seed) for seed, matrix in enumerate(self._matrices)]

    def run(self, room: Tensor) -> Iterator[tuple[Any, Tensor | None]]:
        self._step += 1
        if self._step <= self._start_step or not self._matrices:
            yield self._all_reduce(room), room
            return
        for matrix, error in zip(self._matrices, self._errors, strict=True):
            matrix.add_(error)
        left = [matrix @ right for matrix, right in zip(self._matrices, self._right, strict=True)]
        packed = _pack([*left, *self._vectors])
        yield self._all_reduce(packed), None
        left, vectors = _unpack(packed, left, self._vectors)
        own = self._keep_errors(left)
        packed = _pack(own)
        work = self._all_reduce(packed)
        for view, summed in zip(self._vectors, vectors, strict=True):
            view.copy_(summed)
        yield work, None
        self._right, _ = _unpack(packed, own, [])
        for matrix, factor, right in zip(self._matrices, left, self._right, strict=True):
            torch.matmul(factor, right.t(), out=matrix)
        yield None, room

    def _keep_errors(self, left: list[Tensor]) -> list[Tensor]:
        """Orthonormalise the left factors; this rank's right ones, after keeping what the product misses."""
        for factor in left:
            _orthonormalise(factor)
        own = [matrix.t() @ factor for matrix, factor in zip(self._matrices, left, strict=True)]
        for matrix, error, factor, mine in zip(self._matrices, self._errors, left, own, strict=True):
            torch.sub(matrix, factor @ mine.t(), out=error)
        return own

    def _all_reduce(self, tensor: Tensor) -> Any:
        return dist.all_reduce(tensor, group=self._group, async_op=True)


def _worth_it(flat: Tensor, view: Tensor, rank: int) -> bool:
    if flat.dim() != 2 or flat.data_ptr() != view.data_ptr() or not flat.is_contiguous():
        return False
    rows, columns = flat.shape
    return (rows + columns) * rank < rows * columns


def _random(matrix: Tensor, rank: int, seed: int) -> Tensor:
    """The same start on every rank and every run."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(matrix.shape[1], rank, generator=generator, dtype=torch.float64)
    return start.to(matrix)


def _orthonormalise(matrix: Tensor) -> None:
    """Gram-Schmidt in place, twice over for accuracy; no decomposition that would wait for a device."""
    for _ in range(2):
        for i in range(matrix.shape[1]):
            column = matrix[:, i]
            column.div_(column.norm().clamp_min(torch.finfo(matrix.dtype).tiny))
            if i + 1 < matrix.shape[1]:
                rest = matrix[:, i + 1 :]
                rest.sub_(column[:, None] * (column @ rest))


def _pack(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _unpack(flat: Tensor, *likes: list[Tensor]) -> list[list[Tensor]]:
    """`_pack` undone: per list of tensors, the pieces of `flat` with their shapes."""
    unpacked, start = [], 0
    for like in likes:
        pieces = []
        for tensor in like:
            pieces.append(flat[start : start + tensor.numel()].view(tensor.shape))
            start += tensor.numel()
        unpacked.append(pieces)
    return unpacked
