"""The tensors of a model with their replica ranks, and the comparison of replicas before step 1.

`held_tensors` lists every parameter (and buffer) with its placement and the ranks that store the same elements. At start-up,
`Placements` checks that all ranks of a stage have the same parameters and that placements add up to full tensors, and
`broadcast_shared` makes weights equal on all replicas. `checksum` and `words_of` compare tensors by their bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from colonnade.comm.messages import MustMatch, agreed_errors, are_same_everywhere, message_device
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.errors import PlacementError
from colonnade.parallel.demand import Holding, check_same_data, holding
from colonnade.parallel.flat import FlatLayout
from colonnade.parallel.placement import (
    Placement,
    Replicate,
    Shard,
    effective_placement,
    is_placed,
    local_part,
    logical_shape,
)
from colonnade.texts import digest_of


@dataclass(frozen=True, eq=False)
class Held:
    """A tensor of the model with its placement and its replica ranks."""

    name: str
    tensor: Tensor
    placement: Placement
    holding: Holding

    @property
    def label(self) -> str:
        """A name that is equal on all replicas: the parameter name; for a tied weight, whose names differ between stages, its
        key.
        """
        return self.placement.tie_key or self.name


def held_tensors(model: nn.Module, context: ParallelContext, buffers: bool = False) -> list[Held]:
    """Every parameter (and buffer) of the model, once, with its replica ranks."""
    layout, rank = context.layout, context.get_global_rank()
    named = [*model.named_parameters(), *(model.named_buffers() if buffers else ())]
    placed = [(name, tensor, effective_placement(tensor, layout, rank)) for name, tensor in named]
    return [Held(name, tensor, placement, holding(layout, placement, rank)) for name, tensor, placement in placed]


def replicated_parameters(model: nn.Module, context: ParallelContext, mode: ParallelMode) -> dict[int, str]:
    """The parameters (name by id) that are replicated over the ranks of `mode`: not sharded, and without partial gradients."""
    layout, rank = context.layout, context.get_global_rank()
    ranks = set(layout.group_of(mode, rank))

    @cache
    def is_distributed(placement: Placement) -> bool:
        """Whether the tensor is sharded, or has partial gradients, over at least two ranks of this group of `mode`."""
        return any(
            len(ranks.intersection(layout.group_of(other, rank))) > 1
            for other, spec in placement.modes.items()
            if isinstance(spec, Shard) or (isinstance(spec, Replicate) and spec.owes == "sum")
        )

    return {
        id(entry.tensor): entry.name for entry in held_tensors(model, context) if not is_distributed(entry.placement)
    }


# --------------------------------------------------------------------------------------------------
# Placements that do not add up, or are missing.
# --------------------------------------------------------------------------------------------------


_COLOSSALAI_ATTRIBUTES = {
    "is_tensor_parallel": (ParallelMode.TENSOR, "place(parameter, {ParallelMode.TENSOR: Shard(dim)})"),
    "pipeline_shared_module_pg": (
        ParallelMode.PIPELINE,
        "place(parameter, {ParallelMode.PIPELINE: Tied((first_stage, last_stage), 'its name')})",
    ),
    "moe_info": (ParallelMode.GLOBAL, "place(parameter, {ParallelMode.EXPERT: Shard(0)}), or use colonnade.nn.moe.MoE"),
}
"""Attributes of Colossal-AI parameters that are sharded or shared: the mode in question, and the placement to write here."""


def refuse_colossalai_attributes(model: nn.Module, context: ParallelContext) -> None:
    """Raise PlacementError for parameters that Colossal-AI attributes describe as sharded or shared, without a placement.

    Without a placement, such a parameter would count as replicated: its shard would be overwritten by the shard of another rank, or
    its gradient would never be reduced. The attributes cannot be converted to placements, because they contain neither the
    sharded dimension nor the key of a tie.
    """
    for name, parameter in model.named_parameters():
        for attribute, (mode, write) in _COLOSSALAI_ATTRIBUTES.items():
            if getattr(parameter, attribute, None) and context.get_world_size(mode) > 1 and not is_placed(parameter):
                raise PlacementError(
                    f"{name} is marked {attribute}, but Colonnade does not read this mark. Without a placement the "
                    f"parameter would be replicated on every rank. Write {write}.",
                    code="C031",
                )


def check_placements(model: nn.Module, context: ParallelContext) -> None:
    """Compare the parameters of the ranks of each stage, and check that their shards add up to full tensors.

    Collective over the world.

    Raises:
        PlacementError: On every rank, if ranks of a stage have different parameters, or placements do not add up.
    """
    with agreed_errors(context.device, parts=[context.pipeline_parallel_size]) as agreement:
        placements = Placements(model, context)
        agreement.require(placements.alike())
    (counts,) = agreement.sizes
    placements.check(counts)


class Placements:
    """The placements of this rank's parameters, for comparison between ranks.

    Raises PlacementError if the layout does not allow a placement.
    """

    def __init__(self, model: nn.Module, context: ParallelContext) -> None:
        self._context, self._stage = context, context.get_local_rank(ParallelMode.PIPELINE)
        sizes = {mode: context.get_world_size(mode) for mode in context.layout.modes if context.is_initialized(mode)}
        self._held = held_tensors(model, context)
        for entry in self._held:
            check_same_data(context.layout, entry.placement, context.get_global_rank(), entry.name)
        self._shapes = [logical_shape(entry.tensor, entry.placement, sizes) for entry in self._held]

    def alike(self) -> MustMatch:
        """A table to compare between the ranks of a pipeline stage: the full shape, dtype and kind of each parameter."""
        return MustMatch(
            "parameter",
            {
                entry.name: f"{tuple(shape)} {entry.tensor.dtype}{'' if entry.tensor.requires_grad else ' frozen'}"
                for entry, shape in zip(self._held, self._shapes, strict=True)
            },
            "All ranks of a pipeline stage must have the same parameters in the same order, so each rank must "
            "build the same modules. The shapes above are those of full tensors. If each rank has a shard, "
            "declare the shard with place(parameter, {mode: Shard(dim)}). If the shards are uneven, also pass "
            "shape=<full shape>.",
            PlacementError,
            part=self._stage,
        )

    def check(self, counts: Sequence[int]) -> None:
        """Check for every parameter that (local elements / number of replicas), summed over the world, is the size of the full
        tensor.

        One small collective over the world.

        Args:
            counts: The number of parameters of each stage.

        Raises:
            PlacementError: On every rank; the message has the parameter's name on ranks of its stage.
        """
        start = sum(counts[: self._stage])
        rows = torch.zeros((sum(counts), 2), dtype=torch.float64, device="cpu")
        ranks_of_stage = self._context.world_size // len(counts)
        for at, (entry, shape) in enumerate(zip(self._held, self._shapes, strict=True), start):
            # A tied parameter has a row at each of its stages, and each row gets the elements of one stage only.
            stages = len(entry.placement.tied.stages) if entry.placement.tied is not None else 1
            elements = local_part(entry.tensor).numel() / entry.holding.count
            rows[at] = torch.tensor(
                [elements * stages, math.prod(shape) / ranks_of_stage], dtype=torch.float64, device="cpu"
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
                "placements do not add up. For each tensor, the sum over ranks of (local elements / number of replicas) "
                "must be the number of elements of the full tensor:\n  " + "\n  ".join(problems[:12]),
                code="C031",
            )


# --------------------------------------------------------------------------------------------------
# Equal weights on all replicas.
# --------------------------------------------------------------------------------------------------


_BROADCAST_BYTES = 32 << 20


def broadcast_shared(model: nn.Module, context: ParallelContext, compare: bool = False) -> PlacementError | None:
    """Broadcast weights and buffers from the first replica to the others. Collective over the world.

    Args:
        model: The model of this rank.
        context: The parallel context.
        compare: Before the broadcast, compare the weights of replicas with equal seeds, bit by bit. They should be equal;
            different weights are probably shards of a parameter without a placement, which the broadcast would overwrite.

    Returns:
        The error of the comparison, only on the ranks that found it; the caller raises it on all ranks.
    """
    held = [entry for entry in held_tensors(model, context, buffers=True) if entry.holding.count > 1]
    held = [entry for entry in held if not entry.tensor.is_meta]  # drawn later, equal on all replicas
    # Tensors with the same replica ranks and dtype share broadcasts. Sorted by the key that is equal on all replicas, since a
    # tied parameter has another name, and another position in the model, at each stage.
    batches: dict[tuple[tuple[int, ...], torch.dtype], list[Held]] = {}
    for entry in sorted(held, key=lambda entry: entry.placement.tie_key):
        batches.setdefault((entry.holding.ranks, entry.tensor.dtype), []).append(entry)
    seeded_alike = _seeded_alike(held, context) if compare else {}
    context.ensure_groups([*(ranks for ranks, _ in batches), *seeded_alike])
    problems = [_compare_weights(ranks, entries, context) for ranks, entries in seeded_alike.items()]
    with torch.no_grad():
        for (ranks, _), entries in batches.items():
            pieces = list(_batches([local_part(entry.tensor) for entry in entries]))
            layouts = [FlatLayout(tensors) for tensors in pieces]
            # One buffer for all broadcasts: the backend releases the memory of a collective late.
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
    """Group parameters by the replica ranks that have the same seed as this rank, if there are at least two."""
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
    """Compare weights that should be equal, by checksums. Collective over `ranks`; returns the error, or None."""
    group = context.group_of_ranks(ranks)
    # One pass over each tensor on its device, and one copy to the host for all.
    with torch.no_grad():
        words = torch.stack([words_of(local_part(entry.tensor)).sum() for entry in entries]).tolist()
    sums = {entry.name: f"{number % 2**64:x}" for entry, number in zip(entries, words, strict=True)}
    numbers = [digest_of(str(torch.initial_seed())), digest_of(repr(sums))]
    seeded_alike, equal = are_same_everywhere(numbers, context.device, group)
    if equal or not seeded_alike:
        return None

    modes = [mode for mode in context.layout.modes if context.is_initialized(mode)]
    mode = next((mode for mode in reversed(modes) if context.get_ranks_in_group(mode) == list(ranks)), None)
    advice = (
        "A parameter without a placement is replicated on these ranks, and they have the same seed. There are "
        "three possible causes. 1. Each rank has a different shard: declare the shard where the parameter is "
        f"created, with place(parameter, {{ParallelMode.{mode.name if mode else 'TENSOR'}: Shard(0)}}). 2. The "
        "model was built before launch, so the ranks drew different numbers: build it after launch. 3. The "
        "weights differ on purpose: set compare_weights=False in the config, and all ranks get the weights of "
        "the first."
    )
    try:
        with agreed_errors(context.device, parts=[1], group=group) as agreement:
            shown = partial(_shown, entries, sums)
            agreement.require(MustMatch("the weights of", sums, advice, PlacementError, shown=shown))
    except PlacementError as error:
        return error
    return None


def _shown(entries: Sequence[Held], sums: dict[str, str]) -> dict[str, str]:
    """By name, the first elements and the checksum of each tensor, for a message."""
    first = {entry.name: local_part(entry.tensor).detach().flatten()[:3].double().tolist() for entry in entries}
    return {name: f"{[round(value, 6) for value in first[name]]} ... (checksum {sums[name]})" for name in first}


def _batches(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Lists of tensors to broadcast at once: few messages, and little memory in addition to the model."""
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
# Checksums of tensors by their bits: read once, on their device; the host does not wait.
# --------------------------------------------------------------------------------------------------


_AT_ONCE = 1 << 24
"""Words that are squared at a time on an accelerator: the squares take as much memory."""


@torch.no_grad()
def words_of(tensor: Tensor) -> Tensor:
    """View the bytes of a tensor as 64-bit integers; the last integer is padded with zeros."""
    raw = tensor.detach().reshape(-1).view(torch.uint8)
    if raw.storage_offset() % 8 or raw.numel() % 8:
        raw = torch.cat([raw, raw.new_zeros(-raw.numel() % 8)])
    return raw.view(torch.int64)


@torch.no_grad()
def checksum(tensor: Tensor) -> Tensor:
    """Two checksums of a tensor's bits: the sum of its 64-bit words, and the sum of their squares.

    A change of any single word changes the first sum.
    """
    words = words_of(tensor)
    if words.device.type == "cpu":
        return torch.stack([words.sum(), torch.dot(words, words)])
    squares = [(part * part).sum() for part in words.split(_AT_ONCE)]
    return torch.stack([words.sum(), torch.stack(squares).sum()])
