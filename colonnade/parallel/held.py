"""The tensors of a model with the ranks that hold them, and the agreements of all holders before step 1.

`held_tensors` gives every parameter (and buffer) with its placement and its holders. At start-up `Placements` checks that all ranks
of a stage have the same parameters and that their placements add up, and `broadcast_shared` makes weights equal on all holders.
`checksum` and `words_of` compare tensors by their bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from colonnade.comm.messages import Alike, agreed_errors, are_same_everywhere, message_device
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.errors import PlacementError
from colonnade.parallel.demand import Holding, check_same_data, holding
from colonnade.parallel.dtensor import effective_placement, local_part
from colonnade.parallel.flat import FlatLayout
from colonnade.parallel.placement import Placement, Replicate, Shard, is_placed, logical_shape
from colonnade.texts import digest_of


@dataclass(frozen=True, eq=False)
class Held:
    """A tensor of the model with its placement and who else holds it."""

    name: str
    tensor: Tensor
    placement: Placement
    holding: Holding

    @property
    def label(self) -> str:
        """Its name on all holders: a tied one has another name at each stage."""
        return self.placement.tie_key or self.name


def held_tensors(model: nn.Module, context: ParallelContext, buffers: bool = False) -> list[Held]:
    """Every parameter (and buffer) of the model, once, with its holders."""
    layout, rank = context.layout, context.get_global_rank()
    named = [*model.named_parameters(), *(model.named_buffers() if buffers else ())]
    placed = [(name, tensor, effective_placement(tensor, layout, rank)) for name, tensor in named]
    return [Held(name, tensor, placement, holding(layout, placement, rank)) for name, tensor, placement in placed]


def whole_parameters(model: nn.Module, context: ParallelContext, mode: ParallelMode) -> dict[int, str]:
    """The parameters (name by id) that the ranks of `mode` do not share out: neither split nor owing them a sum."""
    layout, rank = context.layout, context.get_global_rank()
    ranks = set(layout.group_of(mode, rank))

    @cache
    def is_shared_out(placement: Placement) -> bool:
        """Whether it is split, or owes a sum, over ranks of which several are in this group of `mode`."""
        return any(
            len(ranks.intersection(layout.group_of(other, rank))) > 1
            for other, spec in placement.modes.items()
            if isinstance(spec, Shard) or (isinstance(spec, Replicate) and spec.owes == "sum")
        )

    return {id(held.tensor): held.name for held in held_tensors(model, context) if not is_shared_out(held.placement)}


# --------------------------------------------------------------------------------------------------
# Placements that do not add up, or are missing.
# --------------------------------------------------------------------------------------------------


_MARKS = {
    "is_tensor_parallel": (ParallelMode.TENSOR, "place(parameter, {ParallelMode.TENSOR: Shard(dim)})"),
    "pipeline_shared_module_pg": (
        ParallelMode.PIPELINE,
        "place(parameter, {ParallelMode.PIPELINE: Tied((first_stage, last_stage), 'its name')})",
    ),
    "moe_info": (ParallelMode.GLOBAL, "place(parameter, {ParallelMode.EXPERT: Shard(0)}), or use colonnade.nn.moe.MoE"),
}
"""Attributes by which Colossal-AI's layers say how a parameter lies: the mode where it matters, what to write here."""


def refuse_marks(model: nn.Module, context: ParallelContext) -> None:
    """Refuse parameters that Colossal-AI's marks say are split or shared, and that have no placement.

    They would be taken for replicas: overwritten by another rank's part, or not summed at all. The marks cannot be read
    as placements, because they do not say along which dimension, or under which name.
    """
    for name, parameter in model.named_parameters():
        for mark, (mode, write) in _MARKS.items():
            if getattr(parameter, mark, None) and context.get_world_size(mode) > 1 and not is_placed(parameter):
                raise PlacementError(
                    f"{name} is marked {mark}, which is not read here: without a placement it would be a replica on "
                    f"every rank. Write {write}.",
                    code="C031",
                )


def check_placements(model: nn.Module, context: ParallelContext) -> None:
    """Refuse, on every rank, ranks of a stage with other parameters, and placements that do not add up. Collective."""
    with agreed_errors(context.device, parts=[context.pipeline_parallel_size]) as agreement:
        placements = Placements(model, context)
        agreement.require(placements.alike())
    (counts,) = agreement.sizes
    placements.check(counts)


class Placements:
    """The parameters of a model as this rank has them; an impossible placement is said at once."""

    def __init__(self, model: nn.Module, context: ParallelContext) -> None:
        self._context, self._stage = context, context.get_local_rank(ParallelMode.PIPELINE)
        sizes = {mode: context.get_world_size(mode) for mode in context.layout.modes if context.is_initialized(mode)}
        self._held = held_tensors(model, context)
        for entry in self._held:
            check_same_data(context.layout, entry.placement, context.get_global_rank(), entry.name)
        self._shapes = [logical_shape(entry.tensor, entry.placement, sizes) for entry in self._held]

    def alike(self) -> Alike:
        """The facts that all ranks of a pipeline stage must have in common: each parameter's whole shape, dtype and kind."""
        return Alike(
            "parameter",
            {
                entry.name: f"{tuple(shape)} {entry.tensor.dtype}{'' if entry.tensor.requires_grad else ' frozen'}"
                for entry, shape in zip(self._held, self._shapes, strict=True)
            },
            "Ranks of one pipeline stage that do not have the same parameters, in the same order, cannot train together. Every "
            "rank of a stage builds the same modules. Shapes are those of the whole: where each rank holds a part, say so with "
            "place(parameter, {mode: Shard(dim)}), and give shape=<whole shape> where the parts are uneven.",
            PlacementError,
            part=self._stage,
        )

    def check(self, counts: Sequence[int]) -> None:
        """For every parameter: local elements / |H|, summed over the world, must be the whole's number of elements.

        `counts`: how many parameters each stage has. One small collective over the world. Every rank raises the same error,
        which names the parameter where this rank knows its name.
        """
        start = sum(counts[: self._stage])
        rows = torch.zeros((sum(counts), 2), dtype=torch.float64, device="cpu")
        ranks_of_stage = self._context.world_size // len(counts)
        for at, (entry, shape) in enumerate(zip(self._held, self._shapes, strict=True), start):
            # A tied parameter has a row at each of its stages, so each row holds its part of the sum.
            stages = len(entry.placement.tied.stages) if entry.placement.tied is not None else 1
            share = local_part(entry.tensor).numel() / entry.holding.count
            rows[at] = torch.tensor(
                [share * stages, math.prod(shape) / ranks_of_stage], dtype=torch.float64, device="cpu"
            )
        rows = rows.to(message_device(self._context.device))
        dist.all_reduce(rows)
        problems = []
        for at, (found, expected) in enumerate(rows.tolist()):
            here = start <= at < start + len(self._held)
            name = self._held[at - start].name if here else f"a parameter of another stage (number {at})"
            placement = self._held[at - start].placement if here else "?"
            if not math.isclose(found, expected, rel_tol=1e-6, abs_tol=1e-6):
                problems.append(f"{name}: {found:g} elements found, {expected:g} expected; placed as {placement}")
        if problems:
            raise PlacementError(
                "placements do not add up (the sum over ranks of local elements / number of holders must be the number "
                "of elements of the whole tensor):\n  " + "\n  ".join(problems[:12]),
                code="C031",
            )


# --------------------------------------------------------------------------------------------------
# Equal weights on all holders.
# --------------------------------------------------------------------------------------------------


_BROADCAST_BYTES = 32 << 20


def broadcast_shared(model: nn.Module, context: ParallelContext, compare: bool = False) -> PlacementError | None:
    """Make weights and buffers equal on all their holders: the first holder's. Collective over the world.

    With `compare`, holders that see the same data and have the same seed must have equal weights before, bit for bit:
    others are parts of a parameter that nobody placed, overwritten here. Returns the error that says so, on these ranks
    alone, to be raised on all.
    """
    held = [entry for entry in held_tensors(model, context, buffers=True) if entry.holding.count > 1]
    held = [entry for entry in held if not entry.tensor.is_meta]  # drawn alike by all, when they have their parts
    # Those of one set of holders and one dtype go together, many in one broadcast. In the order of the name that all holders
    # know, since a tie has another name, and another place among the parameters, at each of its stages.
    batches: dict[tuple[tuple[int, ...], torch.dtype], list[Held]] = {}
    for entry in sorted(held, key=lambda entry: entry.placement.tie_key):
        batches.setdefault((entry.holding.ranks, entry.tensor.dtype), []).append(entry)
    seeded_alike = _seeded_alike(held, context) if compare else {}
    context.ensure_groups([*(ranks for ranks, _ in batches), *seeded_alike])
    # Before the broadcast, which would hide it: weights that should have been equal already, and are not.
    problems = [_compare_weights(ranks, entries, context) for ranks, entries in seeded_alike.items()]
    with torch.no_grad():
        for (ranks, _), entries in batches.items():
            pieces = list(_batches([local_part(entry.tensor) for entry in entries]))
            layouts = [FlatLayout(tensors) for tensors in pieces]
            # One piece of memory for all: the backend lets go of it late.
            memory = max(layouts, key=lambda layout: layout.numel).allocate()
            for tensors, layout in zip(pieces, layouts, strict=True):
                flat = memory[: layout.numel]
                views = layout.views(flat)
                for view, tensor in zip(views, tensors, strict=True):
                    view.copy_(tensor)
                dist.broadcast(flat, src=ranks[0], group=context.group_of_ranks(ranks))
                for view, tensor in zip(views, tensors, strict=True):
                    tensor.copy_(view)
    return next((problem for problem in problems if problem is not None), None)


def _seeded_alike(held: Sequence[Held], context: ParallelContext) -> dict[tuple[int, ...], list[Held]]:
    """Parameters by those of their holders that `launch` gave the same seed as this rank, where there are several."""
    layout = context.layout
    apart = [axis.name for axis in layout.axes if axis.seeded_apart]
    here = layout.coordinates(context.get_global_rank())
    known: dict[tuple[int, ...], tuple[int, ...]] = {}
    found: dict[tuple[int, ...], list[Held]] = {}
    for entry in held:
        ranks = entry.holding.ranks
        if ranks not in known:
            known[ranks] = tuple(r for r in ranks if all(layout.coordinates(r)[name] == here[name] for name in apart))
        if len(known[ranks]) > 1 and isinstance(entry.tensor, nn.Parameter):
            found.setdefault(known[ranks], []).append(entry)
    return dict(sorted(found.items()))


def _compare_weights(ranks: tuple[int, ...], entries: list[Held], context: ParallelContext) -> PlacementError | None:
    group = context.group_of_ranks(ranks)
    bits = _bits([local_part(entry.tensor) for entry in entries])
    sums = {entry.name: f"{each:x}" for entry, each in zip(entries, bits, strict=True)}
    numbers = [digest_of(str(torch.initial_seed())), digest_of(repr(sums))]
    seeded_alike, equal = are_same_everywhere(numbers, context.device, group)
    if equal or not seeded_alike:
        return None
    shown = partial(_shown, entries, sums)
    try:
        with agreed_errors(context.device, parts=[1], group=group) as agreement:
            advice = _how_to_place(ranks, context)
            agreement.require(Alike("the weights of", sums, advice, PlacementError, shown=shown))
    except PlacementError as error:
        return error
    return None


def _how_to_place(ranks: Sequence[int], context: ParallelContext) -> str:
    modes = [mode for mode in context.layout.modes if context.is_initialized(mode)]
    mode = next((mode for mode in reversed(modes) if context.get_ranks_in_group(mode) == list(ranks)), None)
    return (
        "A parameter that is not placed is one that these ranks all hold whole, and they have the same seed. If each holds a "
        f"part of its own, say so: place(parameter, {{ParallelMode.{mode.name if mode else 'TENSOR'}: Shard(0)}}) where it is "
        "made. If the model was built before launch, build it after, where the ranks draw the same numbers. If they start "
        "apart on purpose and are all to get the weights of the first, set compare_weights=False in the config."
    )


@torch.no_grad()
def _bits(tensors: Sequence[Tensor]) -> list[int]:
    """For each tensor the sum of its bytes as numbers of 64 bits: read once on its device, with one copy to the host."""
    return [number % 2**64 for number in torch.stack([words_of(tensor).sum() for tensor in tensors]).tolist()]


def _shown(entries: Sequence[Held], sums: dict[str, str]) -> dict[str, str]:
    first = {entry.name: local_part(entry.tensor).detach().flatten()[:3].double().tolist() for entry in entries}
    return {name: f"{[round(value, 6) for value in first[name]]} ... (checksum {sums[name]})" for name in first}


def _batches(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """In turn, so many that few messages are sent, and so few that they take little memory beside the model."""
    batch: list[Tensor] = []
    taken = 0
    for tensor in tensors:
        if batch and taken + tensor.nbytes > _BROADCAST_BYTES:
            yield batch
            batch, taken = [], 0
        batch.append(tensor)
        taken += tensor.nbytes
    if batch:
        yield batch


# --------------------------------------------------------------------------------------------------
# Checksums of tensors by their bits: read once, on their device, with no wait of the host.
# --------------------------------------------------------------------------------------------------


_AT_ONCE = 1 << 24
"""Words that are squared at a time on an accelerator: that takes as much memory again."""


@torch.no_grad()
def words_of(tensor: Tensor) -> Tensor:
    """The bytes of a tensor as numbers of 64 bits, with zeros behind them where they do not fill the last one."""
    raw = tensor.detach().reshape(-1).view(torch.uint8)
    if raw.storage_offset() % 8 or raw.numel() % 8:
        raw = torch.cat([raw, raw.new_zeros(-raw.numel() % 8)])
    return raw.view(torch.int64)


@torch.no_grad()
def checksum(tensor: Tensor) -> Tensor:
    """Two numbers that follow from all bits: the sum of the words, which one changed word always changes, and of their squares."""
    words = words_of(tensor)
    if words.device.type == "cpu":
        return torch.stack([words.sum(), torch.dot(words, words)])
    squares = [(part * part).sum() for part in words.split(_AT_ONCE)]
    return torch.stack([words.sum(), torch.stack(squares).sum()])
