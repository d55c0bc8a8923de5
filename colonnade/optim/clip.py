"""Gradient clipping: the divisor of a step from its norms, and clipping functions for parameters with any placement.

In an engine clipping is a decision, not a pass over the gradients. `colonnade.optim.norm` computes the global norms, `ClipPolicy`
turns them into one divisor per slot and a flag that skips the step, and the optimizer divides inside its step. All of these are
device tensors with the same bits on every rank, so ranks need no further agreement and the host never waits for a value.

The settings are `config.settings.ClipSettings`; `ClipPolicy.from_settings` is the one place that interprets them for a run. The
limit itself comes from a clip method (`colonnade.optim.clip_method`). The rest of this file needs neither engine nor config:
`clip_grad_norm_`, `grad_norm`, `clip_values_`, `clip_units_`.
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

from colonnade.comm.host_copy import HOST_COPY_DELAY, HostCopy
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
    """The treatment of one step's gradient, as device tensors with the same bits on every rank.

    `norm` is the total norm before clipping (NaN or inf if the gradient was not finite), `divisor` has one number per slot,
    and `found_inf` is exactly 1.0 (skip the step) or 0.0. `nonfinite` is true for a non-finite gradient, which is one of the
    reasons to skip.
    """

    norm: Tensor
    divisor: Tensor
    found_inf: Tensor
    norms: Norms
    nonfinite: Tensor


class ClipPolicy:
    """Applies a clip method to the total norm, and the limits of groups that have their own.

    Args:
        method: Computes the divisor for all groups without a limit of their own.
        groups: The clip groups.
        group_of: The index of the group of every slot.
        names: Names of the slots, for messages.
        nonfinite: "skip" a step with a non-finite gradient, skip it and "raise" at the next step, or "propagate" it.
        per_slot: Clip every slot by its own norm instead of the total norm.
    """

    def __init__(
        self,
        method: ClipMethod,
        groups: Sequence[ClipGroup] = (ClipGroup("all"),),
        group_of: Sequence[int] = (0,),
        *,
        names: Sequence[str] | None = None,
        nonfinite: NonFinite = "skip",
        per_slot: bool = False,
    ) -> None:
        known = get_args(NonFinite)
        if nonfinite not in known:
            raise ConfigError(
                f"nonfinite is one of {listed(known)}, not {nonfinite!r}.{did_you_mean(nonfinite, known)}", code="C003"
            )
        repeated = sorted({group.name for group in groups if [g.name for g in groups].count(group.name) > 1})
        if repeated:
            raise ConfigError(f"clip groups need different names; used more than once: {listed(repeated)}", code="C003")
        if not group_of or not all(0 <= index < len(groups) for index in group_of):
            raise ConfigError(
                f"the group of a slot must be from 0 to {len(groups) - 1}, got {list(group_of)}", code="C003"
            )
        if names is not None and len(names) != len(group_of):
            raise ConfigError(f"{len(group_of)} slots need as many names, got {len(names)}", code="C003")
        self.method = method
        self.groups = tuple(groups)
        self.group_of = tuple(group_of)
        self.names = tuple(names or (groups[index].name for index in group_of))
        self.nonfinite, self.per_slot = nonfinite, per_slot
        self._masks = _Masks(self.groups, self.group_of)
        self._reports: deque[HostCopy] = deque()

    @classmethod
    def from_settings(cls, settings: ClipSettings, group_of: Sequence[int], names: Sequence[str]) -> ClipPolicy:
        """The policy of a config, for slots with these groups and names."""
        method = CLIP_METHOD.get_module(settings.method)
        per_slot = settings.per != "group"
        if per_slot and not getattr(method, "by_slot", False):
            raise ConfigError(
                f"clip_grad_norm: method {settings.method!r} has a single limit for the total norm and cannot clip per "
                f"{settings.per}. Use report={settings.per!r} instead of per to get the norm of each {settings.per}, or the "
                f"method 'norm' or 'adagc', which limit each norm separately",
                code="C003",
            )
        try:
            made = method(**settings.method_options)
        except (TypeError, OverflowError) as error:
            raise ConfigError(
                f"clip_grad_norm: method {settings.method!r} does not accept these options: {error}", code="C003"
            ) from error
        return cls(made, settings.clip_groups(), group_of, names=names, nonfinite=settings.nonfinite, per_slot=per_slot)

    @property
    def slots(self) -> int:
        """The number of slots."""
        return len(self.group_of)

    def decide(self, norms: Norms) -> Decision:
        """Decide on one step. With "raise", first raises for an earlier step that was not finite."""
        if self.nonfinite == "raise":
            self.raise_pending()

        # The total norm is over the counted slots only, but a non-finite gradient in any slot makes the step bad: the optimizer
        # would write it into weights, whether their slot is counted or not.
        masks = self._masks.to(norms.sums.device)
        total = norms.total(masks.counted)
        bad = (norms.nonfinite.view(()) if self.slots == 1 else norms.nonfinite.sum()) > 0
        limited = self.method(Measured(total, norms, bad, self.per_slot))

        # One divisor per slot. A group with its own limit is divided by its own norm, and a group that is not clipped by 1;
        # all others use the method's divisor. Without such groups there is nothing to select, which saves the launches.
        divisor = limited.divisor.expand(self.slots) if limited.divisor.dim() == 0 else limited.divisor
        if not masks.plain:
            by_group = divisor_to(norms.over(masks.members), masks.limits)
            divisor = torch.where(masks.own, by_group[masks.group_of], divisor)
            divisor = torch.where(masks.clipped, divisor, 1.0)

        # "propagate" lets non-finite gradients through on purpose; the method may skip a step for reasons of its own.
        drop = bad if self.nonfinite != "propagate" else None
        if limited.skip is not None:
            drop = limited.skip if drop is None else drop | limited.skip
        found_inf = total.new_zeros((), dtype=torch.float32) if drop is None else drop.float()
        if self.nonfinite == "raise":
            self._reports.append(HostCopy(norms.nonfinite))
        return Decision(total, divisor, found_inf, norms, bad)

    def raise_pending(self) -> None:
        """With "raise": raise for a non-finite gradient of the previous step, on a GPU of the step before that.

        The delay lets the host run ahead of the device, and all ranks raise at the same step. The bad step itself was
        skipped on every rank.
        """
        slots: list[int] = []
        while self._reports and not slots and (self._reports[0].on_host or len(self._reports) >= HOST_COPY_DELAY):
            slots = [slot for slot, count in enumerate(self._reports.popleft().read()) if count > 0]
        if slots:
            self._reports.clear()
            names = listed(self.names[slot] for slot in slots)
            raise GradientError(
                f"the gradient of an earlier step was not finite, in: {names}. The step was skipped. "
                "Lower the learning rate or inspect its batch; nonfinite='skip' continues without an error.",
                code="C048",
            )

    def state_dict(self) -> dict[str, Any]:
        """The history of the clip method, for a checkpoint."""
        return {"method": type(self.method).__name__, "state": self.method.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a history saved by the same method."""
        if state["method"] != type(self.method).__name__:
            raise CheckpointError(
                f"the clip state was saved by {state['method']}, but this run clips with {type(self.method).__name__}; "
                "use the same clip method, or omit the clip state to start with an empty history",
                code="C083",
            )
        self.method.load_state_dict(state["state"])


class _Masks:
    """Constant masks over slots and groups; they move to the device of the norms at the first step."""

    def __init__(self, groups: Sequence[ClipGroup], group_of: Sequence[int]) -> None:
        self.plain = all(group == ClipGroup(group.name) for group in groups)
        """Whether every group is counted, clipped and without its own limit."""
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
        """Move the masks to a device, in place and without waiting for it."""
        if self.own.device != device:
            for name, value in list(vars(self).items()):
                if isinstance(value, Tensor):
                    setattr(self, name, to_device(value, device))
        return self


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
    """Clip gradients in place to a total norm of `max_norm`; a drop-in for `torch.nn.utils.clip_grad_norm_`.

    In a launched context every element of the model's gradient counts once, whatever its placement. DTensors may be on
    different meshes and mixed with plain tensors. Without a launched context, plain tensors are clipped on this rank only, as
    torch does.

    Without a context, ranks outside a DTensor's mesh must hold replicas of it. If they do not (pipeline stages), the norm is
    NaN, and `error_if_nonfinite` raises an error that gives the reason.

    Collective over the world, in a launched context or with DTensors.

    Args:
        parameters: Parameters whose `.grad` is clipped; those without a gradient are ignored.
        max_norm: The largest total norm.
        norm_type: The order p of the norm, up to 32 or inf.
        error_if_nonfinite: Raise on every rank if the norm is NaN or inf; waits for the device.
        foreach: Ignored; accepted for compatibility with torch.
        context: The parallel context; by default the one that was launched.

    Returns:
        The total norm before clipping, as a plain tensor.

    Example::

        gpc = colonnade.launch({})
        model = nn.Linear(4, 2)
        model(torch.ones(8, 4)).sum().backward()
        norm = colonnade.clip_grad_norm_(model.parameters(), max_norm=1.0)
    """
    tensors = _as_list(parameters)
    limit = positive("max_norm", float(max_norm)) if max_norm else 0.0
    norm = grad_norm(tensors, norm_type, error_if_nonfinite=error_if_nonfinite, context=context)
    divisor = divisor_to(norm, limit)  # inf for a limit of 0
    scale_all([parameter.grad for parameter in tensors if parameter.grad is not None], divisor, divide=True)
    return norm


@torch.no_grad()
def grad_norm(
    parameters: Parameters,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    *,
    context: ParallelContext | None = None,
) -> Tensor:
    """The total norm of the gradients of all ranks, with the same bits on every rank; at most one collective.

    Arguments and ranks that must call it: see `clip_grad_norm_`.
    """
    tensors = _as_list(parameters)
    norm_type = check_order(norm_type)
    context = _context(context)
    # Plain tensors without a launched context concern this process only, as in torch. One DTensor involves the whole world.
    shared = context is not None or any(is_dtensor(parameter) for parameter in tensors)

    # Each element must count once in the world, so every gradient needs its number of replicas: from the layout if there is
    # a context, else from the meshes of DTensors, else 1.
    known: dict[Placement, Holding] = {}
    blocks: list[GradientBlock] = []
    for parameter in tensors:
        if parameter.grad is None:
            continue
        # A DTensor's gradient need not have the placement of its parameter.
        placed: Any = parameter.grad if is_dtensor(parameter.grad) else parameter
        if is_dtensor(parameter.grad) and any(spec.is_partial() for spec in placed.placements):
            raise GradientError(
                f"a gradient has placements {placed.placements}: a reduction is still pending (Partial), so it has no norm. "
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
            count, index = _replicas_by_mesh(placed), None
        blocks.append(GradientBlock(local_part(parameter.grad), count, index))
    vector, replicated = powsums(blocks, norm_type, device=_device(tensors, context)), None

    # Meshes alone cannot tell replicas from pipeline stages, which have meshes of the same shape and other parameters. So
    # every rank sends its mesh coordinates and its own sum in the same collective: equal coordinates must have equal sums.
    local_sum, _ = vector
    evidence = _coordinates_and_sum(tensors, local_sum) if shared and context is None else vector[:0]
    vector = torch.cat([vector, evidence])
    norms = reduce_norms(vector, norm_type, piggybacked=len(evidence), whole=not shared)
    total = norms.total()
    if len(evidence):
        replicated = _are_replicas(vector[-len(evidence) :])
        total = torch.where(replicated, total, torch.nan)

    if error_if_nonfinite and not bool(torch.isfinite(total)):
        if replicated is not None and not bool(replicated):
            raise GradientError(
                "ranks with the same coordinates on their DTensors' meshes hold different gradients: they are pipeline stages, "
                "or gradients are not averaged yet. Average gradients first; for a pipeline pass context=, a launched "
                "context, which knows the stages",
                code="C047",
            )
        raise GradientError(
            f"the total norm of order {norm_type} is {total.item()}, so the gradients cannot be clipped; "
            f"error_if_nonfinite=False continues regardless",
            code="C048",
        )
    return total


def _replicas_by_mesh(placed: Any) -> int:
    """The number of replicas without a context: world size / shards for a DTensor, the world size for a plain tensor."""
    world = dist.get_world_size()
    if not is_dtensor(placed):
        return world
    sizes = placed.device_mesh.shape
    # Not `is_shard()`: that is False for the strided shards of FSDP over tensor parallelism.
    shards = prod(size for size, spec in zip(sizes, placed.placements, strict=True) if not spec.is_replicate())
    return world // shards


def _coordinates_and_sum(tensors: list[Tensor], local_sum: Tensor) -> Tensor:
    """A vector of 2 x world numbers: this rank's mesh coordinates as a checksum, and its sum of powers.

    Other ranks' entries are zero, so that a sum over ranks gathers them. All entries are zero if every mesh is the world.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    gradients: list[Any] = [parameter.grad for parameter in tensors if parameter.grad is not None]
    evidence = local_sum.new_zeros(2, world)
    if any(is_dtensor(gradient) and gradient.device_mesh.size() < world for gradient in gradients):
        places = [gradient.device_mesh.get_coordinate() if is_dtensor(gradient) else None for gradient in gradients]
        mark = 1 + crc32(repr(places).encode())  # never 0
        evidence[0, rank], evidence[1, rank] = mark, local_sum
    return evidence.flatten()


def _are_replicas(evidence: Tensor) -> Tensor:
    """Whether ranks with equal mesh coordinates have equal sums, as a boolean on the device."""
    places, sums = evidence.view(2, -1)
    places, order = places.sort()
    sums = sums[order]
    return ~((places[1:] == places[:-1]) & (sums[1:] != sums[:-1])).any()


def _device(tensors: list[Tensor], context: ParallelContext | None) -> torch.device | None:
    """The device of the norm's collective, which may differ from the device of some gradients."""
    if context is not None:
        return context.device
    return next((parameter.device for parameter in tensors if parameter.device.type != "cpu"), None)


def _context(context: ParallelContext | None) -> ParallelContext | None:
    """The launched context that is given, or the global one; None if it is not launched."""
    if context is None:
        from colonnade.core import global_context

        context = global_context
    return context if context.is_launched else None


def _as_list(parameters: Parameters) -> list[Tensor]:
    """The distinct parameters, as a list: a generator would be exhausted by the norm, and nothing would be clipped."""
    tensors = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    return list({id(parameter): parameter for parameter in tensors}.values())


@torch.no_grad()
def clip_values_(grads: Iterable[Tensor], limit: float) -> None:
    """Clamp every element to [-limit, limit], in place. Needs no communication, whatever the placement."""
    bound = positive("the limit of a value clip", limit)
    tensors = [grad for grad in grads if grad.numel()]
    if any(grad.is_complex() for grad in tensors):
        raise GradientError("clip_values_ needs real gradients; clip complex gradients by their norm")
    if tensors:
        torch._foreach_clamp_min_(tensors, -bound)
        torch._foreach_clamp_max_(tensors, bound)


@dataclass(frozen=True)
class UnitBlock:
    """A local parameter and its gradient. Its units are the rows (dimension 0), or a vector as a whole.

    `group` has the ranks that hold the other shards of the same units: the ranks over which a dimension other than the first
    is sharded, or any dimension of a vector. None if no unit is sharded.
    """

    param: Tensor
    grad: Tensor
    group: dist.ProcessGroup | None = None


@torch.no_grad()
def clip_units_(blocks: Sequence[UnitBlock], factor: float = 0.01, eps: float = 1e-3) -> None:
    """Adaptive gradient clipping (arXiv 2102.06171): clip every unit's gradient norm to `factor` x its weight norm.

    Weight norms count as at least `eps`. Collective over every group in `blocks`, one all-reduce each: all ranks of a group
    pass its blocks in the same order, including blocks of which they hold no element.
    """
    positive("the factor of a unit clip", factor)
    positive("eps of a unit clip", eps)
    by_group: dict[dist.ProcessGroup | None, list[UnitBlock]] = {}
    for block in blocks:
        by_group.setdefault(block.group, []).append(block)
    for group, members in by_group.items():
        # The squared norms of all units of all blocks make one vector: weight, gradient, weight, gradient ...
        tensors = [tensor for block in members for tensor in (block.param, block.grad)]
        squares: list[Tensor] = []
        for tensor in tensors:
            rows = tensor.flatten(1) if tensor.dim() > 1 else tensor.reshape(1, -1)
            wide = torch.float64 if tensor.dtype in (torch.float64, torch.complex128) else torch.float32
            rows = rows.abs() if rows.is_complex() else rows
            squares.append(torch.linalg.vector_norm(rows, dim=1, dtype=wide).square())
        summed = torch.cat(squares)
        if group is not None:
            dist.all_reduce(summed, group=group)
        norms = iter(summed.sqrt().split([len(rows) for rows in squares]))
        for block in members:
            weight, grad = next(norms), next(norms)
            limit = weight.clamp(min=eps) * factor
            scale = torch.fmin(limit / grad, torch.ones_like(grad))  # 1 where a norm is NaN
            block.grad.mul_(scale.view(-1, *[1] * (block.grad.dim() - 1)) if block.grad.dim() else scale.view(()))
