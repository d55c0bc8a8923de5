"""Clip and step as one: one pass for the norm, one collective, and the scale folded into the optimizer's step.

`Stepper.step` is the second half of a training step, told in one piece. `Slots` say what gets a norm of its own, `OwnNorms` are those
of replicas that differ on purpose, and `SkipReport` counts the steps that were dropped without making the host wait.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from colonnade.comm.host_copy import STEPS_LATE, HostCopy
from colonnade.comm.messages import agreed_errors, gather_numbers, gather_texts, is_same_everywhere
from colonnade.config.settings import ClipSettings, Per
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

# --- Slots: what gets a norm of its own ---


@dataclass(frozen=True)
class Slots:
    """The names of all slots of the world, the clip group of each, and the slot of each parameter here.

    A slot is a clip group, a layer or a parameter. Numbered alike on every rank, also where stages hold other layers.
    """

    names: tuple[str, ...]
    group_of: tuple[int, ...]
    of_parameter: dict[str, int]


def count_slots(names: Iterable[str], settings: ClipSettings) -> int:
    """How many norms a step measures, of parameters of these names in the whole world."""
    if (settings.report or settings.per) == "group":
        return len(settings.clip_groups())
    return len({(settings.group_of(name), label_of(name, settings.report or settings.per)) for name in names})


def number_slots(names: Sequence[str], settings: ClipSettings, context: ParallelContext) -> Slots:
    """Give every parameter its slot, by its label. Collective over the world."""
    mine = {name: (settings.group_of(name), label_of(name, settings.report or settings.per)) for name in names}
    texts = gather_texts(json.dumps(sorted(set(mine.values()))), context.device)
    everyone = sorted({(int(group), str(label)) for text in texts for group, label in json.loads(text)})
    _check_groups(settings, {group for group, _ in everyone}, names)
    if (settings.report or settings.per) == "group":
        everyone = [(number, "") for number in range(len(settings.clip_groups()))]
    at = {key: number for number, key in enumerate(everyone)}
    return Slots(
        _names(everyone, [group.name for group in settings.clip_groups()]),
        tuple(group for group, _ in everyone),
        {name: at[key] for name, key in mine.items()},
    )


def _names(keys: Sequence[tuple[int, str]], groups: Sequence[str]) -> tuple[str, ...]:
    """A slot is called by its layer or parameter, with its group where a layer has parameters of several."""
    times = Counter(label for _, label in keys)
    return tuple(
        groups[group] if not label else label if times[label] == 1 else f"{label} ({groups[group]})"
        for group, label in keys
    )


def label_of(name: str, per: Per) -> str:
    """The part of a parameter's name that names its slot: nothing, its layer, or all of it."""
    if per == "parameter":
        return name
    if per == "layer":
        numbered = re.match(r"\d+(?=\.)|.*?\.\d+(?=\.)", name)  # up to the first number
        return numbered[0] if numbered else name.rpartition(".")[0] or name
    return ""


def _check_groups(settings: ClipSettings, used: set[int], names: Sequence[str]) -> None:
    for number, group in enumerate(settings.groups):
        if number not in used:
            pattern, *_ = group.params
            raise ConfigError(
                f"clip_grad_norm: group {group.name!r} ({', '.join(group.params)}) matches no parameter of any "
                f"rank.{did_you_mean(pattern, names)}",
                code="C003",
            )


# --- Norms of replicas that differ on purpose ---


class OwnNorms:
    """The slots of one engine with waived parameters: what nobody sums over replicas has a norm of its own in each replica.

    Replicas that differ on purpose (local SGD, DiLoCo) have gradients of their own. So the sums of powers of waived parameters go
    into further slots, one set for each replica, which travel in the same collective; each rank then takes those of its own
    replica. Slot s of them is at slots * (1 + replica) + s. Where other parameters are summed over the replicas, these must stay
    alike: then all replicas take the largest sums of any.
    """

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
        everyone = gather_numbers([bool(waived), common], context.device)
        own.mixed = any(has_common for _, has_common in everyone)
        return own if any(has_waived for has_waived, _ in everyone) else None

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


# --- Steps that were dropped ---


class SkipReport:
    """Counts dropped steps: the flag of each is a tensor on the device, read on the host later. Only `read` waits."""

    def __init__(self) -> None:
        self.total = 0
        self.last = False
        self.flag: HostCopy | None = None
        """The flag of the last step, read or not."""
        self._pending: deque[HostCopy] = deque()

    def note(self, found_inf: Tensor) -> None:
        """The flag of the step that is being made: 1.0 if it is dropped."""
        self.poll()
        self.flag = HostCopy(found_inf)
        self._pending.append(self.flag)

    def poll(self) -> int:
        """Count the flags that have come; how many of these steps were dropped."""
        return self._count(wait=False)

    def read(self) -> int:
        """Count all flags; waits for the last step. How many of those not counted before were dropped."""
        return self._count(wait=True)

    def _count(self, wait: bool) -> int:
        dropped = 0
        while self._pending and (wait or self._pending[0].ready()):
            self.last = self._pending.popleft().read() > 0
            dropped += self.last
        self.total += dropped
        return dropped


class SkipAwareScheduler:
    """A learning-rate scheduler that stands still when the engine's last step was dropped.

    On a device nobody waits for that: it goes on, and stands still two calls later instead, the same on every rank.
    """

    def __init__(self, scheduler: Any, engine: Any) -> None:
        self._scheduler = scheduler
        self._engine = engine
        self._flags: deque[HostCopy] = deque()
        self._ahead = 0

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance, unless the last step was dropped."""
        flag = self._engine.last_skip_flag
        if flag is not None:
            self._flags.append(flag)
        while self._flags and (self._flags[0].on_host or len(self._flags) > STEPS_LATE):
            self._ahead += self._flags.popleft().read() > 0
        if self._ahead:
            self._ahead -= 1
            return
        self._scheduler.step(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_flags": deque()}  # what is on its way to the host cannot be copied

    def __getattr__(self, name: str) -> Any:
        if name == "_scheduler":  # a copy that is being made has none yet
            raise AttributeError(name)
        return getattr(self._scheduler, name)


class Stepper:
    """Owns the optimizer step of an engine: measures with the `BucketStep` of its optimizer, decides, and has it step."""

    _own: OwnNorms | None = None  # where parameters are waived

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
            clip = ClipSettings(max_norm=float("inf"))  # the norm is what tells an overflow
        self._context = context
        held = held_tensors(model, context)
        self._slots: Slots | None = None
        self.policy: ClipPolicy | None = None
        self._norm_type = 2.0
        if clip is not None:
            self._slots = number_slots([entry.label for entry in held], clip, context)
            self.policy = ClipPolicy.from_settings(clip, self._slots.group_of, self._slots.names)
            self._norm_type = clip.norm_type
        if self._slots is not None:
            self._own = OwnNorms.of(sync.ledger, held, len(self._slots.names), context)
        if self._own is not None:
            held = [self._own.held(entry) for entry in held]
        slot_of = partial(_slot_of, self._slots, own=self._own)
        self.optimizer = optimizer
        self._step = optimizer.make_step(sync.synchroniser, held, slot_of, context)
        self._capture = self._captured() if graph else None
        self._flags = self._piggybacked_flags(sync.synchroniser)
        self.last: Decision | None = None
        self.skips = SkipReport()

    def step(self, outcome: StepOutcome) -> None:
        """Norm, decision and optimizer step, after sums with this outcome.

        The host waits for nothing, but where a step may be dropped by an optimizer that cannot drop it on the device.
        """
        during, policy, flags = self._context.waits.during, self.policy, self._flags
        world = self._context.get_group(ParallelMode.GLOBAL)
        drop_flag, unsent = outcome.drop_flag, outcome.unsent_flags

        # Measure and decide. The sums of powers of all ranks are joined in one collective, and the decision is made of them on
        # the device, with the same bits on every rank. Flags that no bucket carried are part of that collective; where every
        # rank has measured the whole gradient there is none to join.
        if policy is not None:
            with during("measuring the norm", "clip"):
                slots = policy.slots if self._own is None else self._own.count
                meter, whole = self._step.meter(self._norm_type, slots, self._context.device), self._step.measures_whole
                if self._capture is not None and (whole or self._context.world_size == 1):
                    decision = self._repeated(self._capture, policy, meter)
                else:
                    vector = meter.measure()
                    sent = 0 if unsent is None or whole else len(unsent)
                    if unsent is not None and sent:
                        vector, unsent = torch.cat([vector, unsent]), None
                    norms = reduce_norms(vector, self._norm_type, world, piggybacked=sent, whole=whole)
                    if self._own is not None:
                        norms = self._own.folded(norms)
                    decision = policy.decide(norms if self.scaler is None else self.scaler.unscaled(norms))
                    if flags is not None and sent:
                        drop_flag = flags.take(vector[-sent:])

        # Flags that could be sent with nothing take a collective of their own: without them ranks could step differently.
        if flags is not None and unsent is not None:
            unsent = unsent.clone()
            dist.all_reduce(unsent, group=world)
            drop_flag = flags.take(unsent)

        # Step. A gradient that is not finite, a spike, or the world's flag drops it on the device: weights and the optimizer's
        # state stay as they are. The divisor of clipping is applied inside the step, so gradients are read once.
        divisor: Tensor | None = None
        if policy is None:
            self.skips.last, self.skips.flag = False, None
        else:
            if drop_flag is not None:
                decision = replace(decision, found_inf=torch.maximum(decision.found_inf, drop_flag))
            self.last, drop_flag = decision, decision.found_inf
            divisor = decision.divisor if self.scaler is None else decision.divisor * self.scaler.scale
            if self._own is not None:
                divisor = self._own.spread(divisor)
        if drop_flag is not None:
            self.skips.note(drop_flag)
        with during("in the step of the optimizer", "optimizer"):
            self.optimizer.step_divided(divisor, drop_flag)

        # The scale of fp16 follows overflows alone: a spike that is dropped says nothing about it.
        if self.scaler is not None and self.last is not None:
            self.scaler.update(self.last.nonfinite)

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
        self.optimizer.close()

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

    def _piggybacked_flags(self, synchroniser: Synchroniser) -> PiggybackedFlags | None:
        """Let the synchroniser do without agreements that the host would wait for, where all ranks can. Collective."""
        if self._context.device.type != "cuda" or self._context.world_size == 1:
            return None
        able = self._step.drops_on_device and not synchroniser.host_waits
        if not is_same_everywhere(int(able), self._context.device) or not able:
            return None
        flags = PiggybackedFlags(self._context.device)
        synchroniser.agree_by(flags)
        return flags


def _slot_of(slots: Slots | None, entry: Held, own: OwnNorms | None = None) -> int:
    slot = slots.of_parameter[entry.label] if slots is not None else 0
    return slot if own is None else own.slot(entry, slot)
