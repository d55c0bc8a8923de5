"""Norm and step over this rank's slices: flat where the optimizer allows it, else piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from colonnade.errors import GradientError
from colonnade.optim.blocks import Block, padded
from colonnade.optim.flat_state import FlatBucket
from colonnade.optim.flat_step import FlatStep, why_not
from colonnade.optim.norm import Meter
from colonnade.optim.scaled_step import ScaledStep
from colonnade.optim.zero.bucket import Piece, ShardedBucket
from colonnade.optim.zero.flow import Flow
from colonnade.parallel.flat import FlatLayout, Span


class SliceStep:
    """Steps `inner` over the pieces; `flat` as in the config (None: where it can be)."""

    def __init__(self, inner: Optimizer, flows: Sequence[Flow], flat: bool | None) -> None:
        self._inner = inner
        self._flows = [flow for flow in flows if flow.bucket.pieces]
        self._pieces = [piece for flow in self._flows for piece in flow.bucket.pieces]
        self._slot_of: Callable[[str], int] = lambda name: 0
        self._absent: list[int] = []
        self._attached = False
        self._meter: Meter | None = None
        self._step: FlatStep | ScaledStep | None = None
        reason = why_not(inner)
        if reason is not None and flat:
            raise GradientError(f"flat_step=True cannot be done: {reason}")
        self._is_flat = reason is None and flat is not False
        home = self._pieces[0].value.device if self._pieces else torch.device("cpu")
        self.as_it_is = (torch.ones(1, device=home), torch.zeros((), device=home))
        """The divisor and the flag of a step that is neither clipped nor dropped."""

    def use_slots(self, slot_of: Callable[[str], int]) -> None:
        """Before the first step."""
        self._slot_of = slot_of

    def mark_absent(self) -> None:
        """Give every piece its gradient, or None where no rank of the team had one, so that it takes no part."""
        if self._attached and not self._absent and all(flow.is_whole for flow in self._flows):
            return
        absent = [not here for flow in self._flows for here in self._present(flow)]
        places = [place for place, missing in enumerate(absent) if missing]
        if places != self._absent or not self._attached:
            for piece, missing in zip(self._pieces, absent, strict=True):
                piece.value.grad = None if missing else piece.grad
            self._absent, self._meter, self._attached = places, None, True

    def measure(self, norm_type: float, slots: int, device: torch.device) -> Tensor:
        """The sums of powers per slot of all slices of this rank."""
        if self._meter is None or (self._meter.p, self._meter.slots) != (norm_type, slots):
            # Other holders may have cut the parameter elsewhere: each counts all it has, in its proportion.
            self._meter = Meter(self._blocks(), norm_type, slots=slots, device=device, whole=True)
        return self._meter.measure()

    @torch.no_grad()
    def step(self, divisor: Tensor, found_inf: Tensor) -> None:
        """One step of the slices."""
        if not self._pieces:
            return
        home = self._pieces[0].value.device
        divisor, found_inf = divisor.to(home), found_inf.to(home)
        if self._step is None:
            self._step = self._made()
        if isinstance(self._step, FlatStep):
            self._step.step(divisor, found_inf.float(), self._absent)
        else:
            self._step.step(divisor, found_inf)

    def close(self) -> None:
        if isinstance(self._step, FlatStep):
            self._step.close()

    def _made(self) -> FlatStep | ScaledStep:
        if not self._is_flat:
            return ScaledStep(self._inner, {piece.value: self._slot_of(piece.member.name) for piece in self._pieces})
        return FlatStep(self._inner, [self._flat_bucket(flow.bucket) for flow in self._flows])

    def _flat_bucket(self, bucket: ShardedBucket) -> FlatBucket:
        values = [piece.value for piece in bucket.pieces]
        slots = [self._slot_of(piece.member.name) for piece in bucket.pieces]
        layout = FlatLayout(values)
        # Where the pieces lie in the slice, which a master copy in another dtype keeps.
        layout.spans = [Span(piece.at, piece.numel) for piece in bucket.pieces]
        layout.numel = bucket.used
        return FlatBucket(layout, values, bucket.grads, slots, bucket.values)

    def _present(self, flow: Flow) -> list[bool]:
        here = dict(zip(map(id, flow.bucket.members), flow.anywhere, strict=True))
        return [here[id(piece.member)] for piece in flow.bucket.pieces]

    def _blocks(self) -> list[Block]:
        """Neighbours with the same slot and as many holders become one block."""
        blocks: list[Block] = []
        for flow in self._flows:
            run: list[Piece] = []
            for piece in flow.bucket.pieces:
                if run and (piece.value.grad is None or self._key(piece) != self._key(run[-1])):
                    blocks.append(self._block(flow.bucket, run))
                    run = []
                if piece.value.grad is not None:
                    run.append(piece)
            if run:
                blocks.append(self._block(flow.bucket, run))
        return blocks

    def _key(self, piece: Piece) -> tuple[int, int]:
        return piece.member.copies, self._slot_of(piece.member.name)

    def _block(self, bucket: ShardedBucket, run: Sequence[Piece]) -> Block:
        stop = padded(run[-1].at + run[-1].numel, bucket.dtype)
        copies, slot = self._key(run[0])
        return Block(bucket.grads[run[0].at : stop], copies, 0, slot)
