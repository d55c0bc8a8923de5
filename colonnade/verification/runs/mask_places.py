"""Which part of one process's tensor each rank's tensor is: found from the shapes, the groups of the modes, and the numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations, product
from math import prod

import torch
from torch import Tensor

Shape = tuple[int, ...]
Groups = Mapping[str, Sequence[Sequence[int]]]
Place = tuple[Tensor, ...]
"""Of a rank's part: in each dimension, the numbers that its rows have in the whole."""
Places = Mapping[int, Place]
_NEAR = 0.01
"""How far, relative to their length, the ranks' numbers may be from those of one process at the places that they are given."""


def places_for(
    shapes: Mapping[int, Shape], whole: Shape, groups: Groups, inputs: Mapping[int, Tensor], x: Tensor, anyhow: bool
) -> Places | str:
    """Where the ranks' parts lie in `whole`, or why that is not known. `inputs`: what ranks hold of x.

    Of several ways that the shapes allow, the one by which the ranks' numbers are those of x. `anyhow`: take the nearest.
    """
    local = next(iter(shapes.values()))
    if any(shape != local for shape in shapes.values()) or len(local) != len(whole):
        return f"the ranks hold parts of different shapes there, as {sorted(set(shapes.values()))[:4]}"
    if any(not mine or full % mine for mine, full in zip(local, whole, strict=True)):
        return f"the ranks hold {local} there, of which {whole} cannot be made"
    ways = list(_ways(list(shapes), local, whole, groups))
    if not ways:
        return f"the ranks hold {local} there, and no groups of ranks make {whole} of it"
    if len(inputs) < len(shapes):
        return ways[0]  # there is nothing to choose by
    truth = x.detach().to("cpu", torch.float32)
    best = min(ways, key=lambda way: _error(way, inputs, truth))
    if _error(best, inputs, truth) <= _NEAR:
        return best
    cut = [dim for dim, (mine, full) in enumerate(zip(local, whole, strict=True)) if mine < full]
    orders = [_reordered(way, dim, inputs, truth) for way in ways for dim in cut]
    for order in orders:
        if _error(order, inputs, truth) <= _NEAR:
            return order
    return best if anyhow else "what the ranks drop from is not what one process drops from, in any order of its parts"


def joined(parts: Mapping[int, Tensor], places: Places, shape: Shape) -> Tensor:
    """The whole; of several holders of a part, the first one's."""
    whole = next(iter(parts.values())).new_empty(shape)
    for rank in reversed(list(parts)):
        whole[torch.meshgrid(*places[rank], indexing="ij")] = parts[rank]
    return whole


def _error(places: Places, inputs: Mapping[int, Tensor], truth: Tensor) -> float:
    """The distance of the rank that is farthest from the truth, in units of the truth's length."""
    size = float(truth.norm()) or 1.0
    return max(float((mine - _at(truth, places[rank])).norm()) / size for rank, mine in inputs.items())


def _at(whole: Tensor, place: Place) -> Tensor:
    return whole[torch.meshgrid(*place, indexing="ij")]


def _reordered(places: Places, dim: int, inputs: Mapping[int, Tensor], truth: Tensor) -> Places:
    """The same with the rows of one dimension where the truth has them: sequences may be dealt out in any order."""
    found = {}
    for rank, place in places.items():
        everything = _at(truth, (*place[:dim], torch.arange(truth.shape[dim]), *place[dim + 1 :]))
        mine, theirs = (one.movedim(dim, 0).flatten(1) for one in (inputs[rank], everything))
        found[rank] = (*place[:dim], torch.cdist(mine, theirs).argmin(1), *place[dim + 1 :])
    return found


def _ways(ranks: Sequence[int], local: Shape, whole: Shape, groups: Groups) -> Iterator[Places]:
    """Every way in which modes can cut so: each dimension by one mode or two, the first of them outside."""
    parts = [full // mine for mine, full in zip(local, whole, strict=True)]
    numbers = _numbers(ranks, groups)
    sizes = {mode: len(set(of.values())) for mode, of in numbers.items()}
    cutters = [(), *((mode,) for mode in numbers), *permutations(numbers, 2)]
    choices = [[modes for modes in cutters if prod(sizes[mode] for mode in modes) == count] for count in parts]
    seen = set()
    for chosen in product(*choices):
        cells = {}
        for rank in ranks:
            cell = [0] * len(parts)
            for dim, modes in enumerate(chosen):
                for mode in modes:
                    cell[dim] = cell[dim] * sizes[mode] + numbers[mode][rank]
            cells[rank] = tuple(cell)
        if len(set(cells.values())) == prod(parts) and (key := tuple(cells.values())) not in seen:
            seen.add(key)
            yield {
                rank: tuple(torch.arange(at * size, (at + 1) * size) for at, size in zip(cell, local, strict=True))
                for rank, cell in cells.items()
            }


def _numbers(ranks: Sequence[int], groups: Groups) -> dict[str, dict[int, int]]:
    """Of each mode in which these ranks differ: the place of each rank in its group, from 0 without gaps."""
    found = {}
    for mode, lists in groups.items():
        at = {rank: list(group).index(rank) for group in lists for rank in group if rank in ranks}
        order = {number: place for place, number in enumerate(sorted(set(at.values())))}
        if len(at) == len(ranks) and len(order) > 1:
            found[mode] = {rank: order[number] for rank, number in at.items()}
    return found
