"""Gradient clipping and the optimizer step: one pass over the gradients for the norm, one collective, and a step that includes
the scaling.

`Stepper.step` is the second half of a training step, after the gradient reductions, in one function. `Slots` number the norms
that are measured (by group, layer or parameter), `OwnNorms` are the norms of replicas that differ on purpose (local SGD, DiLoCo),
and `SkipReport` counts skipped steps without a wait of the host.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from colonnade.comm.messages import (
    HOST_COPY_DELAY,
    HostCopy,
    agreed_errors,
    gather_numbers,
    gather_texts,
    is_same_everywhere,
)
from colonnade.config.settings import ClipSettings, Per, SyncSettings
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.engine.gradient_sync import GradientSync
from colonnade.engine.precision import LossScaler
from colonnade.errors import ConfigError, did_you_mean, listed
from colonnade.gradients.ledger import Ledger
from colonnade.gradients.synchroniser import StepOutcome, Synchroniser
from colonnade.gradients.uneven import PiggybackedFlags
from colonnade.logging import get_dist_logger
from colonnade.optim.clip import ClipPolicy, Decision
from colonnade.optim.engine_optimizer import EngineOptimizer
from colonnade.optim.flat_step import Capture
from colonnade.optim.norm import Meter, Norms, reduce_norms
from colonnade.parallel.demand import Holding
from colonnade.parallel.held import Held, held_tensors
from colonnade.parallel.placement import Shard

# --- Slots: the norms that are measured ---


@dataclass(frozen=True)
class Slots:
    """The names of all slots of the world, the clip group of each slot, and the slot of each parameter of this rank.

    A slot is a clip group, a layer or a parameter with a norm of its own. The numbers are the same on every rank, although
    pipeline stages have different layers.
    """

    names: tuple[str, ...]
    group_of: tuple[int, ...]
    of_parameter: dict[str, int]


def count_slots(names: Iterable[str], settings: ClipSettings) -> int:
    """The number of norms that a step measures, for the parameter names of the world."""
    if (settings.report or settings.per) == "group":
        return len(settings.clip_groups())
    return len({(settings.group_of(name), label_of(name, settings.report or settings.per)) for name in names})


def number_slots(names: Sequence[str], settings: ClipSettings, context: ParallelContext) -> Slots:
    """Assign a slot to every parameter name of this rank. Collective over the world."""
    per = settings.report or settings.per
    local = {name: (settings.group_of(name), label_of(name, per)) for name in names}
    texts = gather_texts(json.dumps(sorted(set(local.values()))), context.device)
    keys = sorted({(int(group), str(label)) for text in texts for group, label in json.loads(text)})

    # A pattern that matches nothing is a typo. Only now is it known that no other stage has such a parameter either.
    used = {group for group, _ in keys}
    for number, group in enumerate(settings.groups):
        if number not in used:
            pattern, *_ = group.params
            raise ConfigError(
                f"clip_grad_norm: group {group.name!r} ({', '.join(group.params)}) matches no parameter of any "
                f"rank.{did_you_mean(pattern, names)}",
                code="C003",
            )
    if per == "group":
        keys = [(number, "") for number in range(len(settings.clip_groups()))]
    number_of = {key: number for number, key in enumerate(keys)}

    # A layer with parameters of several groups has several slots: then the group is part of the name.
    groups, times = [group.name for group in settings.clip_groups()], Counter(label for _, label in keys)
    return Slots(
        tuple(
            groups[group] if not label else label if times[label] == 1 else f"{label} ({groups[group]})"
            for group, label in keys
        ),
        tuple(group for group, _ in keys),
        {name: number_of[key] for name, key in local.items()},
    )


def label_of(name: str, per: Per) -> str:
    """The label of a parameter's slot: the layer or the full parameter name; empty if norms are measured per clip group."""
    if per == "parameter":
        return name
    if per == "layer":
        numbered = re.match(r"\d+(?=\.)|.*?\.\d+(?=\.)", name)  # up to the first number
        return numbered[0] if numbered else name.rpartition(".")[0] or name
    return ""


# --- Norms of replicas that differ on purpose ---


class OwnNorms:
    """One norm per model replica, for waived parameters.

    Their gradients are not reduced, because replicas differ on purpose (local SGD).

    The sums of powers of waived parameters go into further slots, one set per replica, in the same collective as all others;
    each rank then selects the set of its own replica. Slot s of a replica is at slots * (1 + replica) + s. If other parameters
    are reduced over the replicas, the replicas must stay equal in them: then all replicas use the largest sums of any.
    """

    def __init__(self, waived: set[str], slots: int, context: ParallelContext) -> None:
        self._waived, self._slots = waived, slots
        self.mixed = False
        """Whether any rank has parameters that are reduced over the replicas."""
        # A replica is the ranks with equal positions on all axes of distinct data; these positions make its number.
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
        """Build the object if any rank has waived parameters; else return None.

        Collective over the world if `sync.waive` is set.
        """
        if not SyncSettings.read(context.config.get("sync")).waive:
            return None
        waived = {row.parameter for row in ledger.rows if row.waived}
        own = cls(waived, slots, context)
        replica = set(own._ranks)
        with agreed_errors(context.device):
            # A shard on a rank with different data belongs to another replica, so no replica could compute the norm.
            outside = [
                entry.name
                for entry in held
                if entry.name in waived
                and any(
                    isinstance(spec, Shard) and not replica.issuperset(context.get_ranks_in_group(mode))
                    for mode, spec in entry.placement.modes.items()
                )
            ]
            if outside:
                raise ConfigError(
                    f"clip_grad_norm cannot be used with sync=dict(waive=...) here. {listed(outside[:8])} are waived "
                    "and sharded over ranks with different data. A replica of the model stores only a part of them "
                    "and cannot compute their norm. Do not waive these parameters, or clip with "
                    "colonnade.clip_grad_norm_ in a custom handler.",
                    code="C131",
                )
        reduced = any(entry.tensor.requires_grad and entry.name not in waived for entry in held)
        flags = gather_numbers([bool(waived), reduced], context.device)
        own.mixed = any(has_reduced for _, has_reduced in flags)
        return own if any(has_waived for has_waived, _ in flags) else None

    @property
    def count(self) -> int:
        """The number of measured slots: one set of slots for parameters that are not waived, and one set for each replica."""
        return self._slots * (1 + self._replicas)

    def in_replica(self, entry: Held) -> Held:
        """A copy of a waived entry whose replica ranks are limited to this replica of the model; any other entry unchanged."""
        if entry.name not in self._waived:
            return entry
        ranks = tuple(rank for rank in entry.holding.ranks if rank in self._ranks)
        return replace(entry, holding=Holding(ranks, self._rank))

    def slot(self, entry: Held, slot: int) -> int:
        """The entry's slot among all measured slots, for its sum of powers and its divisor; `slot` is its slot in a single
        replica.
        """
        return self._slots * (1 + self._replica) + slot if entry.name in self._waived else slot

    def select(self, norms: Norms) -> Norms:
        """Select the norms of this rank's model replica.

        Non-finite counts include all replicas, so that either all replicas skip a step or none.
        """
        sums, nonfinite = (values.view(1 + self._replicas, self._slots) for values in (norms.sums, norms.nonfinite))
        both = torch.stack([sums[0], sums[1:].amax(0) if self.mixed else sums[1 + self._replica]])
        joined = both.amax(0) if math.isinf(norms.p) else both.sum(0)
        return replace(norms, sums=joined, nonfinite=nonfinite.sum(0))

    def expand(self, divisor: Tensor) -> Tensor:
        """Expand the divisors of this replica's slots to all measured slots."""
        return divisor.repeat(1 + self._replicas)


# --- Skipped steps ---


class SkipReport:
    """Counts skipped steps. The skip flag of each step is a device tensor that the host reads later; only `read` waits."""

    def __init__(self) -> None:
        self.total = 0
        self.last = False
        self.flag: HostCopy | None = None
        """The flag of the last step, read or not."""
        self._pending: deque[HostCopy] = deque()

    def note(self, found_inf: Tensor) -> None:
        """Add the skip flag of the current step: 1.0 if the step is skipped."""
        self.poll()
        self.flag = HostCopy(found_inf)
        self._pending.append(self.flag)

    def poll(self) -> int:
        """Count the flags that have arrived on the host; returns the number of skipped steps among them."""
        return self._count(wait=False)

    def read(self) -> int:
        """Count all flags, and wait for the flag of the last step.

        Returns the number of skipped steps that were not counted before.
        """
        return self._count(wait=True)

    def _count(self, wait: bool) -> int:
        skipped = 0
        while self._pending and (wait or self._pending[0].ready()):
            self.last = self._pending.popleft().read() > 0
            skipped += self.last
        self.total += skipped
        return skipped


class SkipAwareScheduler:
    """A learning-rate scheduler that does not advance when the engine has skipped its last step.

    On a GPU the host does not wait for the skip flag. The scheduler advances after a skipped step, and omits a later call instead
    (two steps later, the same call on every rank).
    """

    def __init__(self, scheduler: Any, engine: Any) -> None:
        self._scheduler = scheduler
        self._engine = engine
        self._flags: deque[HostCopy] = deque()
        self._ahead = 0

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance the scheduler, unless a step was skipped."""
        flag = self._engine.last_skip_flag
        if flag is not None:
            self._flags.append(flag)
        # Flags from a device are read at a fixed age, not when they have arrived: arrival differs between ranks, and all ranks
        # must omit the same call.
        while self._flags and (self._flags[0].on_host or len(self._flags) > HOST_COPY_DELAY):
            self._ahead += self._flags.popleft().read() > 0
        if self._ahead:
            self._ahead -= 1
            return
        self._scheduler.step(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_flags": deque()}  # pending copies to the host cannot be pickled

    def __getattr__(self, name: str) -> Any:
        if name == "_scheduler":  # not set yet while a copy is being made
            raise AttributeError(name)
        return getattr(self._scheduler, name)


class Stepper:
    """The optimizer step of an engine: gradient norm (by the `BucketStep` of the optimizer), clipping decision, step.

    Building it is collective over the world.
    """

    _own: OwnNorms | None = None  # set if parameters are waived

    def __init__(
        self,
        model: nn.Module,
        optimizer: EngineOptimizer,
        context: ParallelContext,
        sync: GradientSync,
        clip: ClipSettings | None,
        scaler: LossScaler | None = None,
        graph: bool = False,
    ) -> None:
        self.scaler = scaler
        if scaler is not None and clip is None:
            clip = ClipSettings(max_norm=float("inf"))  # fp16 overflows are found by the norm
        if graph and clip is not None and clip.nonfinite == "raise":
            raise ConfigError(
                "cuda_graph is not available with clip_grad_norm=dict(nonfinite='raise'), because 'raise' reads "
                "the norm on the host in every step. Use nonfinite='skip', and read engine.skipped_steps.",
                code="C003",
            )
        self._context = context
        self._world = context.get_group(ParallelMode.GLOBAL)
        held = held_tensors(model, context)
        self._slots: Slots | None = None
        self.policy: ClipPolicy | None = None
        self._norm_type = 2.0
        if clip is not None:
            # Every rank sends the sums of all slots in one vector, so all must number them alike.
            self._slots = number_slots([entry.label for entry in held], clip, context)
            self.policy = ClipPolicy.from_settings(clip, self._slots.group_of, self._slots.names)
            self._norm_type = clip.norm_type
        if self._slots is not None:
            self._own = OwnNorms.of(sync.ledger, held, len(self._slots.names), context)
        if self._own is not None:
            held = [self._own.in_replica(entry) for entry in held]

        numbered, own = self._slots, self._own  # no reference to `self` from the step that it owns

        def slot_of(entry: Held) -> int:
            slot = numbered.of_parameter[entry.label] if numbered is not None else 0
            return slot if own is None else own.slot(entry, slot)

        self.optimizer = optimizer
        self._step = optimizer.make_step(sync.synchroniser, held, slot_of, context)
        self._capture: Capture | None = None
        if graph:
            self._step.capture()
            self._capture = Capture()
        self._flags = self._piggybacked_flags(sync.synchroniser)
        self.last: Decision | None = None
        self.skips = SkipReport()

    def step(self, outcome: StepOutcome) -> None:
        """Measure the norm, decide on clipping, and step. `outcome` is the result of the gradient reductions.

        The host waits only if the step may be skipped and the optimizer cannot skip it on the device.
        """
        during, policy, flags = self._context.waits.during, self.policy, self._flags
        drop_flag, unsent = outcome.drop_flag, outcome.unsent_flags

        # Norm and decision. One all-reduce adds up the sums of powers of all ranks (`reduce_norms` explains why one suffices), and the
        # decision is computed from the result on the device, with the same bits on every rank. Status flags that no bucket carried
        # are appended to this all-reduce. If every rank measures the full gradient, there is no all-reduce to append them to.
        if policy is not None:
            with during("measuring the norm", "clip"):
                slots = policy.slots if self._own is None else self._own.count
                meter = self._step.meter(self._norm_type, slots, self._context.device)
                full_gradient = self._step.measures_full_gradient
                if self._capture is not None and (full_gradient or self._context.world_size == 1):
                    decision = self._repeated(self._capture, policy, meter)
                else:
                    vector = meter.measure()
                    sent = 0 if unsent is None or full_gradient else len(unsent)
                    if unsent is not None and sent:
                        vector, unsent = torch.cat([vector, unsent]), None
                    norms = reduce_norms(
                        vector,
                        self._norm_type,
                        self._world,
                        piggybacked=sent,
                        measures_full_gradient=full_gradient,
                    )
                    if self._own is not None:
                        norms = self._own.select(norms)
                    decision = policy.decide(norms if self.scaler is None else self.scaler.unscaled(norms))
                    if flags is not None and sent:
                        drop_flag = flags.take(vector[-sent:])

        # Flags that neither a bucket nor the norm could carry need their own collective: without them some ranks would step and
        # others not.
        if flags is not None and unsent is not None:
            unsent = unsent.clone()
            dist.all_reduce(unsent, group=self._world)
            drop_flag = flags.take(unsent)

        # Step. A non-finite gradient, a spike or the flag of the world skips it on the device: weights and optimizer state do not
        # change. The clipping divisor (times the fp16 scale) is applied inside the step, so gradients are read only once.
        divisor: Tensor | None = None
        if policy is None:
            self.skips.last, self.skips.flag = False, None
        else:
            if drop_flag is not None:
                decision = replace(decision, found_inf=torch.maximum(decision.found_inf, drop_flag))
            self.last, drop_flag = decision, decision.found_inf
            divisor = decision.divisor if self.scaler is None else decision.divisor * self.scaler.scale
            if self._own is not None:
                divisor = self._own.expand(divisor)
        if drop_flag is not None:
            self.skips.note(drop_flag)
        with during("in the step of the optimizer", "optimizer"):
            self.optimizer.step_divided(divisor, drop_flag)

        # The fp16 loss scale follows overflows only: a skipped spike is no reason to lower it.
        if self.scaler is not None and self.last is not None:
            self.scaler.update(self.last.nonfinite)

    def report_skips(self, wait: bool) -> None:
        """Log the number of steps skipped since the last call, with the first non-finite parameter of this rank if known.

        `wait`: also for the last step.
        """
        if self.skips.read() if wait else self.skips.poll():
            bad = self._step.first_nonfinite()
            where = f" first in {bad} on rank {self._context.get_global_rank()};" if bad else ""
            # Only the rank with the bad gradient can name the parameter; rank 0 logs in any case.
            if bad or self._context.get_global_rank() == 0:
                get_dist_logger().warning(
                    f"step skipped:{where} its gradient norm is {float(self.last.norm) if self.last else 0.0:g} "
                    f"({self.skips.total} skipped so far)"
                )

    def note_failed(self, ranks: Sequence[int]) -> None:
        """Count and log the step as skipped if backward failed on any rank; `ranks` are these ranks."""
        if ranks:
            self.skips.total += 1
            self.skips.last, self.skips.flag = True, HostCopy(torch.ones((), device="cpu"))
            get_dist_logger().warning(
                f"step skipped: its backward pass failed on rank {listed(ranks)} ({self.skips.total} skipped so far)"
            )

    def norms(self) -> dict[str, Tensor]:
        """The norm of every slot (group, layer or parameter) at the last step, as device tensors."""
        if self.last is None or self._slots is None:
            return {}
        return dict(zip(self._slots.names, self.last.norms.per_slot().unbind(), strict=True))

    def extra_state(self) -> dict[str, Any]:
        """The history of the clip method, and the loss scale, for a checkpoint."""
        return {
            "engine.clip": self.policy.state_dict() if self.policy is not None else {},
            "engine.scaler": self.scaler.state_dict() if self.scaler is not None else {},
        }

    def load_extra_state(self, extra: Mapping[str, Any]) -> None:
        """Load the result of `extra_state`."""
        if self.policy is not None and extra.get("engine.clip"):
            self.policy.load_state_dict(extra["engine.clip"])
        if self.scaler is not None and extra.get("engine.scaler"):
            self.scaler.load_state_dict(extra["engine.scaler"])

    def close(self) -> None:
        self.optimizer.close()

    def _repeated(self, capture: Capture, policy: ClipPolicy, meter: Meter) -> Decision:
        """Norm and decision as a CUDA graph, if they need no other rank. The results are copied out of the graph's memory."""
        scaler = self.scaler

        def decide() -> Decision:
            norms = reduce_norms(meter.measure(), self._norm_type, measures_full_gradient=True)
            return policy.decide(norms if scaler is None else scaler.unscaled(norms))

        found = capture.run((meter, *policy.method.state.values()), None, decide)
        copies = {name: getattr(found, name).clone() for name in ("norm", "divisor", "found_inf", "nonfinite")}
        norms = replace(found.norms, sums=found.norms.sums.clone(), nonfinite=found.norms.nonfinite.clone())
        return Decision(norms=norms, **copies)

    def _piggybacked_flags(self, synchroniser: Synchroniser) -> PiggybackedFlags | None:
        """Replace the synchroniser's agreements on the host by flags on the device, if all ranks can. Collective."""
        if self._context.device.type != "cuda" or self._context.world_size == 1:
            return None
        able = self._step.skips_on_device and not synchroniser.host_waits
        if not is_same_everywhere(int(able), self._context.device) or not able:
            return None
        flags = PiggybackedFlags(self._context.device)
        synchroniser.agree_by(flags)
        return flags
