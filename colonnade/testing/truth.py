"""One process is the truth: whole tensors rebuilt from placements, compared with the plain model's.

gradients = gather_gradients(engine.model, context)           # on every rank: name -> whole tensor
truth = plain_gradients(plain_model, loss_of_the_joined_batch)
compare(truth, gradients, rtol=1e-12)                         # a table per parameter; raises if they differ
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from colonnade.context.parallel_context import ParallelContext
from colonnade.errors import ParityError
from colonnade.parallel.agreement import Held, held_tensors
from colonnade.parallel.dtensor import local_part
from colonnade.parallel.shards import part_indices, section_runs

Tensors = dict[str, Tensor]


def gather_weights(model: nn.Module, context: ParallelContext) -> Tensors:
    """The whole weights, by name, on every rank. Collective over the world; holders must agree to the bit."""
    return _gather(model, context, lambda parameter: parameter.detach())


def gather_gradients(model: nn.Module, context: ParallelContext) -> Tensors:
    """The whole gradients, by name, on every rank; zeros where there is none. Collective over the world."""
    return _gather(
        model,
        context,
        lambda parameter: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach(),
    )


def plain_gradients(model: nn.Module, loss: Tensor) -> Tensors:
    """The gradients of a plain model in this process; zeros for parameters that the loss does not reach."""
    model.zero_grad(set_to_none=True)
    loss.backward()
    return {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach().clone()
        for name, parameter in model.named_parameters()
    }


@dataclass(frozen=True)
class Difference:
    """How far one parameter is from the truth: |found - truth| / |truth|, and the largest single element."""

    name: str
    relative: float
    largest: float
    ok: bool
    note: str = ""


@dataclass(frozen=True)
class Comparison:
    """The differences of all parameters; prints as a table, worst first."""

    differences: tuple[Difference, ...]
    rtol: float

    @property
    def ok(self) -> bool:
        return all(difference.ok for difference in self.differences)

    def __str__(self) -> str:
        width = max(map(len, ["parameter", *(difference.name for difference in self.differences)]))
        lines = [f"{'parameter':<{width}}  relative   largest    (tolerance {self.rtol:g})"]
        for entry in sorted(self.differences, key=lambda entry: (entry.ok, -entry.relative)):
            mark = "ok" if entry.ok else "DIFFERS"
            lines.append(
                f"{entry.name:<{width}}  {entry.relative:.2e}  {entry.largest:.2e}  {mark} {entry.note}".rstrip()
            )
        return "\n".join(lines)


def compare(truth: Mapping[str, Tensor], found: Mapping[str, Tensor], rtol: float, check: bool = True) -> Comparison:
    """Compare every tensor of the truth; a missing one differs. Raises ParityError with the table if `check`."""
    result = Comparison(tuple(_difference(name, truth[name], found.get(name), rtol) for name in truth), rtol)
    if check and not result.ok:
        raise ParityError(f"not equal to one process:\n{result}")
    return result


def _difference(name: str, truth: Tensor, found: Tensor | None, rtol: float) -> Difference:
    if found is None:
        return Difference(name, float("inf"), float("inf"), False, "missing")
    if found.shape != truth.shape:
        return Difference(
            name, float("inf"), float("inf"), False, f"shape {tuple(found.shape)}, not {tuple(truth.shape)}"
        )
    distance = (found.detach().cpu() - truth.detach().cpu()).abs()
    largest = float(distance.max()) if distance.numel() else 0.0
    size = float(truth.detach().norm())
    relative = float(distance.norm()) / size if size else largest
    return Difference(name, relative, largest, relative <= rtol)


@dataclass(frozen=True)
class _Part:
    """One rank's part of one tensor: where it belongs, and its elements in fp64 on the CPU."""

    name: str
    rank: int
    place: dict[int, tuple[int, int]]  # dimension -> (index of the part, number of parts)
    packed: dict[int, list[int]]  # dimension with sections -> where in the whole the joined parts' elements lie
    content: Tensor


def _gather(model: nn.Module, context: ParallelContext, read: Callable[[nn.Parameter], Tensor]) -> Tensors:
    mine = [_part(entry, read(entry.tensor), context) for entry in held_tensors(model, context)]  # type: ignore[arg-type]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    by_name: dict[str, list[_Part]] = {}
    for part in itertools.chain.from_iterable(everyone):
        by_name.setdefault(part.name, []).append(part)
    return {name: _assemble(name, parts) for name, parts in by_name.items()}


def _part(entry: Held, tensor: Tensor, context: ParallelContext) -> _Part:
    place = part_indices(context.layout, entry.placement, context.get_global_rank())
    # A clone, as a view would take all that it is a view of along.
    content = local_part(tensor).to("cpu", torch.float64, copy=True).contiguous()
    return _Part(entry.name, context.get_global_rank(), place, _joined_order(entry, context), content)


def _joined_order(entry: Held, context: ParallelContext) -> dict[int, list[int]]:
    counts = {mode: context.get_world_size(mode) for mode, shard in entry.placement.shards.items() if shard.sections}
    return {
        entry.placement.shards[mode].dim: [
            at
            for part in range(count)
            for start, length in section_runs(entry.placement.shards[mode].sections, part, count)
            for at in range(start, start + length)
        ]
        for mode, count in counts.items()
    }


def _assemble(name: str, parts: list[_Part]) -> Tensor:
    """Join the parts; two ranks that hold the same part must hold the same bits."""
    by_place: dict[tuple[tuple[int, int], ...], _Part] = {}
    for part in parts:
        key = tuple(sorted((dim, at) for dim, (at, _) in part.place.items()))
        first = by_place.setdefault(key, part)
        if not torch.equal(first.content, part.content):
            raise ParityError(f"{name}: ranks {first.rank} and {part.rank} hold the same part with different values")
    sizes = {dim: count for dim, (_, count) in parts[0].place.items()}
    joined = _join(by_place, sorted(sizes), sizes, {})
    for dim, order in parts[0].packed.items():
        joined = torch.empty_like(joined).index_copy_(dim, torch.tensor(order), joined)
    return joined


def _join(by_place: dict[Any, _Part], dims: list[int], sizes: dict[int, int], chosen: dict[int, int]) -> Tensor:
    if not dims:
        return by_place[tuple(sorted(chosen.items()))].content
    dim, rest = dims[0], dims[1:]
    return torch.cat([_join(by_place, rest, sizes, {**chosen, dim: at}) for at in range(sizes[dim])], dim=dim)
