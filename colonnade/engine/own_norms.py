"""Norms beside waived parameters: what nobody sums over replicas has a norm of its own in each replica of the model.

Replicas that differ on purpose (local SGD, DiLoCo) have gradients of their own. So the sums of powers of waived parameters go
into further slots, one set for each replica, which travel in the same collective; each rank then takes those of its own replica.
Where other parameters are summed over the replicas, these must stay alike: then all replicas take the largest sums of any.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from colonnade.comm.messages import agreed_errors, gather_numbers
from colonnade.context.parallel_context import ParallelContext
from colonnade.engine.gradient_handler.ledger import Ledger
from colonnade.errors import ConfigError, listed
from colonnade.optim.norm import Norms
from colonnade.parallel.demand import Holding
from colonnade.parallel.held import Held
from colonnade.parallel.placement import Shard


class OwnNorms:
    """The slots of one engine, those of waived parameters apart. Slot s of them is at slots * (1 + replica) + s."""

    def __init__(self, waived: set[str], slots: int, context: ParallelContext) -> None:
        self._waived, self._slots = waived, slots
        self.mixed = False
        """Whether any rank has parameters that are summed over the replicas."""
        layout, rank = context.layout, context.get_global_rank()
        self._axes = [axis for axis in layout.axes if axis.data == "distinct"]
        self._replicas = math.prod(axis.size for axis in self._axes)
        here = layout.coordinates(rank)
        self._ranks = [
            other
            for other in range(context.world_size)
            if all(layout.coordinates(other)[axis.name] == here[axis.name] for axis in self._axes)
        ]
        self._replica = 0
        for axis in self._axes:
            self._replica = self._replica * axis.size + here[axis.name]
        self._rank = rank

    @classmethod
    def of(cls, ledger: Ledger, held: Sequence[Held], slots: int, context: ParallelContext) -> OwnNorms | None:
        """For a model with waived parameters; None for any other. Collective over the world, where the config waives any."""
        if not (context.config.get("sync") or {}).get("waive"):
            return None
        waived = {row.parameter for row in ledger.rows if row.waived}
        own = cls(waived, slots, context)
        with agreed_errors(context.device):
            outside = [entry.name for entry in held if entry.name in waived and own._leaves_replica(entry, context)]
            if outside:
                raise ConfigError(
                    f"clip_grad_norm beside sync=dict(waive=...): {listed(outside[:8])} are split over ranks with different data, "
                    f"and waived: a replica of the model holds only a part of their norm. Do not waive them, or clip by "
                    f"colonnade.clip_grad_norm_ in a handler of your own",
                    code="C131",
                )
        common = any(entry.tensor.requires_grad and entry.name not in waived for entry in held)
        told = gather_numbers(2 * bool(waived) + common, context.device)
        own.mixed = any(number & 1 for number in told)
        return own if any(number & 2 for number in told) else None

    @property
    def count(self) -> int:
        """How many slots are measured."""
        return self._slots * (1 + self._replicas)

    def held(self, entry: Held) -> Held:
        """The entry with its holders inside this replica, if it is waived."""
        if entry.name not in self._waived:
            return entry
        ranks = tuple(rank for rank in entry.holding.ranks if rank in self._ranks)
        return replace(entry, holding=Holding(ranks, self._rank))

    def slot(self, entry: Held, slot: int) -> int:
        """Where its sum of powers goes, and its divisor comes from."""
        return self._slots * (1 + self._replica) + slot if entry.name in self._waived else slot

    def folded(self, norms: Norms) -> Norms:
        """The norms as this replica has them. What is not finite is so for all replicas: a step is dropped by all or none."""
        sums, marks = (values.view(1 + self._replicas, self._slots) for values in (norms.sums, norms.nonfinite))
        both = torch.stack([sums[0], sums[1:].amax(0) if self.mixed else sums[1 + self._replica]])
        joined = both.amax(0) if math.isinf(norms.p) else both.sum(0)
        return replace(norms, sums=joined, nonfinite=marks.sum(0))

    def spread(self, divisor: Tensor) -> Tensor:
        """The divisor of every slot that is measured."""
        return divisor.repeat(1 + self._replicas)

    def _leaves_replica(self, entry: Held, context: ParallelContext) -> bool:
        shards = [mode for mode, spec in entry.placement.modes.items() if isinstance(spec, Shard)]
        return any(not set(context.get_ranks_in_group(mode)) <= set(self._ranks) for mode in shards)
