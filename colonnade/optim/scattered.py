"""Gradients that no other rank has a part in, on a GPU: a flat step reads them where autograd has left them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from colonnade.optim.blocks import GradientBlock
from colonnade.optim.bucket_step import OwnedBucket
from colonnade.optim.flat_state import JOINED, FlatBucket, ScatteredGradient
from colonnade.optim.norm_readers import kernels_available
from colonnade.parallel.flat import FlatLayout, flattened
from colonnade.parallel.held import Held
from colonnade.parallel.placement import is_dtensor
from colonnade.reduce.options import HALVES

_ALIGNED = 16


def can_scatter(parameter: Tensor) -> bool:
    """Whether the kernels can read the parameter's gradient wherever it lies."""
    fits = parameter.is_cuda and parameter.dtype in (torch.float32, *HALVES) and kernels_available()
    return fits and not is_dtensor(parameter)


class ScatteredBucket(OwnedBucket):
    """Parameters in flat memory whose gradients stay where they are: nothing is copied, and no memory is kept for them."""

    scattered = True

    def __init__(self, entries: Sequence[Held], slots: Sequence[int], whole: bool) -> None:
        """`whole` as of WholeBucket."""
        super().__init__(entries, slots)
        self._whole = whole
        self._members = [entry.tensor for entry in entries]
        self._layout = FlatLayout(self._members)
        self._gradient = ScatteredGradient(self._layout)

    @property
    def members(self) -> Sequence[Tensor]:
        return self._members

    def absent(self) -> list[int]:
        """Also takes note of where the gradients are."""
        addresses, missing = [], []
        for at, (member, span) in enumerate(zip(self._members, self._layout.spans, strict=True)):
            grad = member.grad
            if grad is None or grad.layout is not torch.strided or grad.dtype != member.dtype:
                missing.append(at)
                addresses.append(0)
                continue
            if grad.stride() != member.stride() or grad.data_ptr() % _ALIGNED:
                member.grad = grad = torch.empty_like(member).copy_(grad)
            addresses.append(grad.data_ptr() - span.start * grad.element_size())
        self._gradient.point_to(addresses)
        return missing

    def blocks(self, absent: Sequence[int]) -> list[GradientBlock]:
        gone, found = set(absent), []
        for at, (entry, member) in enumerate(zip(self.entries, self._members, strict=True)):
            if at not in gone and member.grad is not None:
                count, index = (1, 0) if self._whole else (entry.holding.count, entry.holding.index)
                found.append(GradientBlock(flattened(member.grad), count, index, self.slots[at]))
        return found

    def flat(self) -> FlatBucket:
        return FlatBucket(self._layout, self._members, self._gradient, self.slots)


def scattered_buckets(entries: Sequence[Held], slots: Sequence[int], whole: bool) -> list[OwnedBucket]:
    """Buckets of parameters of one dtype on one device, none of which is large."""
    groups: dict[tuple[torch.dtype, torch.device], list[list[int]]] = {}
    for at, entry in enumerate(entries):
        of_kind = groups.setdefault((entry.tensor.dtype, entry.tensor.device), [[]])
        *_, last = of_kind
        if last and sum(entries[i].tensor.numel() for i in last) + entry.tensor.numel() > JOINED:
            last = []
            of_kind.append(last)
        last.append(at)
    return [
        ScatteredBucket([entries[at] for at in places], [slots[at] for at in places], whole)
        for of_kind in groups.values()
        for places in of_kind
    ]
