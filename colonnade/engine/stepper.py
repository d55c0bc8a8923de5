"""Clip and step as one: one pass for the norm, one collective, and the scale folded into the optimizer's step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from colonnade.comm.host_copy import HostCopy
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.engine.gradient_handler.sync import GradientSync
from colonnade.engine.precision import LossScaler
from colonnade.engine.skips import SkipReport
from colonnade.engine.slots import Slots, number_slots, slot_name
from colonnade.errors import listed
from colonnade.logging import get_dist_logger
from colonnade.optim.bucket_step import BucketStep, OwnedBucket, WholeBucket
from colonnade.optim.clip_policy import ClipPolicy, Decision
from colonnade.optim.clip_settings import ClipSettings
from colonnade.optim.norm import reduce_norms
from colonnade.parallel.agreement import Held, held_tensors
from colonnade.reduce.synchroniser import Synchroniser


class Stepper:
    """Owns the optimizer step of an engine; `flat` as `wants_flat` decided it.

    An optimizer with `step_divided` (a sharded one) measures and steps itself: it has the methods of `BucketStep`, and
    `use_slots`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        context: ParallelContext,
        sync: GradientSync,
        clip: ClipSettings | None,
        flat: bool,
        scaler: LossScaler | None = None,
    ) -> None:
        self.scaler = scaler
        if scaler is not None and clip is None:
            clip = ClipSettings(options={"max_norm": float("inf")})  # the norm is what tells an overflow
        self._context = context
        held = held_tensors(model, context)
        self._slots: Slots | None = None
        self.policy: ClipPolicy | None = None
        self._norm_type = 2.0
        if clip is not None:
            self._slots = number_slots([slot_name(entry) for entry in held], clip, context)
            self.policy = ClipPolicy(
                clip.build_method(),
                clip.clip_groups(),
                self._slots.group_of,
                names=self._slots.names,
                nonfinite=clip.nonfinite,
            )
            self._norm_type = clip.norm_type
        slot_of = partial(_slot_of, self._slots)
        self._step: Any = optimizer
        if hasattr(optimizer, "step_divided"):
            optimizer.use_slots(held, slot_of)
        else:
            self._step = _step_of_whole_buckets(optimizer, sync.synchroniser, held, slot_of, flat, model)
        self.last: Decision | None = None
        self.skips = SkipReport()

    def step(self) -> None:
        """Measure, decide, step. No host synchronisation, but where a step may be dropped by an optimizer that
        cannot drop it on the device."""
        if self.policy is None:
            self.skips.last, self.skips.flag = False, None
            self._step.step_divided(None, None)
            return
        self.last = self._decide(self.policy)
        self.skips.note(self.last.found_inf)
        divisor = self.last.divisor if self.scaler is None else self.last.divisor * self.scaler.scale
        self._step.step_divided(divisor, self.last.found_inf)
        if self.scaler is not None:
            self.scaler.update(self.last.nonfinite)  # a spike that is dropped says nothing about the scale

    def report_skips(self, wait: bool) -> None:
        """Say which steps were dropped since the last time, with the parameter at fault here if it can be seen still."""
        if self.skips.read() if wait else self.skips.poll():
            bad = self._step.first_bad()
            where = f" first in {bad} on rank {self._context.get_global_rank()};" if bad else ""
            if bad or self._context.get_global_rank() == 0:
                get_dist_logger().warning(
                    f"step dropped:{where} its gradient norm is {float(self.last.norm) if self.last else 0.0:g} "
                    f"({self.skips.total} dropped so far)"
                )

    def note_failed(self, ranks: Sequence[int]) -> None:
        """The step is dropped because backward failed on these ranks, if on any."""
        if ranks:
            self.skips.total += 1
            self.skips.last, self.skips.flag = True, HostCopy(torch.ones(()))
            get_dist_logger().warning(
                f"step dropped: its backward pass failed on rank {listed(ranks)} ({self.skips.total} dropped so far)"
            )

    def norms(self) -> dict[str, Tensor]:
        """The norm of every slot (group, layer or parameter) at the last step, as device tensors."""
        if self.last is None or self._slots is None:
            return {}
        return dict(zip(self._slots.names, self.last.norms.per_slot().unbind(), strict=True))

    def close(self) -> None:
        self._step.close()

    def _decide(self, policy: ClipPolicy) -> Decision:
        vector = self._step.measure(self._norm_type, policy.slots, self._context.device)
        norms = reduce_norms(vector, self._norm_type, self._context.get_group(ParallelMode.GLOBAL))
        return policy.decide(norms if self.scaler is None else self.scaler.unscaled(norms))


def _slot_of(slots: Slots | None, entry: Held) -> int:
    return slots.of_parameter[slot_name(entry)] if slots is not None else 0


def _step_of_whole_buckets(
    optimizer: Any, synchroniser: Synchroniser, held: list[Held], slot_of: Any, flat: bool, model: nn.Module
) -> BucketStep:
    entry_of = {id(entry.tensor): entry for entry in held}

    def buckets() -> list[OwnedBucket]:
        made: list[OwnedBucket] = []
        for bucket in synchroniser.layout:
            entries = [entry_of[id(parameter)] for parameter in bucket.parameters]
            made.append(WholeBucket(bucket, entries, [slot_of(entry) for entry in entries]))
        return made

    return BucketStep(optimizer, buckets, lambda: synchroniser.generation, held, slot_of, flat, model)
