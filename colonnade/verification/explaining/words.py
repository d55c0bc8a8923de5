"""The words of `explain`: how a placement lies, why a sum is divided so, what a checkpoint keeps, groups of ranks."""

from __future__ import annotations

from colonnade.config import Config
from colonnade.context.layout import Layout
from colonnade.engine.gradient_handler.ledger import LedgerRow
from colonnade.optim.zero.settings import ZeroSettings
from colonnade.parallel.demand import holding
from colonnade.parallel.placement import Placement, Shard, Spec, Tied

Groups = tuple[tuple[int, ...], ...]
"""Sets of ranks."""

RANKS_SHOWN = 8


def lies_on(layout: Layout, placement: Placement, rank: int) -> list[str]:
    """A line for each mode that it is placed on, and each axis along which ranks hold it whole."""
    found = []
    for mode, spec in placement.modes.items():
        size = len(layout.group_of(mode, rank))
        if size > 1 or isinstance(spec, Tied):
            found.append(f"{mode.name}: {_how(spec, size)}")
    at, holders = layout.coordinates(rank), set(holding(layout, placement, rank).ranks)
    placed = {mode.name for mode in placement.modes}
    for axis in layout.axes:
        along = [layout.rank_at(**{**at, axis.name: place}) for place in range(axis.size)]
        count = len(holders.intersection(along))
        if count > 1 and axis.mode.name not in placed:
            part = "" if count == axis.size else f", each part on {count} of {axis.size} ranks"
            found.append(f"{axis.mode.name}: whole{part}")
    return found


def _how(spec: Spec, size: int) -> str:
    if isinstance(spec, Shard):
        packed = f", {len(spec.sections)} sections" if spec.sections else ""
        return f"cut along dimension {spec.dim} in {size} parts{packed}"
    if isinstance(spec, Tied):
        return f"one weight at stages {', '.join(map(str, spec.stages))} (key {spec.key!r})"
    return {
        "sum": "whole, and each rank has a part of its gradient",
        "nothing": "whole, and its gradient is final",
        "auto": "whole",
    }[spec.owes]


def why_divided(row: LedgerRow) -> str:
    """The reason of a divisor."""
    count = len(row.ranks)
    if row.divisor == 1:
        return "not divided: the ranks see the same data, and each has a part of the gradient"
    if row.divisor == count:
        return f"its {count} ranks saw distinct data"
    if count == 1:
        return f"{row.divisor:g} ranks saw distinct data; this one alone holds the part, and its gradient has what they sent it"
    return f"{row.divisor:g} ranks saw distinct data; the {count} of the sum have in their gradients what the others sent them"


def kept_of(layout: Layout, placement: Placement, rank: int) -> str:
    """What a checkpoint keeps of it."""
    cuts = [
        f"dimension {shard.dim} in {len(layout.group_of(mode, rank))}"
        for mode, shard in placement.shards.items()
        if len(layout.group_of(mode, rank)) > 1
    ]
    return f"slices of the whole tensor ({', '.join(cuts)}), each once" if cuts else "the whole tensor, once"


def notes_of(config: Config, zero: ZeroSettings) -> list[str]:
    """What the config does to all gradients."""
    found = []
    clip = config.get("clip_grad_norm")
    if isinstance(clip, dict):
        clip = clip.get("max_norm")
    if clip:
        found.append(f"clipped to a global norm of {clip:g}: one sum over the world, after all sums of gradients")
    accumulation = config.get("gradient_accumulation") or 1
    if accumulation > 1:
        found.append(
            f"each loss is divided by gradient_accumulation = {accumulation}; gradients are summed at the last pass"
        )
    schedule = config.get("schedule") if isinstance(config.get("schedule"), dict) else {}
    count = (schedule or {}).get("num_microbatches") or config.get("num_microbatches")
    if count:
        found.append(f"a step has {count} micro-batches, and their losses are averaged by count")
    if zero.stage in (1, 2):
        kept = "gradients and optimizer state" if zero.stage == 2 else "optimizer state"
        found.append(
            f"zero stage {zero.stage}: each rank of a sum keeps its slice of {kept}, steps on it and writes it to a checkpoint; "
            f"parameters are gathered after the step"
        )
    return found


def groups_text(groups: Groups, count: int | None = None) -> str:
    """Groups of ranks for people; long lists are cut."""
    shown = " ".join(_ranks_text(group) for group in groups[:4])
    left = (count or len(groups)) - min(len(groups), 4)
    return shown + (f" and {left} more groups" if left > 0 else "")


def _ranks_text(ranks: tuple[int, ...]) -> str:
    return (
        str(list(ranks))
        if len(ranks) <= RANKS_SHOWN
        else f"[{ranks[0]}, {ranks[1]}, ... {ranks[-1]}] ({len(ranks)} ranks)"
    )
