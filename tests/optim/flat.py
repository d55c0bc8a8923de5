"""Shared by the tests of flat steps: the same parameters stepped by torch on one side, by a FlatStep on the other."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import accumulate

import torch
from torch import Tensor
from torch.optim import Optimizer

from colonnade.optim.bucket_step import ScaledStep
from colonnade.optim.clip import ClipPolicy, Decision, NormClip
from colonnade.optim.flat_step import FlatBucket, FlatStep
from colonnade.optim.norm import Meter, bucket_blocks, reduce_norms
from colonnade.parallel.flat import FlatLayout

SHAPES: tuple[tuple[int, ...], ...] = ((3,), (64, 33), (7, 5), (1030,), (), (129, 17), (0, 4))


def parameters(dtype: torch.dtype, device: str, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[Tensor]:
    """Seeded random parameters."""
    source = torch.Generator().manual_seed(5)
    return [
        torch.nn.Parameter(torch.randn(shape, generator=source, dtype=torch.float64).to(device, dtype))
        for shape in shapes
    ]


def buckets_of(params: Sequence[Tensor], sizes: Sequence[int], slots: Sequence[int] = ()) -> list[FlatBucket]:
    """Buckets of so many parameters each; the first has a gradient buffer of its own, the others share one."""
    ends = list(accumulate(sizes))
    parts = [list(params[end - size : end]) for end, size in zip(ends, sizes, strict=True)]
    layouts = [FlatLayout(part) for part in parts]
    shared = torch.zeros(sum(layout.numel for layout in layouts[1:]), dtype=params[0].dtype, device=params[0].device)
    rooms = [layouts[0].allocate(), *shared.split([layout.numel for layout in layouts[1:]])]
    chosen = [list(slots[end - size : end]) or [0] * size for end, size in zip(ends, sizes, strict=True)]
    return [FlatBucket(*each) for each in zip(layouts, parts, rooms, chosen, strict=True)]


class Pair:
    """One model stepped by torch (`theirs`) and its copy stepped flat (`ours`), on the same gradients."""

    def __init__(
        self,
        make: Callable[[list[Tensor]], Optimizer],
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        max_norm: float = 1.0,
        sizes: Sequence[int] = (4, 2, 1),
    ) -> None:
        self.theirs, self.ours = parameters(dtype, device), parameters(dtype, device)
        self.torch, self.optimizer = make(self.theirs), make(self.ours)
        self.buckets = buckets_of(self.ours, sizes)
        self.flat = FlatStep(self.optimizer, self.buckets)
        self.policy = ClipPolicy(NormClip(max_norm))
        self.max_norm = max_norm
        self.source = torch.Generator().manual_seed(11)

    def gradients(self, absent: Collection[int] = (), scale: float = 1.0) -> None:
        """New gradients on both sides; `absent` parameters get none."""
        views = [view for bucket in self.buckets for view in bucket.layout.views(bucket.grad)]
        for index, (one, other, view) in enumerate(zip(self.theirs, self.ours, views, strict=True)):
            value = scale * torch.randn(one.shape, generator=self.source, dtype=torch.float64)
            one.grad = None if index in absent else value.to(one)
            view.copy_(torch.zeros_like(one) if index in absent else value)
            other.grad = None if index in absent else view

    def decide(self, absent: Collection[int] = ()) -> Decision:
        """Norm and decision on our side."""
        blocks, first = [], 0
        for bucket in self.buckets:
            gone = [index - first for index in absent]
            blocks += bucket_blocks(bucket.layout, bucket.grad, [(1, 0)] * len(bucket.members), absent=gone)
            first += len(bucket.members)
        return self.policy.decide(reduce_norms(Meter(blocks).measure()))

    def step(self, absent: Collection[int] = ()) -> None:
        """Clip and step on both sides; torch's own clip rounds half-precision gradients, so they go another way."""
        self.gradients(absent)
        decision = self.decide(absent)
        if self.theirs[0].dtype.itemsize == 2:
            ScaledStep(self.torch).step(decision.divisor, decision.found_inf)
        else:
            torch.nn.utils.clip_grad_norm_(self.theirs, self.max_norm)
            self.torch.step()
        self.flat.step(decision.divisor, decision.found_inf, absent)

    def compare(self, rtol: float, atol: float) -> None:
        """Parameters and all state agree."""
        for one, other in zip(self.theirs, self.ours, strict=True):
            torch.testing.assert_close(other, one, rtol=rtol, atol=atol)
            mine, other_state = self.torch.state[one], self.optimizer.state[other]
            assert set(mine) == set(other_state)
            for key, value in mine.items():
                exact = key == "step"
                torch.testing.assert_close(
                    other_state[key], value, rtol=0 if exact else rtol, atol=0 if exact else atol, check_device=False
                )
