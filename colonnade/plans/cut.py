"""What styles do to a module: a parameter becomes this rank's part of it, and a forward pass another one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from colonnade.context.parallel_mode import ParallelMode
from colonnade.errors import PlacementError, listed
from colonnade.nn.layer.arrangement import Arrangement
from colonnade.nn.layer.linear import own
from colonnade.parallel.collectives import split_sizes
from colonnade.parallel.forward import override_forward
from colonnade.parallel.meta import keep_start
from colonnade.parallel.placement import Replicate, Shard, Spec, place, placement_of
from colonnade.parallel.shards import section_runs
from colonnade.plans.match import Target


def cut(
    target: Target,
    name: str,
    dim: int,
    *,
    mode: ParallelMode = ParallelMode.TENSOR,
    sections: Sequence[int] = (),
    uneven: bool = False,
) -> nn.Parameter:
    """Replace the parameter `name` of the target's module by this rank's part of it along `dim`, placed so.

    `sections` are the lengths of several weights that lie one after another along `dim`; each is cut. One that lies on
    another mode already, along another dimension, is cut further. Two layers that share a parameter share its part, and
    must cut it alike.
    """
    whole: Any = getattr(target.module, name)
    part = target.parts.get(whole)
    spec = Shard(dim % whole.dim(), sections=tuple(sections) if len(sections) > 1 else ())
    if part is None:
        before = placement_of(whole)
        if mode in before.modes or any(shard.dim == spec.dim for shard in before.shards.values()):
            raise PlacementError(
                f"the plan cuts {target.name!r}, whose {name!r} is placed already ({before}); let one pattern "
                f"name it, and parallelize a model once",
                code="C060",
            )
        block = _block(whole, spec, target, name, mode, uneven)
        part = own(block, {mode: spec, **before.modes}, before.shape or tuple(whole.shape), whole)
        keep_start(part, whole)
        target.parts[whole] = part
    elif placement_of(part).shards != {mode: spec}:
        raise PlacementError(
            f"{target.name!r} shares {name!r} with another layer, where the plan cuts it otherwise: {placement_of(part)} "
            f"there, {spec} on {mode} here. Give both styles that cut it alike, or untie them before",
            code="C060",
        )
    setattr(target.module, name, part)
    return part


def replicate(target: Target, name: str, owes: bool) -> None:
    """Say that every rank holds the whole parameter; `owes`: each sees a share of the work, so gradients are summed."""
    spec: Spec = Replicate(owes="sum") if owes else Replicate()
    parameter: Any = getattr(target.module, name)
    before = placement_of(parameter)
    if before.shards:
        raise PlacementError(
            f"the plan keeps {target.name!r} whole, but cuts its {name!r} elsewhere: {before}", code="C060"
        )
    place(parameter, {**before.modes, ParallelMode.TENSOR: spec}, before.shape)


def set_forward(target: Target, forward: Callable[..., Any], here: Arrangement | None = None) -> None:
    """Give the target's module another forward pass: a function of the module, its forward pass so far, and the arguments."""
    if here is not None:
        target.module.arrangement = here  # type: ignore[assignment]
    override_forward(target.module, forward)


def sections_of(target: Target, length: int, default: int = 1) -> tuple[int, ...]:
    """The lengths of the weights that are packed along a dimension: as the plan has them, else `default` equal ones."""
    wanted = target.options.get("sections", default)
    found = (length // wanted,) * wanted if isinstance(wanted, int) and length % wanted == 0 else wanted
    if isinstance(found, int) or sum(found) != length:
        raise PlacementError(
            f"{target.name!r}: {length} features cannot be the sections {wanted} of the plan; give 'sections' as a number of "
            f"equal ones, or as their lengths, which add up to {length}",
            code="C060",
        )
    return tuple(found)


def _block(whole: Tensor, spec: Shard, target: Target, name: str, mode: ParallelMode, uneven: bool) -> Tensor:
    ranks, at = target.context.get_world_size(mode), target.context.get_local_rank(mode)
    length = whole.shape[spec.dim]
    if uneven and length >= ranks:
        sizes = split_sizes(length, mode, context=target.context)
        return whole.detach().narrow(spec.dim, sum(sizes[:at]), sizes[at])
    sections = spec.sections or (length,)
    if any(section % ranks for section in sections):
        raise PlacementError(
            f"{target.name!r}: {listed(sections)} features (dimension {spec.dim} of {name!r}, of shape "
            f"{tuple(whole.shape)}) cannot be cut evenly over the {ranks} ranks of {mode}; choose a size that {ranks} "
            f"divides, another tensor size, or leave the layer out of the plan",
            code="C032",
        )
    blocks = [whole.detach().narrow(spec.dim, *run) for run in section_runs(sections, at, ranks)]
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, spec.dim)
