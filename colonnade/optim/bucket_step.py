"""The gradient norm and the optimizer step over gradient buckets, replicated or sharded.

`BucketStep` measures this rank's contribution to the gradient norm and steps, over flat memory or with the optimizer's own
`step()`. It works on three kinds of `OwnedBucket`:

- `ReplicatedBucket`: plain data parallelism. Every rank steps on the parameters of the full bucket.
- `ShardedBucket`: ZeRO 1 and 2. This rank steps on its slice of the bucket, which has shards of the parameters.
- `ScatteredBucket`: on a GPU, parameters whose gradients need no reduction. Gradients stay in the memory that autograd allocated.

Gradients that are in no bucket (sparse gradients, DTensors of FSDP2) are measured one by one, and the optimizer's own step uses
them.

`wants_flat` decides whether a step can be flat; `ScaledStep` is the step of all other optimizers.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
    check_capturable,
    why_not,
)
from colonnade.optim.norm import (
    GradientBlock,
    Meter,
    ScatteredGradient,
    ScatteredRange,
    bucket_blocks,
    kernels_available,
    numbers_on,
)
from colonnade.parallel.flat import FlatLayout, Span, flattened, padded
from colonnade.parallel.held import Held
from colonnade.parallel.placement import is_dtensor, local_part


class BucketStep:
    """Measures this rank's gradient norm and runs the optimizer step, for gradients inside and outside buckets.

    `flat` is the `FlatStep`; None before it exists.

    Args:
        optimizer: The optimizer of the bucket members.
        buckets: Creates the buckets.
        generation: Returns a value that changes whenever `buckets` would return different buckets.
        loose: The parameters whose gradients may be in no bucket.
        slot_of: The slot of a parameter in the norm and in the divisor.
        flat: Whether steps are flat where they can be, as decided by `wants_flat`.
        model: For names in messages; only a weak reference is kept.
        measures_full_gradient: Whether every rank measures the full gradient, so that norms need no collective.
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
        measures_full_gradient: bool,
    ) -> None:
        self._optimizer, self._is_flat = optimizer, flat
        self._make_buckets, self._generation = buckets, generation
        self._loose_entries, self._slot_of = list(loose), slot_of
        self._made_for: object = None
        self._buckets: list[OwnedBucket] = []
        self._absent: list[list[int]] | None = None
        self._outside: list[Held] = []
        self._not_inside: list[Held] = []
        self._outside_key: object = None
        self._meter: Meter | None = None
        self._meter_key: object = None
        self.flat: FlatStep | None = None
        self._flat_key: object = None
        self._owned: set[int] = set()
        self._bucketless: list[Held] = []
        self._owned_key: object = None
        self._model = weakref.ref(model)
        self.measures_full_gradient = measures_full_gradient
        self.captured = False
        """Whether flat steps are CUDA graphs; see `capture`."""
        self._sizes = _sizes(optimizer)
        self._known = {id(entry.tensor) for entry in loose}

    def capture(self) -> None:
        """Record flat steps as CUDA graphs. Raises GradientError if steps are not flat or cannot be recorded."""
        owned = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        check_capturable(owned, wants_flat(owned, self._optimizer, True, "cuda_graph") and self._is_flat)
        self.captured = True

    def meter(self, norm_type: float, slots: int, device: torch.device) -> Meter:
        """The meter of this rank's gradients in this step.

        If all gradients are in buckets, the meter is reused: their memory stays the same, or kernels read its addresses on the device.
        """
        absent = self._take_gradients()
        if self._outside or (norm_type != 2.0 and any(bucket.scattered for bucket in self._buckets)):
            blocks = self._blocks(absent, once=True)
            for entry in self._outside:
                # A DTensor's gradient is brought to its parameter's placement first, which completes pending reductions.
                gradient = local_part(entry.tensor.grad, entry.tensor)  # type: ignore[arg-type]
                gradient = gradient.coalesce().values() if gradient.is_sparse else gradient
                count, index = (1, 0) if self.measures_full_gradient else (entry.holding.count, entry.holding.index)
                blocks.append(GradientBlock(gradient, count, index, self._slot_of(entry)))
            return Meter(blocks, norm_type, slots=slots, device=device, once=True)
        key = (self._made_for, absent, norm_type, slots)
        if key != self._meter_key:
            self._meter = None  # frees its memory before the next one is allocated
            self._meter = Meter(self._blocks(absent, once=False), norm_type, slots=slots, device=device)
            self._meter_key = key
        assert self._meter is not None
        return self._meter

    @property
    def skips_on_device(self) -> bool:
        """Whether a step can be skipped by a flag on the device, without reading the flag on the host."""
        return self._is_flat or (
            isinstance(self._optimizer, Optimizer) and not ScaledStep(self._optimizer).waits_for_device
        )

    def step_divided(self, divisor: Tensor | None, found_inf: Tensor | None) -> None:
        """Step on the gradient divided by `divisor` (one number, or one per slot), unless `found_inf` is 1.

        If `divisor` is None, the step is not clipped; if `found_inf` is None, it is not skipped.
        """
        # With clipping, the meter has taken up the gradients of this step already.
        absent = self._absent if self._absent is not None else self._take_gradients()
        self._absent = None
        flat = self._flat_step()
        if flat is not None:
            places, start = [], 0
            for bucket, missing in zip(self._buckets, absent, strict=True):
                places += [start + place for place in missing]
                start += len(bucket.members)
            divisor = self._where_stepped(divisor, 1.0)
            flat.step(divisor, self._where_stepped(found_inf, 0.0).float(), places)
        elif divisor is None and found_inf is None:
            self._optimizer.step()
        else:
            slots = {m: s for bucket in self._buckets for m, s in zip(bucket.members, bucket.slots, strict=True)}
            slots.update((entry.tensor, self._slot_of(entry)) for entry in self._loose_entries)
            divisor = self._where_stepped(divisor, 1.0)
            found_inf = None if found_inf is None else self._where_stepped(found_inf, 0.0)
            ScaledStep(self._optimizer, slots).step(divisor, found_inf)

    def first_nonfinite(self) -> str | None:
        """The name of the first parameter with a non-finite gradient on this rank. Waits for the device."""
        stepped = [pair for bucket in self._buckets for pair in zip(bucket.entries, bucket.members, strict=True)]
        loose = [(entry, entry.tensor) for entry in self._loose_entries]  # in the model's order
        for entry, tensor in [*loose, *stepped]:
            if tensor.grad is not None and not bool(torch.isfinite(local_part(tensor.grad)).all()):
                return entry.name
        return None

    def close(self) -> None:
        """Remove hooks and drop buckets."""
        if self.flat is not None:
            self.flat.close()
        self.flat = self._meter = None
        self._buckets = []

    def _take_gradients(self) -> list[list[int]]:
        """Find the gradients of this step. Returns, per bucket, the places of members without a gradient in the bucket."""
        generation = self._generation()
        if generation != self._made_for:
            self._meter, self._buckets = None, []
            self._buckets, self._made_for = (
                [bucket for bucket in self._make_buckets() if len(bucket.members)],
                generation,
            )
        self._absent = [bucket.take_gradients() for bucket in self._buckets]

        # The gradient of a bucket's parameter may be outside of the bucket in this step, if it is sparse or of another dtype. Then it
        # is absent from the bucket and treated like that of a parameter in no bucket.
        key = (generation, self._absent)
        if key != self._outside_key:
            inside: set[int] = set()
            for bucket, missing in zip(self._buckets, self._absent, strict=True):
                gone = set(missing)
                inside.update(id(member) for at, member in enumerate(bucket.members) if at not in gone)
            self._not_inside = [entry for entry in self._loose_entries if id(entry.tensor) not in inside]
            self._outside_key = key
        self._outside = [entry for entry in self._not_inside if entry.tensor.grad is not None]
        return self._absent

    def _blocks(self, absent: Sequence[Sequence[int]], once: bool) -> list[GradientBlock]:
        return [
            block
            for bucket, missing in zip(self._buckets, absent, strict=True)
            for block in bucket.blocks(missing, once)
        ]

    def _flat_step(self) -> FlatStep | None:
        """The flat step, or None if this step cannot be flat. Rebuilt when buckets or parameter groups have changed.

        The first step is flat, too; otherwise a resumed run would differ from an uninterrupted one in the last bit.
        """
        # Parameters may be added to the optimizer between steps if the model had them at initialize(): their gradients are
        # reduced in that case, and in no other.
        sizes = _sizes(self._optimizer)
        if sizes != self._sizes:
            self._sizes = sizes
            known = self._known.union(id(member) for bucket in self._buckets for member in bucket.members)
            for at, group in enumerate(self._optimizer.param_groups):
                for parameter in group["params"]:
                    if id(parameter) not in known:
                        model = self._model()
                        names = () if model is None else model.named_parameters()
                        name = next((name for name, other in names if other is parameter), "a parameter")
                        raise GradientError(
                            f"{name} of shape {tuple(parameter.shape)} was added to optimizer group {at} after "
                            "initialize(), but it was not a parameter of the model at initialize(). Its gradient "
                            "would not be reduced. Create the parameter before initialize(). It may be frozen first "
                            "and added to the optimizer later.",
                            code="C070",
                        )

        # A flat step updates the members of buckets only, so all gradients of the optimizer's parameters must be in buckets.
        if not self._is_flat or not self._buckets:  # all parameters of a pipeline stage may be frozen
            return None
        key = (self._made_for, self._sizes)
        if key != self._owned_key:
            self._owned = {id(parameter) for group in self._optimizer.param_groups for parameter in group["params"]}
            bucketless = self._owned.difference(id(member) for bucket in self._buckets for member in bucket.members)
            self._bucketless = [entry for entry in self._loose_entries if id(entry.tensor) in bucketless]
            self._owned_key = key
        if any(id(entry.tensor) in self._owned for entry in self._outside):
            return None
        if any(entry.tensor.requires_grad for entry in self._bucketless):
            return None  # its gradients are sparse, even if it has none in this step

        if key != self._flat_key:
            if self.flat is None:
                get_dist_logger().debug(
                    f"{type(self._optimizer).__name__} steps over flat buffers (same result, fewer kernel launches); "
                    f"set flat_step=False in the config to turn this off"
                )
            else:
                self.flat.close()
                self.flat = None  # frees its memory before the next one is allocated
            self.flat = FlatStep(self._optimizer, [bucket.flat() for bucket in self._buckets], self.captured)
            self._flat_key = key
        return self.flat

    def _where_stepped(self, number: Tensor | None, default: float) -> Tensor:
        """A number on the device of the stepped tensors, which with offloading is not the device of the norm."""
        home = next((member.device for bucket in self._buckets for member in bucket.members), torch.device("cpu"))
        return numbers_on((default,), torch.float32, home).view(()) if number is None else number.to(home)


def _sizes(optimizer: Any) -> list[int]:
    return [len(group["params"]) for group in optimizer.param_groups]


# --- Buckets as the step sees them ---


class OwnedBucket(ABC):
    """The interface of a bucket for norm and step: the tensors that are stepped on (`members`), their flat gradients, and their
    replicas.

    `entries` (parameter and replica ranks) and `slots` are in the order of `members`.
    """

    scattered = False  # whether gradients may be at any address

    def __init__(self, entries: Sequence[Held], slots: Sequence[int]) -> None:
        self.entries, self.slots = entries, slots

    @property
    @abstractmethod
    def members(self) -> Sequence[Tensor]:
        """The tensors that the optimizer steps on."""

    @abstractmethod
    def take_gradients(self) -> list[int]:
        """Attach the gradients of this step to the members. Returns the indices of members without a gradient."""

    @abstractmethod
    def blocks(self, absent: Sequence[int], once: bool) -> list[GradientBlock]:
        """The blocks that this rank measures for the norm, without the members at the indices `absent`.

        `once`: the blocks are read only in this step, by any reader.
        """

    @abstractmethod
    def flat(self) -> FlatBucket:
        """The bucket in the form that `FlatStep` takes."""


class ReplicatedBucket(OwnedBucket):
    """A bucket of plain data parallelism. Every rank steps on all its parameters, which are the members.

    `measures_full_gradient`: this rank measures the full bucket, not only its slice among the replicas.
    """

    def __init__(
        self, bucket: Bucket, entries: Sequence[Held], slots: Sequence[int], measures_full_gradient: bool
    ) -> None:
        super().__init__(entries, slots)
        self._bucket, self._measures_full_gradient = bucket, measures_full_gradient

    @property
    def members(self) -> Sequence[Tensor]:
        return self._bucket.parameters

    @torch.no_grad()
    def take_gradients(self) -> list[int]:
        missing = []
        for at, (parameter, own) in enumerate(zip(self._bucket.parameters, self._bucket.grads, strict=True)):
            grad = parameter.grad
            # A gradient that was replaced (for example by a handler, on a rank without a batch) moves into the bucket. Outside of it,
            # only this rank would use the optimizer's own step, which differs in the last bits and in the scale of `.grad`.
            if grad is not None and grad is not own and _fits(grad, own):
                own.copy_(grad)
                parameter.grad = grad = own
            if grad is not own:
                missing.append(at)
        return missing

    def blocks(self, absent: Sequence[int], once: bool) -> list[GradientBlock]:
        ranks = self._bucket.sum.ranks
        return bucket_blocks(
            self._bucket.layout,
            self._bucket.gradient,
            [
                (1, 0) if self._measures_full_gradient else (entry.holding.count, entry.holding.index)
                for entry in self.entries
            ],
            self.slots,
            absent=absent,
            # Replicas outside the bucket's ranks may have other neighbours around the parameter.
            separate=[at for at, entry in enumerate(self.entries) if entry.holding.ranks != ranks],
        )

    def flat(self) -> FlatBucket:
        return FlatBucket(self._bucket.layout, self._bucket.parameters, self._bucket.gradient, self.slots)


def _fits(gradient: Tensor, place: Tensor) -> bool:
    """Whether a gradient can be copied into its place in a bucket without a conversion."""
    plain = type(gradient) is type(place) is Tensor and gradient.layout is torch.strided
    return plain and (gradient.dtype, gradient.device) == (place.dtype, place.device)


class ShardedBucket(OwnedBucket):
    """A bucket of ZeRO 1 and 2.

    This rank steps on its slice of the bucket; the members are the shards of parameters in this slice.
    """

    def __init__(self, values: BucketValues, entries: Sequence[Held], slots: Sequence[int]) -> None:
        spans = values.bucket.spans
        super().__init__([entries[span.index] for span in spans], [slots[span.index] for span in spans])
        self._values = values
        self._layout = FlatLayout(values.parts) if values.parts else None
        if self._layout is not None:
            # The offsets of the shards in the slice, which are also those in a master copy of another dtype.
            self._layout.spans = [Span(span.at, span.numel) for span in spans]
            self._layout.numel = values.bucket.used

    @property
    def members(self) -> Sequence[Tensor]:
        return self._values.parts

    def take_gradients(self) -> list[int]:
        # A shard's gradient is its range of the bucket, or None if no rank had a gradient of the parameter.
        values = self._values
        missing = []
        for place, (span, shard, grad) in enumerate(zip(values.bucket.spans, values.parts, values.grads, strict=True)):
            if span.index in values.bucket.absent:
                missing.append(place)
                shard.grad = None
            else:
                shard.grad = grad
        return missing

    def blocks(self, absent: Sequence[int], once: bool) -> list[GradientBlock]:
        assert self._layout is not None
        size = len(self._values.bucket.sum.ranks)
        # Replicas may split the parameter at other offsets, so each counts its full slice with a weight of 1 / replicas.
        holdings = [(entry.holding.count // size, None) for entry in self.entries]
        return bucket_blocks(self._layout, self._values.bucket.gradient, holdings, self.slots, absent=absent)

    def flat(self) -> FlatBucket:
        assert self._layout is not None
        return FlatBucket(
            self._layout, self._values.parts, self._values.bucket.gradient, self.slots, self._values.owned
        )


_ALIGNED = 16


class ScatteredBucket(OwnedBucket):
    """Parameters in flat memory whose gradients stay at their own addresses: no copy, and no memory for a flat gradient.

    `measures_full_gradient`: as for `ReplicatedBucket`.
    """

    scattered = True

    def __init__(self, entries: Sequence[Held], slots: Sequence[int], measures_full_gradient: bool) -> None:
        super().__init__(entries, slots)
        self._measures_full_gradient = measures_full_gradient
        self._members = [entry.tensor for entry in entries]
        self._layout = FlatLayout(self._members)
        self._gradient = ScatteredGradient(self._layout)
        self._offsets = [  # bytes before each member in a flat buffer
            (member, span.start * member.element_size())
            for member, span in zip(self._members, self._layout.spans, strict=True)
        ]

    @property
    def members(self) -> Sequence[Tensor]:
        return self._members

    def take_gradients(self) -> list[int]:
        # A kernel reads the gradients by their addresses; gradients that it could not read (strides, alignment) are copied.
        addresses, missing = [], []
        dtype, strided = self._layout.dtype, torch.strided
        for at, (member, offset) in enumerate(self._offsets):
            grad = member.grad
            if grad is None or grad.layout is not strided or grad.dtype is not dtype:
                missing.append(at)
                addresses.append(0)
                continue
            address = grad.data_ptr()
            if address % _ALIGNED or grad.stride() != member.stride():
                member.grad = grad = torch.empty_like(member).copy_(grad)
                address = grad.data_ptr()
            addresses.append(address - offset)
        self._gradient.point_to(addresses)
        return missing

    def blocks(self, absent: Sequence[int], once: bool) -> list[GradientBlock]:
        missing, found = set(absent), []
        for at, (entry, member, span) in enumerate(zip(self.entries, self._members, self._layout.spans, strict=True)):
            if at not in missing and member.grad is not None:
                count, index = (1, 0) if self._measures_full_gradient else (entry.holding.count, entry.holding.index)
                stop = padded(span.stop, self._layout.dtype)
                there = ScatteredRange(self._gradient, at, span.start, stop)
                found.append(GradientBlock(flattened(member.grad) if once else there, count, index, self.slots[at]))
        return found

    def flat(self) -> FlatBucket:
        return FlatBucket(self._layout, self._members, self._gradient, self.slots)


def scattered_buckets(entries: Sequence[Held], slots: Sequence[int], measures_full_gradient: bool) -> list[OwnedBucket]:
    """Distribute the parameters over scattered buckets, each of one dtype and device and of limited size."""
    groups: dict[tuple[torch.dtype, torch.device], list[list[int]]] = {}
    for at, entry in enumerate(entries):
        of_kind = groups.setdefault((entry.tensor.dtype, entry.tensor.device), [[]])
        *_, last = of_kind
        if last and sum(entries[i].tensor.numel() for i in last) + entry.tensor.numel() > JOINED:
            last = []
            of_kind.append(last)
        last.append(at)
    return [
        ScatteredBucket([entries[at] for at in places], [slots[at] for at in places], measures_full_gradient)
        for of_kind in groups.values()
        for places in of_kind
    ]


# --- Whether a step is flat ---


def wants_flat(parameters: Sequence[Tensor], optimizer: Any, flat: bool | None, key: str = "flat_step") -> bool:
    """Whether a flat step gives the same result as the optimizer's own step.

    Args:
        parameters: All parameters that the optimizer may step on.
        optimizer: The user's optimizer.
        flat: False turns flat steps off; True raises GradientError if a flat step is not possible.
        key: The config key that requires flat steps, for the error message.
    """
    if flat is False:
        return False
    reason = why_not(optimizer) if isinstance(optimizer, Optimizer) else "the optimizer is not a torch optimizer"
    if reason is None:
        known = {id(parameter) for parameter in parameters}
        owned = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if any(id(parameter) not in known for parameter in owned):
            reason = "the optimizer has parameters that are not in the model"
        elif any(is_dtensor(parameter) for parameter in owned):
            reason = "the optimizer has DTensor parameters"
    if reason is not None and flat:
        raise GradientError(
            f"{key}=True is not available here: {reason}. Remove it, or use a plain AdamW, Adam or SGD.", code="C070"
        )
    return reason is None


def can_scatter(parameter: Tensor, planned_on: str | None = None) -> bool:
    """Whether the kernels can read the parameter's gradient at any address.

    `planned_on`: for a simulated run, the device type of the machine that is planned for.
    """
    has_kernels = planned_on == "cuda" if planned_on is not None else parameter.is_cuda and kernels_available()
    return has_kernels and parameter.dtype in (torch.float32, *HALVES) and not is_dtensor(parameter)


# --- The optimizer's own step, with the division inside where it can be ---
#
# Optimizers built with `fused=True` divide the gradient by their attribute `grad_scale` and do nothing if their attribute
# `found_inf` is 1. All others need one foreach division, and a decision on the host whether to step.


ATTRIBUTES = ("grad_scale", "found_inf")
DOUBLES = (torch.float64, torch.complex128)


class ScaledStep:
    """Runs `optimizer.step()` on the gradient divided by `divisor`, or skips it if `found_inf` is 1.

    After the step the gradients hold the divided values, as torch's fused kernels leave them, so a second step on the same
    gradients would divide twice. An optimizer that is not fused cannot skip a step on the device: then `found_inf` is read on
    the host, which on CUDA waits for the norm.

    `slot_of` has the index of each parameter's divisor, if there are several divisors; by default 0.
    """

    def __init__(self, optimizer: Optimizer, slot_of: Mapping[Tensor, int] | None = None) -> None:
        self.optimizer = optimizer
        self._slot_of = dict(slot_of or {})

    @property
    def waits_for_device(self) -> bool:
        """Whether the host must read `found_inf` to skip a step, and so wait for the device."""
        return not _skips_on_device(self.optimizer)

    @torch.no_grad()
    def step(self, divisor: Tensor, found_inf: Tensor | None = None) -> None:
        """Run one step. Without `found_inf` the step is never skipped, and nothing is read on the host."""
        optimizer = self.optimizer
        if not _skips_on_device(optimizer):
            if found_inf is None or not found_inf.item():
                self._divide(divisor)
                optimizer.step()
            return

        # A skipped first step would leave torch's own momentum buffers of SGD uninitialised, so they start as zeros. Without
        # dampening (with it, steps are not skipped on the device) a first step from zeros equals torch's first step.
        for group in optimizer.param_groups if isinstance(optimizer, SGD) else ():
            for param in group["params"]:
                state = optimizer.state[param] if group["momentum"] and param.grad is not None else None
                if state is not None and state.get("momentum_buffer") is None:
                    state["momentum_buffer"] = torch.zeros_like(param, memory_format=torch.preserve_format)

        # `grad_scale` is one fp32 number. Several divisors, or fp64 parameters, need a division beforehand.
        inside = divisor.numel() == 1 and not any(p.dtype in DOUBLES for p in _params(optimizer))
        if not inside:
            self._divide(divisor)

        # A loss scaler may have set both attributes already: they are combined for this step, and restored afterwards.
        before = {name: getattr(optimizer, name) for name in ATTRIBUTES if hasattr(optimizer, name)}
        scale, flag = before.get("grad_scale"), before.get("found_inf")
        if inside:
            divisor = divisor.reshape(()).float()
            scale = divisor if scale is None else scale * divisor
        if found_inf is not None:
            found_inf = found_inf.reshape(()).float()
            flag = found_inf if flag is None else torch.maximum(flag, found_inf)
        optimizer.grad_scale, optimizer.found_inf = scale, flag  # type: ignore[attr-defined]
        try:
            optimizer.step()
        finally:
            for name in ATTRIBUTES:
                if name in before:
                    setattr(optimizer, name, before[name])
                else:
                    delattr(optimizer, name)

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
    """Multiply or divide gradients by a factor, in place, with few launches."""
    alike: dict[tuple[torch.device, torch.dtype, torch.layout], list[Tensor]] = {}
    for grad in map(local_part, gradients):
        wide = torch.float64 if grad.dtype in DOUBLES else torch.float32
        alike.setdefault((grad.device, wide, grad.layout), []).append(grad)
    for (device, wide, layout), grads in alike.items():
        by = factor.to(device, wide, non_blocking=True) if isinstance(factor, Tensor) else factor
        # A list of sparse gradients has no foreach kernel.
        for some in [grads] if layout is torch.strided else [[grad] for grad in grads]:
            (torch._foreach_div_ if divide else torch._foreach_mul_)(some, by)


def _params(optimizer: Optimizer) -> Iterator[Tensor]:
    return (param for group in optimizer.param_groups for param in group["params"])


def _skips_on_device(optimizer: Optimizer) -> bool:
    """Whether the step supports `grad_scale` and `found_inf`; other optimizers raise or, worse, ignore them."""
    supports = getattr(optimizer, "_step_supports_amp_scaling", False)
    damped = isinstance(optimizer, SGD) and any(
        group["momentum"] and group["dampening"] for group in optimizer.param_groups
    )
    return supports and not damped and all(group.get("fused") for group in optimizer.param_groups)
