"""Clip and step as one: one pass for the norm, one collective, and the scale folded into the optimizer's step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from colonnade.comm.host_copy import HostCopy
from colonnade.comm.messages import is_same_everywhere
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.engine.gradient_handler.sync import GradientSync
from colonnade.engine.own_norms import OwnNorms
from colonnade.engine.precision import LossScaler
from colonnade.engine.skips import SkipReport
from colonnade.engine.slots import Slots, number_slots
from colonnade.errors import ConfigError, listed
from colonnade.logging import get_dist_logger
from colonnade.optim.bucket_step import BucketStep, OwnedBucket, WholeBucket
from colonnade.optim.capture import Capture
from colonnade.optim.clip_policy import ClipPolicy, Decision
from colonnade.optim.clip_settings import ClipSettings
from colonnade.optim.norm import Meter, reduce_norms
from colonnade.optim.scattered import can_scatter, scattered_buckets
from colonnade.parallel.held import Held, held_tensors
from colonnade.reduce.riders import Riders
from colonnade.reduce.synchroniser import Synchroniser


class Stepper:
    """Owns the optimizer step of an engine; `flat` as `wants_flat` decided it.

    An optimizer with `step_divided` (a sharded one) steps itself; its `use_slots` gives the `BucketStep` that measures.
    """

    _own: OwnNorms | None = None  # where parameters are waived

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        context: ParallelContext,
        sync: GradientSync,
        clip: ClipSettings | None,
        flat: bool,
        scaler: LossScaler | None = None,
        graph: bool = False,
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
            self._slots = number_slots([entry.label for entry in held], clip, context)
            self.policy = ClipPolicy(
                clip.build_method(),
                clip.clip_groups(),
                self._slots.group_of,
                names=self._slots.names,
                nonfinite=clip.nonfinite,
                each=clip.per != "group",
            )
            self._norm_type = clip.norm_type
        if self._slots is not None:
            self._own = OwnNorms.of(sync.ledger, held, len(self._slots.names), context)
        if self._own is not None:
            held = [self._own.held(entry) for entry in held]
        slot_of = partial(_slot_of, self._slots, own=self._own)
        if hasattr(optimizer, "step_divided"):
            self._step, self._stepped = optimizer.use_slots(held, slot_of), optimizer
        else:
            whole = _measures_whole(held, context)
            self._step = _step_of_whole_buckets(optimizer, sync.synchroniser, held, slot_of, flat, model, whole)
            self._stepped = self._step
        self._synchroniser = sync.synchroniser
        self._capture = self._captured() if graph else None
        self._ride()
        self.last: Decision | None = None
        self.skips = SkipReport()

    def step(self) -> None:
        """Measure, decide, step. No host synchronisation, but where a step may be dropped by an optimizer that
        cannot drop it on the device."""
        during = self._context.waits.during
        if self.policy is None:
            verdict = self._verdict()
            self.skips.last, self.skips.flag = False, None
            if verdict is not None:
                self.skips.note(verdict)
            with during("in the step of the optimizer", "optimizer"):
                self._stepped.step_divided(None, verdict)
            return
        with during("measuring the norm", "clip"):
            self.last = self._decide(self.policy)
        self.skips.note(self.last.found_inf)
        divisor = self.last.divisor if self.scaler is None else self.last.divisor * self.scaler.scale
        if self._own is not None:
            divisor = self._own.spread(divisor)
        with during("in the step of the optimizer", "optimizer"):
            self._stepped.step_divided(divisor, self.last.found_inf)
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
            self.skips.last, self.skips.flag = True, HostCopy(torch.ones((), device="cpu"))
            get_dist_logger().warning(
                f"step dropped: its backward pass failed on rank {listed(ranks)} ({self.skips.total} dropped so far)"
            )

    def norms(self) -> dict[str, Tensor]:
        """The norm of every slot (group, layer or parameter) at the last step, as device tensors."""
        if self.last is None or self._slots is None:
            return {}
        return dict(zip(self._slots.names, self.last.norms.per_slot().unbind(), strict=True))

    def extra_state(self) -> dict[str, Any]:
        """The history of the clip method, and the loss scale."""
        return {
            "engine.clip": self.policy.state_dict() if self.policy is not None else {},
            "engine.scaler": self.scaler.state_dict() if self.scaler is not None else {},
        }

    def load_extra_state(self, extra: Mapping[str, Any]) -> None:
        """Take up what `extra_state` gave."""
        if self.policy is not None and extra.get("engine.clip"):
            self.policy.load_state_dict(extra["engine.clip"])
        if self.scaler is not None and extra.get("engine.scaler"):
            self.scaler.load_state_dict(extra["engine.scaler"])

    def close(self) -> None:
        self._stepped.close()

    def _decide(self, policy: ClipPolicy) -> Decision:
        meter = self._step.meter(
            self._norm_type, policy.slots if self._own is None else self._own.count, self._context.device
        )
        riders, told, whole = self._synchroniser.riders, self._synchroniser.told, self._step.measures_whole
        if self._capture is not None and (whole or self._context.world_size == 1):
            return self._with_verdict(self._repeated(self._capture, policy, meter), self._verdict())
        vector, count = meter.measure(), 0
        if told is not None and not whole:
            vector, count = torch.cat([vector, told]), len(told)
        group = self._context.get_group(ParallelMode.GLOBAL)
        norms = reduce_norms(vector, self._norm_type, group, riders=count, whole=whole)
        if self._own is not None:
            norms = self._own.folded(norms)
        decision = policy.decide(norms if self.scaler is None else self.scaler.unscaled(norms))
        return self._with_verdict(
            decision, riders.take(vector[-count:]) if riders is not None and count else self._verdict()
        )

    def _with_verdict(self, decision: Decision, verdict: Tensor | None) -> Decision:
        if verdict is None:
            return decision
        return replace(decision, found_inf=torch.maximum(decision.found_inf, verdict))

    def _captured(self) -> Capture:
        """Make the step one of CUDA graphs, or say why it cannot be."""
        self._step.capture()
        if self.policy is not None and self.policy.nonfinite == "raise":
            raise ConfigError(
                "graph_step=True cannot be done with clip_grad_norm=dict(nonfinite='raise'), whose numbers the host reads in "
                "every step; use nonfinite='skip', and engine.skipped_steps",
                code="C003",
            )
        return Capture()

    def _repeated(self, capture: Capture, policy: ClipPolicy, meter: Meter) -> Decision:
        """Norm and decision as a CUDA graph, where no other rank has a part in them; copies of what it leaves."""
        scaler = self.scaler

        def decide() -> Decision:
            norms = reduce_norms(meter.measure(), self._norm_type, whole=True)
            return policy.decide(norms if scaler is None else scaler.unscaled(norms))

        found = capture.run((meter, *policy.method.state.values()), None, decide)
        copies = {name: getattr(found, name).clone() for name in ("norm", "divisor", "found_inf", "nonfinite")}
        norms = replace(found.norms, sums=found.norms.sums.clone(), nonfinite=found.norms.nonfinite.clone())
        return Decision(norms=norms, **copies)

    def _ride(self) -> None:
        """Let the synchroniser do without agreements that the host would wait for, where all ranks can. Collective."""
        if self._context.device.type != "cuda" or self._context.world_size == 1:
            return
        able = self._step.drops_on_device and not self._synchroniser.host_waits
        if is_same_everywhere(int(able), self._context.device) and able:
            self._synchroniser.riders = Riders(self._context.device)

    def _verdict(self) -> Tensor | None:
        """What the world says of this step: 1.0 to drop it; None where nothing is asked."""
        riders, told = self._synchroniser.riders, self._synchroniser.told
        if riders is None or told is None:
            return self._synchroniser.verdict
        told = told.clone()
        dist.all_reduce(told, group=self._context.get_group(ParallelMode.GLOBAL))
        return riders.take(told)


def _slot_of(slots: Slots | None, entry: Held, own: OwnNorms | None = None) -> int:
    slot = slots.of_parameter[entry.label] if slots is not None else 0
    return slot if own is None else own.slot(entry, slot)


def _measures_whole(held: Sequence[Held], context: ParallelContext) -> bool:
    """Whether each rank reads all of the gradient: on a GPU that costs less than a collective that joins parts."""
    everywhere = all(entry.holding.count == context.world_size for entry in held)
    return everywhere and context.world_size > 1 and context.device.type == "cuda"


def _step_of_whole_buckets(
    optimizer: Any,
    synchroniser: Synchroniser,
    held: list[Held],
    slot_of: Any,
    flat: bool,
    model: nn.Module,
    whole: bool,
) -> BucketStep:
    entry_of = {id(entry.tensor): entry for entry in held}
    alone = [one for one in held if flat and id(one.tensor) not in synchroniser.parameters and can_scatter(one.tensor)]

    def buckets() -> list[OwnedBucket]:
        made: list[OwnedBucket] = []
        for bucket in synchroniser.layout:
            entries = [entry_of[id(parameter)] for parameter in bucket.parameters]
            made.append(WholeBucket(bucket, entries, [slot_of(entry) for entry in entries], whole))
        mine = [entry for entry in alone if entry.tensor.requires_grad]
        return [*made, *scattered_buckets(mine, [slot_of(entry) for entry in mine], whole)]

    def generation() -> object:
        return synchroniser.generation, [entry.tensor.requires_grad for entry in alone]

    return BucketStep(optimizer, buckets, generation, held, slot_of, flat, model, whole)
