"""Measuring and stepping over gradient buckets, whoever owns which part of them.

`BucketStep` measures this rank's part of the gradient norm and steps, flat or by the optimizer itself. What it measures and
steps on comes as `OwnedBucket`s, of three kinds:

- `WholeBucket`: plain data parallelism. Every rank owns all of the bucket, and steps on the parameters themselves.
- `ShardedBucket`: ZeRO 1 and 2. This rank owns a slice, and steps on the parts of parameters in it.
- `ScatteredBucket`: on a GPU, parameters that owe no sum. Their gradients stay where autograd has put them.

Gradients in no bucket (sparse ones, DTensors of FSDP2, those that somebody replaced) are measured and stepped on one by one.

Whether a step can be flat is decided by `wants_flat`; `ScaledStep` is the way of all other optimizers.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from colonnade.errors import GradientError
from colonnade.gradients.bucket import Bucket, BucketValues
from colonnade.gradients.sums import HALVES
from colonnade.logging import get_dist_logger
from colonnade.optim.flat_step import (
    JOINED,
    FlatBucket,
    FlatStep,
    ScatteredGradient,
    check_capturable,
    why_not,
)
from colonnade.optim.norm import GradientBlock, Meter, bucket_blocks, kernels_available
from colonnade.parallel.dtensor import local_part
from colonnade.parallel.flat import FlatLayout, Span, flattened
from colonnade.parallel.held import Held
from colonnade.parallel.placement import is_dtensor


class BucketStep:
    """Measures and steps over what `buckets()` gives, together with gradients that are in no bucket.

    `generation()` changes whenever there are new buckets. `flat` as in the config: None is "where it can be".
    `loose` are the parameters whose gradients may lie outside: in no bucket, or put elsewhere by somebody. `self.flat` is
    the flat step, once one has been taken.
    """

    def __init__(
        self,
        optimizer: Any,
        buckets: Callable[[], Sequence[OwnedBucket]],
        generation: Callable[[], object],
        loose: Sequence[Held],
        slot_of: Callable[[Held], int],
        flat: bool,
        model: nn.Module,
        whole: bool,
    ) -> None:
        self._optimizer, self._is_flat = optimizer, flat
        self._make_buckets, self._generation = buckets, generation
        self._loose_entries, self._slot_of = list(loose), slot_of
        self._made_for: object = None
        self._buckets: list[OwnedBucket] = []
        self._absent: list[list[int]] | None = None
        self._outside: list[Held] = []
        self._meter: Meter | None = None
        self._meter_key: object = None
        self.flat: FlatStep | None = None
        self._flat_key: object = None
        self._model = weakref.ref(model)
        self.measures_whole = whole
        """Whether every rank measures the whole gradient, so that norms need not be joined."""
        self.captured = False
        """Whether gradients stay where they are, and flat steps are CUDA graphs; see `capture`."""
        self._sizes = _sizes(optimizer)
        self._known = {id(entry.tensor) for entry in loose}

    def capture(self) -> None:
        """Take flat steps as CUDA graphs; refused where there is none, or none can be."""
        owned = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        check_capturable(owned, wants_flat(owned, self._optimizer, True, "graph_step") and self._is_flat)
        self.captured = True

    def meter(self, norm_type: float, slots: int, device: torch.device) -> Meter:
        """What measures this rank's part of the whole gradient now. Only over buckets is it the same as before: their memory stays."""
        absent = self._take_gradients()
        if self._outside or any(bucket.scattered for bucket in self._buckets):
            blocks = [*self._blocks(absent), *map(self._loose_block, self._outside)]
            return Meter(blocks, norm_type, slots=slots, device=device, once=True)
        key = (self._made_for, absent, norm_type, slots)
        if key != self._meter_key:
            self._meter = None  # before its successor comes
            self._meter = Meter(self._blocks(absent), norm_type, slots=slots, device=device)
            self._meter_key = key
        assert self._meter is not None
        return self._meter

    @property
    def drops_on_device(self) -> bool:
        """Whether a step can be dropped without a decision on the host."""
        return self._is_flat or (
            isinstance(self._optimizer, Optimizer) and not ScaledStep(self._optimizer).waits_for_device
        )

    def step_divided(self, divisor: Tensor | None, found_inf: Tensor | None) -> None:
        """Step on the gradient divided by `divisor` (one number, or one per slot), unless `found_inf` is 1.

        None: a step that is neither clipped nor dropped.
        """
        # A clipped step has taken its gradients when it measured them; they are the same still.
        absent = self._absent if self._absent is not None else self._take_gradients()
        self._absent = None
        flat = self._flat_step()
        if flat is not None:
            places, start = [], 0
            for bucket, missing in zip(self._buckets, absent, strict=True):
                places += [start + place for place in missing]
                start += len(bucket.members)
            divisor = self._where_stepped(divisor, torch.ones)
            flat.step(divisor, self._where_stepped(found_inf, torch.zeros).float(), places)
        elif divisor is None and found_inf is None:
            self._optimizer.step()
        else:
            slots = {m: s for bucket in self._buckets for m, s in zip(bucket.members, bucket.slots, strict=True)}
            slots.update((entry.tensor, self._slot_of(entry)) for entry in self._loose_entries)
            divisor = self._where_stepped(divisor, torch.ones)
            found_inf = None if found_inf is None else self._where_stepped(found_inf, torch.zeros)
            ScaledStep(self._optimizer, slots).step(divisor, found_inf)

    def first_bad(self) -> str | None:
        """The name of a parameter whose gradient here is not finite. Waits for the device."""
        stepped = [pair for bucket in self._buckets for pair in zip(bucket.entries, bucket.members, strict=True)]
        loose = [(entry, entry.tensor) for entry in self._loose_entries]  # in the model's order, where they are all
        for entry, tensor in [*loose, *stepped]:
            if tensor.grad is not None and not bool(torch.isfinite(local_part(tensor.grad)).all()):
                return entry.name
        return None

    def close(self) -> None:
        if self.flat is not None:
            self.flat.close()
        self.flat = self._meter = None
        self._buckets = []

    def _take_gradients(self) -> list[list[int]]:
        """Take up the gradients of this step, in buckets and outside; for each bucket, the places of members without one."""
        generation = self._generation()
        if generation != self._made_for:
            self._meter, self._buckets = None, []
            self._buckets, self._made_for = [one for one in self._make_buckets() if len(one.members)], generation
        self._absent = [bucket.take_gradients() for bucket in self._buckets]

        # A parameter of a bucket may have its gradient elsewhere in this step (somebody replaced it, or it is sparse): then it
        # is absent from the bucket, and measured outside.
        inside: set[int] = set()
        for bucket, missing in zip(self._buckets, self._absent, strict=True):
            gone = set(missing)
            inside.update(id(member) for at, member in enumerate(bucket.members) if at not in gone)
        self._outside = [
            entry for entry in self._loose_entries if entry.tensor.grad is not None and id(entry.tensor) not in inside
        ]
        return self._absent

    def _blocks(self, absent: Sequence[Sequence[int]]) -> list[GradientBlock]:
        return [
            block for bucket, missing in zip(self._buckets, absent, strict=True) for block in bucket.blocks(missing)
        ]

    def _loose_block(self, entry: Held) -> GradientBlock:
        """A gradient of no bucket; a DTensor's comes as the parameter lies, sums that were pending included."""
        gradient = local_part(entry.tensor.grad, entry.tensor)  # type: ignore[arg-type]
        gradient = gradient.coalesce().values() if gradient.is_sparse else gradient
        count, index = (1, 0) if self.measures_whole else (entry.holding.count, entry.holding.index)
        return GradientBlock(gradient, count, index, self._slot_of(entry))

    def _flat_step(self) -> FlatStep | None:
        """The flat step, if it can be taken now; it is made anew when the buckets, or the groups, are others.

        Also the first step is flat: else a run that is resumed would differ from one that was not, by an ulp.
        """
        # Parameters may be added to the optimizer between steps, if the model had them in initialize(): their gradients are
        # summed then. Of any others they are not.
        sizes = _sizes(self._optimizer)
        if sizes != self._sizes:
            self._sizes = sizes
            known = self._known.union(id(member) for bucket in self._buckets for member in bucket.members)
            for at, group in enumerate(self._optimizer.param_groups):
                for parameter in group["params"]:
                    if id(parameter) not in known:
                        model = self._model()
                        names = () if model is None else model.named_parameters()
                        name = next((name for name, one in names if one is parameter), "a parameter")
                        raise GradientError(
                            f"{name} of shape {tuple(parameter.shape)} came to the optimizer (group {at}) after initialize(), and "
                            f"the model did not have it then, so nobody sums its gradient. Have it in the model before "
                            f"initialize(); it may be frozen, and come to the optimizer later.",
                            code="C070",
                        )

        # A flat step is of all parameters that the optimizer steps on, or none: what lies outside the buckets would be left out.
        if not self._is_flat or not self._buckets:  # a stage may be frozen as a whole
            return None
        owned = {id(parameter) for group in self._optimizer.param_groups for parameter in group["params"]}
        if any(id(entry.tensor) in owned for entry in self._outside):
            return None
        homeless = owned.difference(id(member) for bucket in self._buckets for member in bucket.members)
        if homeless and any(one.tensor.requires_grad and id(one.tensor) in homeless for one in self._loose_entries):
            return None  # its gradients are sparse, though this step has none

        key = (self._made_for, self._sizes)
        if key != self._flat_key:
            if self.flat is None:
                get_dist_logger().debug(
                    f"{type(self._optimizer).__name__} steps over flat buffers (the same result, in fewer passes); "
                    f"flat_step=False in the config turns this off"
                )
            else:
                self.flat.close()
                self.flat = None  # before its successor comes, or both would hold their memory
            self.flat = FlatStep(self._optimizer, [bucket.flat() for bucket in self._buckets], self.captured)
            self._flat_key = key
        return self.flat

    def _where_stepped(self, number: Tensor | None, default: Callable[..., Tensor]) -> Tensor:
        """A number on the device that is stepped on: not where the norm was joined, if the state is offloaded."""
        home = next((member.device for bucket in self._buckets for member in bucket.members), None)
        return default((), dtype=torch.float32, device=home) if number is None else number.to(home)


def _sizes(optimizer: Any) -> list[int]:
    return [len(group["params"]) for group in optimizer.param_groups]


# --- What is stepped on ---


class OwnedBucket(ABC):
    """What norm and step see of one bucket: names, tensors to step on, their gradients in flat memory, their holders."""

    scattered = False  # whether its gradients may lie anywhere

    def __init__(self, entries: Sequence[Held], slots: Sequence[int]) -> None:
        self.entries, self.slots = entries, slots

    @property
    @abstractmethod
    def members(self) -> Sequence[Tensor]:
        """What the optimizer steps on."""

    @abstractmethod
    def take_gradients(self) -> list[int]:
        """Take up the gradients of this step; the places of the members that have none, and take no part in it."""

    @abstractmethod
    def blocks(self, absent: Sequence[int]) -> list[GradientBlock]:
        """This rank's part of the norm."""

    @abstractmethod
    def flat(self) -> FlatBucket:
        """The same for a flat step."""


class WholeBucket(OwnedBucket):
    """A bucket of which every rank owns all; its members are the parameters."""

    def __init__(self, bucket: Bucket, entries: Sequence[Held], slots: Sequence[int], whole: bool) -> None:
        """`whole`: this rank measures all of it, not just its part among those that hold it too."""
        super().__init__(entries, slots)
        self._bucket, self._whole = bucket, whole

    @property
    def members(self) -> Sequence[Tensor]:
        return self._bucket.parameters

    def take_gradients(self) -> list[int]:
        grads = self._bucket.grads
        return [at for at, parameter in enumerate(self._bucket.parameters) if parameter.grad is not grads[at]]

    def blocks(self, absent: Sequence[int]) -> list[GradientBlock]:
        ranks = self._bucket.sum.ranks
        return bucket_blocks(
            self._bucket.layout,
            self._bucket.gradient,
            [(1, 0) if self._whole else (entry.holding.count, entry.holding.index) for entry in self.entries],
            self.slots,
            absent=absent,
            # Holders outside the bucket's ranks may keep it among other neighbours.
            alone=[at for at, entry in enumerate(self.entries) if entry.holding.ranks != ranks],
        )

    def flat(self) -> FlatBucket:
        return FlatBucket(self._bucket.layout, self._bucket.parameters, self._bucket.gradient, self.slots)


class ShardedBucket(OwnedBucket):
    """A bucket of which this rank owns a slice; its members are the parts of parameters in there."""

    def __init__(self, values: BucketValues, entries: Sequence[Held], slots: Sequence[int]) -> None:
        spans = values.bucket.spans
        super().__init__([entries[span.index] for span in spans], [slots[span.index] for span in spans])
        self._values = values
        self._layout = FlatLayout(values.parts) if values.parts else None
        if self._layout is not None:
            # Where the parts lie in the slice, which a master copy in another dtype keeps.
            self._layout.spans = [Span(span.at, span.numel) for span in spans]
            self._layout.numel = values.bucket.used

    @property
    def members(self) -> Sequence[Tensor]:
        return self._values.parts

    def take_gradients(self) -> list[int]:
        # A part's gradient is its range of the bucket, or None where no rank had a gradient of the parameter.
        missing = self._values.bucket.absent
        places = []
        for place, (span, part, grad) in enumerate(
            zip(self._values.bucket.spans, self._values.parts, self._values.grads, strict=True)
        ):
            if span.index in missing:
                places.append(place)
                part.grad = None
            else:
                part.grad = grad
        return places

    def blocks(self, absent: Sequence[int]) -> list[GradientBlock]:
        assert self._layout is not None
        size = len(self._values.bucket.sum.ranks)
        # Other holders may have cut the parameter elsewhere: each counts all it has, in its proportion.
        holdings = [(entry.holding.count // size, None) for entry in self.entries]
        return bucket_blocks(self._layout, self._values.bucket.gradient, holdings, self.slots, absent=absent)

    def flat(self) -> FlatBucket:
        assert self._layout is not None
        return FlatBucket(
            self._layout, self._values.parts, self._values.bucket.gradient, self.slots, self._values.owned
        )


_ALIGNED = 16


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

    def take_gradients(self) -> list[int]:
        # A kernel is told by addresses where the gradients are. One that it could not read there is copied.
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


# --- Whether a step is flat ---


def wants_flat(parameters: Sequence[Tensor], optimizer: Any, flat: bool | None, key: str = "flat_step") -> bool:
    """Whether the flat step means the same as the optimizer's own; `flat=True` makes a no an error, False is no.

    `key`: who asks, for the error.
    """
    if flat is False:
        return False
    reason = why_not(optimizer) if isinstance(optimizer, Optimizer) else "it is no torch optimizer"
    if reason is None:
        models = {id(parameter) for parameter in parameters}
        owned = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if any(id(parameter) not in models for parameter in owned):
            reason = "it has parameters that are not the model's"
        elif any(is_dtensor(parameter) for parameter in owned):
            reason = "it has DTensor parameters"
    if reason is not None and flat:
        raise GradientError(
            f"{key}=True cannot be done: {reason}. Leave it out, or use a plain AdamW, Adam or SGD.", code="C070"
        )
    return reason is None


def can_scatter(parameter: Tensor, planned_on: str | None = None) -> bool:
    """Whether the kernels can read the parameter's gradient wherever it lies; `planned_on`: on a device of this kind, elsewhere."""
    has_kernels = planned_on == "cuda" if planned_on is not None else parameter.is_cuda and kernels_available()
    return has_kernels and parameter.dtype in (torch.float32, *HALVES) and not is_dtensor(parameter)


# --- A step by a torch optimizer as it is: the divisor goes into the step instead of a pass of its own ---
#
# Optimizers built with `fused=True` divide the gradient by their attribute `grad_scale` and do nothing when their attribute
# `found_inf` is 1. All others get one foreach division, and a decision on the host whether to step.


ATTRIBUTES = ("grad_scale", "found_inf")
DOUBLES = (torch.float64, torch.complex128)


class ScaledStep:
    """Runs `optimizer.step()` on the gradient divided by `divisor`, or not at all where `found_inf` is 1.

    `slot_of` gives the place of a parameter in a divisor with several numbers (0 for those it leaves
    out). After the step the gradients hold the divided values, as torch's fused kernels leave them, so a
    second step on the same gradients would divide twice. An optimizer that is not fused has no way to
    drop a step on the device: then `found_inf` is read on the host, which on CUDA waits for the norm.
    """

    def __init__(self, optimizer: Optimizer, slot_of: Mapping[Tensor, int] | None = None) -> None:
        self.optimizer = optimizer
        self._slot_of = dict(slot_of or {})

    @property
    def waits_for_device(self) -> bool:
        """Whether dropping a step needs a decision on the host."""
        return not _drops_on_device(self.optimizer)

    @torch.no_grad()
    def step(self, divisor: Tensor, found_inf: Tensor | None = None) -> None:
        """One step; without `found_inf` it is never dropped and nothing is read on the host."""
        if _drops_on_device(self.optimizer):
            _give_momentum(self.optimizer)
            # `grad_scale` is fp32: too coarse for fp64 parameters, which are divided beforehand instead.
            inside = divisor.numel() == 1 and not any(p.dtype in DOUBLES for p in _params(self.optimizer))
            if not inside:
                self._divide(divisor)
            with _attributes(self.optimizer, divisor if inside else None, found_inf):
                self.optimizer.step()
        elif found_inf is None or not found_inf.item():
            self._divide(divisor)
            self.optimizer.step()

    def _divide(self, divisor: Tensor) -> None:
        by_slot: dict[int, list[Tensor]] = {}
        for param in _params(self.optimizer):
            if param.grad is not None:
                slot = self._slot_of.get(param, 0) if divisor.numel() > 1 else 0
                by_slot.setdefault(slot, []).append(param.grad)
        for slot, grads in by_slot.items():
            scale_all(grads, divisor.reshape(-1)[slot], divide=True)


@torch.no_grad()
def scale_all(gradients: Iterable[Tensor], factor: float | Tensor, divide: bool = False) -> None:
    """Multiply gradients, or divide them, in few launches: torch has one kernel for a factor of their own precision."""
    alike: dict[tuple[torch.device, torch.dtype, torch.layout], list[Tensor]] = {}
    for grad in map(local_part, gradients):
        wide = torch.float64 if grad.dtype in DOUBLES else torch.float32
        alike.setdefault((grad.device, wide, grad.layout), []).append(grad)
    for (device, wide, layout), grads in alike.items():
        by = factor.to(device, wide, non_blocking=True) if isinstance(factor, Tensor) else factor
        # Of sparse ones, each by itself.
        for some in [grads] if layout is torch.strided else [[grad] for grad in grads]:
            (torch._foreach_div_ if divide else torch._foreach_mul_)(some, by)


def _params(optimizer: Optimizer) -> Iterator[Tensor]:
    return (param for group in optimizer.param_groups for param in group["params"])


def _drops_on_device(optimizer: Optimizer) -> bool:
    """Whether the step reads `grad_scale` and `found_inf`; others raise on them or, worse, ignore them."""
    supports = getattr(optimizer, "_step_supports_amp_scaling", False)
    damped = isinstance(optimizer, SGD) and any(
        group["momentum"] and group["dampening"] for group in optimizer.param_groups
    )
    return supports and not damped and all(group.get("fused") for group in optimizer.param_groups)


def _give_momentum(optimizer: Optimizer) -> None:
    """Start SGD's momentum buffers as zeros: a dropped first step would leave torch's own uninitialised.

    Without dampening a first step from zeros equals torch's first step.
    """
    if not isinstance(optimizer, SGD):
        return
    for group in optimizer.param_groups:
        for param in group["params"]:
            state = optimizer.state[param] if group["momentum"] and param.grad is not None else None
            if state is not None and state.get("momentum_buffer") is None:
                state["momentum_buffer"] = torch.zeros_like(param, memory_format=torch.preserve_format)


@contextmanager
def _attributes(optimizer: Optimizer, divisor: Tensor | None, found_inf: Tensor | None) -> Iterator[None]:
    """Set `grad_scale` and `found_inf` for one step, joined with a loss scaler's, and put those back."""
    before = {name: getattr(optimizer, name) for name in ATTRIBUTES if hasattr(optimizer, name)}
    scale, flag = before.get("grad_scale"), before.get("found_inf")
    if divisor is not None:
        divisor = divisor.reshape(()).float()
        scale = divisor if scale is None else scale * divisor
    if found_inf is not None:
        found_inf = found_inf.reshape(()).float()
        flag = found_inf if flag is None else torch.maximum(flag, found_inf)
    optimizer.grad_scale, optimizer.found_inf = scale, flag  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for name in ATTRIBUTES:
            if name in before:
                setattr(optimizer, name, before[name])
            else:
                delattr(optimizer, name)
