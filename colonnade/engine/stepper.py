"""Clip and step as one: one pass for the norm, one collective, and the scale folded into the optimizer's step."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.engine.gradient_handler._bucket import Bucket, local
from colonnade.engine.gradient_handler.sync import GradientSync
from colonnade.engine.precision import LossScaler
from colonnade.engine.skips import SkipReport
from colonnade.engine.slots import Slots, number_slots, slot_name
from colonnade.errors import GradientError
from colonnade.logging import get_dist_logger
from colonnade.optim.blocks import Block, bucket_blocks
from colonnade.optim.clip_policy import ClipPolicy, Decision
from colonnade.optim.clip_settings import ClipSettings
from colonnade.optim.flat_state import FlatBucket
from colonnade.optim.flat_step import FlatStep, why_not
from colonnade.optim.norm import Meter, powsums, reduce_norms
from colonnade.optim.scaled_step import ScaledStep
from colonnade.optim.zero.optimizer import ZeroOptimizer
from colonnade.parallel.agreement import Held, held_tensors
from colonnade.parallel.dtensor import local_part
from colonnade.parallel.placement import is_dtensor


class Stepper:
    """Owns the optimizer step of an engine; `flat` as `wants_flat` decided it."""

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
        self._optimizer = optimizer
        self._context = context
        self._sync = sync
        self._held = {id(entry.tensor): entry for entry in held_tensors(model, context)}
        self._wants_flat = flat
        self._slots: Slots | None = None
        self.policy: ClipPolicy | None = None
        self._norm_type = 2.0
        if clip is not None:
            self._slots = number_slots([slot_name(entry) for entry in self._held.values()], clip, context)
            self.policy = ClipPolicy(
                clip.build_method(),
                clip.clip_groups(),
                self._slots.group_of,
                names=self._slots.names,
                nonfinite=clip.nonfinite,
            )
            self._norm_type = clip.norm_type
        self._sharded = optimizer if isinstance(optimizer, ZeroOptimizer) else None
        if self._sharded is not None:
            by_name = {entry.name: self._slot(entry) for entry in self._held.values()}
            self._sharded.use_slots(by_name.__getitem__)
        self._scaled = ScaledStep(optimizer, self._slot_map())
        self._flat: FlatStep | None = None
        self._meter: Meter | None = None
        self._meter_key: object = None
        self._flat_generation: object = None
        self.last: Decision | None = None
        self.skips = SkipReport()

    def step(self) -> None:
        """Measure, decide, step. No host synchronisation, but where a step may be dropped by an optimizer that
        cannot drop it on the device."""
        if self.policy is None:
            self._plain_step()
            return
        self.last = self._decide(self.policy)
        self.skips.note(self.last.found_inf)
        divisor = self.last.divisor if self.scaler is None else self.last.divisor * self.scaler.scale
        if self._sharded is not None:
            self._sharded.step_divided(divisor, self.last.found_inf)
        elif self._flat_ready():
            self._flat.step(divisor, self.last.found_inf)  # type: ignore[union-attr]
        else:
            self._scaled.step(divisor, self.last.found_inf)
        if self.scaler is not None:
            self.scaler.update(self.last.found_inf)

    def report_skip(self) -> bool | None:
        """Whether the last step was dropped (None: no step yet); says so once, with the parameter at fault here."""
        skipped = self.skips.read()
        if skipped:
            bad = self._first_bad()
            where = f" first in {bad} on rank {self._context.get_global_rank()};" if bad else ""
            if bad or self._context.get_global_rank() == 0:
                get_dist_logger().warning(
                    f"step dropped:{where} its gradient norm is {float(self.last.norm) if self.last else 0.0:g} "
                    f"({self.skips.total} dropped so far)"
                )
        return skipped

    def norms(self) -> dict[str, Tensor]:
        """The norm of every slot (group, layer or parameter) at the last step, as device tensors."""
        if self.last is None or self._slots is None:
            return {}
        return dict(zip(self._slots.names, self.last.norms.per_slot().unbind(), strict=True))

    def close(self) -> None:
        if self._flat is not None:
            self._flat.close()
        if self._sharded is not None:
            self._sharded.close()

    # -- inside -------------------------------------------------------------------------------------------

    def _plain_step(self) -> None:
        if self._flat_ready():
            device = self._context.device
            self._flat.step(torch.ones(1, device=device), torch.zeros((), device=device))  # type: ignore[union-attr]
        else:
            self._optimizer.step()

    def _decide(self, policy: ClipPolicy) -> Decision:
        group = self._context.get_group(ParallelMode.GLOBAL)
        norms = reduce_norms(self._measure(policy), self._norm_type, group)
        return policy.decide(norms if self.scaler is None else self.scaler.unscaled(norms))

    def _measure(self, policy: ClipPolicy) -> Tensor:
        """This rank's part of the norm. Only over buckets is a meter kept: their memory stays where it is."""
        if self._sharded is not None:
            return self._measure_sharded(self._sharded, policy)
        buckets = self._buckets()
        inside = [[p.grad is grad for p, grad in zip(b.parameters, b.grads, strict=True)] for b in buckets]
        bucketed = {
            id(p) for b, here in zip(buckets, inside, strict=True) for p, h in zip(b.parameters, here, strict=True) if h
        }
        loose = [p for p in self._parameters() if p.grad is not None and id(p) not in bucketed]
        key = (self._sync.executor.generation, inside)
        device = self._context.device
        if loose:
            blocks = [*self._bucket_blocks(buckets, inside), *map(self._loose_block, loose)]
            return powsums(blocks, self._norm_type, policy.slots, device=device)
        if key != self._meter_key or self._meter is None:
            blocks = self._bucket_blocks(buckets, inside)
            self._meter = Meter(blocks, self._norm_type, slots=policy.slots, device=device)
            self._meter_key = key
        return self._meter.measure()

    def _measure_sharded(self, sharded: ZeroOptimizer, policy: ClipPolicy) -> Tensor:
        """The slices, and whatever gradients the optimizer does not have."""
        device = self._context.device
        mine = sharded.measure(self._norm_type, policy.slots, device)
        loose = [p for p in self._parameters() if p.grad is not None and not sharded.shards(p)]
        if not loose:
            return mine
        other = powsums([*map(self._loose_block, loose)], self._norm_type, policy.slots, device=device)
        return torch.maximum(mine, other) if math.isinf(self._norm_type) else mine + other

    def _bucket_blocks(self, buckets: list[Bucket], inside: list[list[bool]]) -> list[Block]:
        blocks: list[Block] = []
        for bucket, here in zip(buckets, inside, strict=True):
            entries = [self._held[id(parameter)] for parameter in bucket.parameters]
            blocks += bucket_blocks(
                bucket.layout,
                bucket.buffer,
                [(entry.holding.count, entry.holding.index) for entry in entries],
                [self._slot(entry) for entry in entries],
                absent=[at for at, is_in in enumerate(here) if not is_in],
                # Holders outside the bucket's ranks may keep it among other neighbours.
                alone=[at for at, entry in enumerate(entries) if entry.holding.ranks != bucket.reduction.ranks],
            )
        return blocks

    def _loose_block(self, parameter: Tensor) -> Block:
        """A gradient of no bucket; a DTensor's comes as the parameter lies, sums that were pending included."""
        entry = self._held[id(parameter)]
        gradient = local(parameter.grad, parameter)  # type: ignore[arg-type]
        gradient = gradient.coalesce().values() if gradient.is_sparse else gradient
        return Block(gradient, entry.holding.count, entry.holding.index, self._slot(entry))

    def _flat_ready(self) -> bool:
        """Whether the flat step can be taken now; it is made anew when the buckets have been laid out anew.

        Also the first step is flat: else a run that is resumed would differ from one that was not, by an ulp.
        """
        if not self._wants_flat or not self._buckets():  # a stage may be frozen as a whole
            return False
        generation = self._sync.executor.generation
        if generation != self._flat_generation:
            self._make_flat()
            self._flat_generation = generation
        return all(
            parameter.grad is None or parameter.grad is grad
            for bucket in self._buckets()
            for parameter, grad in zip(bucket.parameters, bucket.grads, strict=True)
        )

    def _make_flat(self) -> None:
        if self._flat is not None:
            self._flat.close()
        else:
            get_dist_logger().info(
                f"{type(self._optimizer).__name__} steps over flat buffers (the same result, in fewer passes); "
                f"flat_step=False in the config turns this off"
            )
        buckets = [
            FlatBucket(
                bucket.layout,
                bucket.parameters,
                bucket.buffer,
                [self._slot(self._held[id(parameter)]) for parameter in bucket.parameters],
            )
            for bucket in self._buckets()
        ]
        self._flat = FlatStep(self._optimizer, buckets)

    def _buckets(self) -> list[Bucket]:
        return [bucket for reducer in self._sync.executor.reducers for bucket in reducer.buckets]

    def _parameters(self) -> list[Tensor]:
        return [entry.tensor for entry in self._held.values()]

    def _slot(self, entry: Held) -> int:
        return self._slots.of_parameter[slot_name(entry)] if self._slots is not None else 0

    def _slot_map(self) -> dict[Tensor, int]:
        return {entry.tensor: self._slot(entry) for entry in self._held.values()}

    def _first_bad(self) -> str | None:
        if self._sharded is not None:
            return self._sharded.first_bad()
        for entry in self._held.values():
            gradient = entry.tensor.grad
            if gradient is not None and not bool(torch.isfinite(local_part(gradient)).all()):
                return entry.name
        return None


def wants_flat(model: nn.Module, optimizer: Any, flat: bool | None) -> bool:
    """Whether the flat step means the same as the optimizer's own; `flat=True` makes a no an error, False is no."""
    if flat is False or isinstance(optimizer, ZeroOptimizer):  # that one takes flat steps of its own
        return False
    reason = why_not(optimizer) if isinstance(optimizer, torch.optim.Optimizer) else "it is no torch optimizer"
    if reason is None:
        models = {id(parameter) for parameter in model.parameters()}
        owned = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if any(id(parameter) not in models for parameter in owned):
            reason = "it has parameters that are not the model's"
        elif any(is_dtensor(parameter) for parameter in owned):
            reason = "it has DTensor parameters"
    if reason is not None and flat:
        raise GradientError(
            f"flat_step=True cannot be done: {reason}. Leave it out, or use a plain AdamW, Adam or SGD."
        )
    return reason is None
