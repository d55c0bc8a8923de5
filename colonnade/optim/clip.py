"""Clipping: how the divisor of a step is decided from its norms, and torch's clipping functions for any placement.

In an engine a clip is a decision and no pass of its own. `colonnade.optim.norm` gives the norms of the world, `ClipPolicy`
turns them into a divisor for every slot and a flag that drops the step, and the optimizer divides as it steps. All of it
are device tensors, the same bits on every rank: no rank asks another, and the host never waits for a value.

The settings are `config.settings.ClipSettings`. The file has, in this order: the decision (`Decision`, `ClipPolicy`); the clip
method that the settings name (`build_clip_method`); and the functions that need no engine (`clip_grad_norm_`, `grad_norm`, `clip_values_`, `clip_units_`).
How the limit itself is found is a clip method: `colonnade.optim.clip_method`, `colonnade.optim.clip_history`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, get_args
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from colonnade.comm.host_copy import STEPS_LATE, HostCopy
from colonnade.config.settings import ClipGroup, ClipSettings, NonFinite, positive
from colonnade.context.parallel_context import ParallelContext
from colonnade.errors import CheckpointError, ConfigError, GradientError, did_you_mean, listed
from colonnade.optim.bucket_step import scale_all
from colonnade.optim.clip_method import CLIP_METHOD, ClipMethod, Measured, divisor_to
from colonnade.optim.norm import GradientBlock, Norms, check_order, powsums, reduce_norms, to_device
from colonnade.parallel.demand import Holding, holding
from colonnade.parallel.dtensor import effective_placement, local_part
from colonnade.parallel.placement import Placement, is_dtensor

# --- The decision of one step ---


@dataclass(frozen=True)
class Decision:
    """What to do with this step's gradient; device tensors only, the same bits on every rank.

    `norm` is the total norm before clipping (NaN or inf when it was); `divisor` has one number per slot;
    `found_inf` is exactly 1.0 (drop the step) or 0.0; `nonfinite` says whether a gradient was not finite, which is one
    reason to drop it.
    """

    norm: Tensor
    divisor: Tensor
    found_inf: Tensor
    norms: Norms
    nonfinite: Tensor


class ClipPolicy:
    """Applies a clip method to the counted groups, and the groups' own limits.

    `group_of` gives the group of every slot; `names` names the slots in messages. A non-finite gradient is
    dropped ("skip"), dropped and reported by an error at the next step ("raise"), or used ("propagate").
    `each`: every slot is clipped by its own norm.
    """

    def __init__(
        self,
        method: ClipMethod,
        groups: Sequence[ClipGroup] = (ClipGroup("all"),),
        group_of: Sequence[int] = (0,),
        *,
        names: Sequence[str] | None = None,
        nonfinite: NonFinite = "skip",
        each: bool = False,
    ) -> None:
        known = get_args(NonFinite)
        if nonfinite not in known:
            raise ConfigError(
                f"nonfinite is one of {listed(known)}, not {nonfinite!r}.{did_you_mean(nonfinite, known)}", code="C003"
            )
        doubled = sorted({group.name for group in groups if [g.name for g in groups].count(group.name) > 1})
        if doubled:
            raise ConfigError(f"clip groups need different names; twice or more: {listed(doubled)}", code="C003")
        if not group_of or not all(0 <= index < len(groups) for index in group_of):
            raise ConfigError(
                f"every slot needs a group from 0 to {len(groups) - 1}, met {list(group_of)}", code="C003"
            )
        if names is not None and len(names) != len(group_of):
            raise ConfigError(f"{len(group_of)} slots need as many names, met {len(names)}", code="C003")
        self.method = method
        self.groups = tuple(groups)
        self.group_of = tuple(group_of)
        self.names = tuple(names or (groups[index].name for index in group_of))
        self.nonfinite, self.each = nonfinite, each
        self._masks = _Masks(self.groups, self.group_of)
        self._reports: deque[HostCopy] = deque()

    @property
    def slots(self) -> int:
        """How many slots the policy expects."""
        return len(self.group_of)

    def decide(self, norms: Norms) -> Decision:
        """The decision for one step. With "raise", reports the step before it if that was not finite."""
        if self.nonfinite == "raise":
            self.raise_pending()

        # The total norm is of the counted slots, but a gradient that is not finite in any slot makes the step bad: the
        # optimizer would write it into the weights of slots that are not counted as well.
        masks = self._masks.to(norms.sums.device)
        total = norms.total(masks.counted)
        bad = (norms.nonfinite.view(()) if self.slots == 1 else norms.nonfinite.sum()) > 0
        limited = self.method(Measured(total, norms, bad, self.each))

        # One divisor per slot: the method's, then for groups with a limit of their own that of their own norm, and 1 for
        # groups that are not clipped. Without such groups there is nothing to choose between, and nothing is launched.
        divisor = limited.divisor.expand(self.slots) if limited.divisor.dim() == 0 else limited.divisor
        if not masks.plain:
            by_group = divisor_to(norms.over(masks.members), masks.limits)
            divisor = torch.where(masks.own, by_group[masks.group_of], divisor)
            divisor = torch.where(masks.clipped, divisor, 1.0)

        # The step is dropped for a bad gradient, unless the user wants to see what it does, and when the method says so.
        drop = bad if self.nonfinite != "propagate" else None
        if limited.skip is not None:
            drop = limited.skip if drop is None else drop | limited.skip
        found_inf = total.new_zeros((), dtype=torch.float32) if drop is None else drop.float()
        if self.nonfinite == "raise":
            self._reports.append(HostCopy(norms.nonfinite))
        return Decision(total, divisor, found_inf, norms, bad)

    def raise_pending(self) -> None:
        """With "raise": report non-finite gradients of the step before; on a device, of the second step before.

        So all ranks raise at the same step, and hardly wait; the step itself was dropped, on every rank.
        """
        slots: list[int] = []
        while self._reports and not slots and (self._reports[0].on_host or len(self._reports) >= STEPS_LATE):
            slots = [slot for slot, count in enumerate(self._reports.popleft().read()) if count > 0]
        if slots:
            self._reports.clear()
            names = listed(self.names[slot] for slot in slots)
            raise GradientError(
                f"the gradient of an earlier step was not finite, in: {names}. The step was dropped. "
                "Lower the learning rate or look at its batch; nonfinite='skip' goes on without an error.",
                code="C048",
            )

    def state_dict(self) -> dict[str, Any]:
        """The history of the clip method."""
        return {"method": type(self.method).__name__, "state": self.method.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a history saved by the same method."""
        if state["method"] != type(self.method).__name__:
            raise CheckpointError(
                f"the clip state is of {state['method']}, this run clips with {type(self.method).__name__}; "
                "use the same clip method, or leave the clip state out to start its history anew",
                code="C083",
            )
        self.method.load_state_dict(state["state"])


class _Masks:
    """Constant masks over slots and groups, kept on the device of the norms."""

    def __init__(self, groups: Sequence[ClipGroup], group_of: Sequence[int]) -> None:
        self.plain = all(group == ClipGroup(group.name) for group in groups)
        """Whether all groups are counted, clipped and without a limit of their own."""
        self.group_of = torch.tensor(group_of, device="cpu")
        of = [groups[index] for index in group_of]
        self._counted = torch.tensor([group.counted for group in of], device="cpu")
        self.clipped = torch.tensor([group.clipped for group in of], device="cpu")
        self.own = torch.tensor([group.max_norm is not None for group in of], device="cpu")
        limits = [group.max_norm or 1.0 for group in groups]
        self.limits = torch.tensor(limits, dtype=torch.float64, device="cpu")
        self.members = torch.tensor(
            [[index == place for index in group_of] for place in range(len(groups))], device="cpu"
        )

    @property
    def counted(self) -> Tensor | None:
        return None if self.plain else self._counted

    def to(self, device: torch.device) -> _Masks:
        """Move the masks to a device, in place; a copy to the device that the host does not wait for."""
        if self.own.device != device:
            for name, value in list(vars(self).items()):
                if isinstance(value, Tensor):
                    setattr(self, name, to_device(value, device))
        return self


# --- The clip method of a config ---


def build_clip_method(settings: ClipSettings) -> ClipMethod:
    """The clip method of a config, by its registered name."""
    method = CLIP_METHOD.get_module(settings.method)
    if settings.per != "group" and not getattr(method, "by_slot", False):
        raise ConfigError(
            f"clip_grad_norm: method {settings.method!r} finds one limit for the total norm, so nothing is clipped per "
            f"{settings.per}. Write report={settings.per!r} for the norm of each {settings.per}, and leave per out; or take the "
            f"method 'norm', or 'adagc', which limit each by its own norm",
            code="C003",
        )
    try:
        return method(**settings.method_options)
    except (TypeError, OverflowError) as error:
        raise ConfigError(
            f"clip_grad_norm: method {settings.method!r} takes no such options: {error}", code="C003"
        ) from error


# --- Functions that need no engine and no config ---


Parameters = Tensor | Iterable[Tensor]


@torch.no_grad()
def clip_grad_norm_(
    parameters: Parameters,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    context: ParallelContext | None = None,
) -> Tensor:
    """Clip the gradients to a total norm of `max_norm`, in place; returns the norm before it, as a plain tensor.

    In a launched context every element of the model's gradient counts once, whatever its placement, and
    every rank must call it. DTensors may lie on any meshes and be mixed with plain tensors. Without a
    context plain tensors are clipped as torch's function does, on this rank alone. Beside DTensors every rank must call it
    all the same, and ranks outside a DTensor's mesh must hold copies of it: if they do not, as in a pipeline, the norm is
    NaN, and with `error_if_nonfinite` an error that says why.
    `foreach` is accepted and has no effect: there is one way here.
    """
    held = _as_list(parameters)
    limit = positive("max_norm", float(max_norm)) if max_norm else 0.0
    norm = grad_norm(held, norm_type, error_if_nonfinite=error_if_nonfinite, context=context)
    divisor = divisor_to(norm, limit)  # inf for a limit of 0
    scale_all([parameter.grad for parameter in held if parameter.grad is not None], divisor, divide=True)
    return norm


@torch.no_grad()
def grad_norm(
    parameters: Parameters,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    *,
    context: ParallelContext | None = None,
) -> Tensor:
    """The total norm of the gradients over the whole world: at most one collective, the same bits on every rank.

    `error_if_nonfinite` raises on every rank alike, which (as in torch) waits for the device.
    """
    held = _as_list(parameters)
    norm_type = check_order(norm_type)
    known = _context(context)
    # Plain tensors and no launched context are this process alone, as in torch. A DTensor makes it a matter of the world.
    shared = known is not None or any(is_dtensor(parameter) for parameter in held)
    vector, copies = powsums(_blocks(held, known, shared), norm_type, device=_device(held, known)), None

    # Without a context only the meshes say who holds copies, which a pipeline of DTensors belies: its stages have meshes of
    # the same shape and other parameters. So every rank sends its place and its own sum along, and ranks at one place
    # must have measured the same.
    measured, _ = vector
    evidence = _place_and_sum(held, measured) if shared and known is None else vector[:0]
    vector = torch.cat([vector, evidence])
    norms = reduce_norms(vector, norm_type, piggybacked=len(evidence), whole=not shared)
    total = norms.total()
    if len(evidence):
        copies = _are_copies(vector[-len(evidence) :])
        total = torch.where(copies, total, torch.nan)

    if error_if_nonfinite and not bool(torch.isfinite(total)):
        if copies is not None and not bool(copies):
            raise GradientError(
                "ranks at the same place of their DTensors' meshes hold different gradients: they are stages of a pipeline, "
                "or gradients are not averaged yet. Average them first; for a pipeline pass context=, a launched "
                "context, which knows the stages",
                code="C047",
            )
        raise GradientError(
            f"the total norm of order {norm_type} is {total.item()}, so the gradients cannot be clipped; "
            f"error_if_nonfinite=False goes on regardless",
            code="C048",
        )
    return total


def _blocks(held: list[Tensor], context: ParallelContext | None, shared: bool) -> list[GradientBlock]:
    """The gradients, each with its number of holders: by the layout, by the meshes of DTensors, or this rank alone."""
    known: dict[Placement, Holding] = {}
    blocks = []
    for parameter in held:
        if parameter.grad is None:
            continue
        # A DTensor's gradient need not be placed as the parameter is.
        placed: Any = parameter.grad if is_dtensor(parameter.grad) else parameter
        if is_dtensor(parameter.grad) and any(spec.is_partial() for spec in placed.placements):
            raise GradientError(
                f"a gradient is placed {placed.placements}: a sum is still pending on it, so it has no norm yet. "
                f"Redistribute it to Shard or Replicate first."
            )
        count: int = 1
        index: int | None = 0
        if context is not None:
            placement = effective_placement(placed, context.layout, context.get_global_rank())
            if placement not in known:
                known[placement] = holding(context.layout, placement, context.get_global_rank())
            count, index = known[placement].count, known[placement].index
        elif shared:
            count, index = _holders_by_mesh(placed), None
        blocks.append(GradientBlock(local_part(parameter.grad), count, index))
    return blocks


def _holders_by_mesh(placed: Any) -> int:
    """Without a context: a DTensor's elements are on world / shards ranks; a plain tensor is a replica on all."""
    world = dist.get_world_size()
    if not is_dtensor(placed):
        return world
    sizes = placed.device_mesh.shape
    # Not `is_shard()`: that is False for the strided shards of FSDP over tensor parallelism.
    shards = prod(size for size, spec in zip(sizes, placed.placements, strict=True) if not spec.is_replicate())
    return world // shards


def _place_and_sum(held: list[Tensor], measured: Tensor) -> Tensor:
    """This rank's place on its meshes, and its sum of the gradients of which other ranks are taken to hold copies.

    Zeros at the places of all other ranks, so that a SUM gathers; all zeros where every mesh is the whole world.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    gradients: list[Any] = [parameter.grad for parameter in held if parameter.grad is not None]
    evidence = measured.new_zeros(2, world)
    if any(is_dtensor(gradient) and gradient.device_mesh.size() < world for gradient in gradients):
        places = [gradient.device_mesh.get_coordinate() if is_dtensor(gradient) else None for gradient in gradients]
        mark = 1 + crc32(repr(places).encode())  # never 0
        evidence[0, rank], evidence[1, rank] = mark, measured
    return evidence.flatten()


def _are_copies(evidence: Tensor) -> Tensor:
    """Whether ranks at the same place of their meshes measured the same, as a boolean on the device."""
    places, measured = evidence.view(2, -1)
    places, order = places.sort()
    measured = measured[order]
    return ~((places[1:] == places[:-1]) & (measured[1:] != measured[:-1])).any()


def _device(held: list[Tensor], context: ParallelContext | None) -> torch.device | None:
    """Where the norm is joined: what the world communicates on, also when some gradients lie elsewhere."""
    if context is not None:
        return context.device
    return next((parameter.device for parameter in held if parameter.device.type != "cpu"), None)


def _context(context: ParallelContext | None) -> ParallelContext | None:
    if context is None:
        from colonnade.core import global_context  # the default where a user passes no context

        context = global_context
    return context if context.is_launched else None


def _as_list(parameters: Parameters) -> list[Tensor]:
    # A generator must not be used up by the norm: then nothing would be clipped.
    held = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    return list({id(parameter): parameter for parameter in held}.values())


@torch.no_grad()
def clip_values_(grads: Iterable[Tensor], limit: float) -> None:
    """Bring every element into [-limit, limit], in place. Needs no communication under any placement."""
    bound = positive("the limit of a value clip", limit)
    tensors = [grad for grad in grads if grad.numel()]
    if any(grad.is_complex() for grad in tensors):
        raise GradientError("a value clip takes real gradients; clip complex ones by their norm")
    if tensors:
        torch._foreach_clamp_min_(tensors, -bound)
        torch._foreach_clamp_max_(tensors, bound)


@dataclass(frozen=True)
class UnitBlock:
    """A local parameter and gradient whose units are its rows (dimension 0), or the whole of a vector.

    `group` has the ranks that hold the other parts of the same units: those over which a dimension other than
    the first is sharded, or any dimension of a vector. None when every unit is whole here.
    """

    param: Tensor
    grad: Tensor
    group: dist.ProcessGroup | None = None


@torch.no_grad()
def clip_units_(blocks: Sequence[UnitBlock], factor: float = 0.01, eps: float = 1e-3) -> None:
    """Adaptive gradient clipping (2102.06171): no unit's gradient norm exceeds `factor` x its weight norm.

    Weight norms count as at least `eps`. One all-reduce per distinct group; every rank of a group must pass
    the blocks of that group in the same order, also those of which it holds no element.
    """
    positive("the factor of a unit clip", factor)
    positive("eps of a unit clip", eps)
    by_group: dict[dist.ProcessGroup | None, list[UnitBlock]] = {}
    for block in blocks:
        by_group.setdefault(block.group, []).append(block)
    for group, members in by_group.items():
        squares = torch.cat([_unit_squares(t) for block in members for t in (block.param, block.grad)])
        if group is not None:
            dist.all_reduce(squares, group=group)
        norms = iter(squares.sqrt().split([_units(b.grad) for b in members for _ in "wg"]))
        for block in members:
            weight, grad = next(norms), next(norms)
            limit = weight.clamp(min=eps) * factor
            scale = torch.fmin(limit / grad, torch.ones_like(grad))  # 1 where a norm is NaN
            block.grad.mul_(scale.view(-1, *[1] * (block.grad.dim() - 1)) if block.grad.dim() else scale.view(()))


def _units(tensor: Tensor) -> int:
    return tensor.shape[0] if tensor.dim() > 1 else 1


def _unit_squares(tensor: Tensor) -> Tensor:
    rows = tensor.flatten(1) if tensor.dim() > 1 else tensor.reshape(1, -1)
    wide = torch.float64 if tensor.dtype in (torch.float64, torch.complex128) else torch.float32
    return torch.linalg.vector_norm(rows.abs() if rows.is_complex() else rows, dim=1, dtype=wide).square()
