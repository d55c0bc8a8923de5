"""The batches of all ranks as one process would be given them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

Batch = tuple[Any, Any]
"""(data, label)"""


@dataclass(frozen=True)
class Axis:
    """An axis of the layout: its size, whether its ranks see distinct data, and the dimension along which batches are cut."""

    name: str
    size: int
    distinct: bool
    dim: int = 0
    may_repeat: bool = False
    """Whether ranks may be given the same batch, of which the model takes its part (sequences)."""


@dataclass(frozen=True)
class Pass:
    """What one process is given in one pass: one batch, or several that cannot be joined. `weight` is its part of a step's mean."""

    batches: list[Batch]
    weight: float = 1.0


def shares(values: Sequence[Any], axes: Sequence[Axis], coordinates: Callable[[int], dict[str, int]]) -> list[Any]:
    """What ranks that see distinct data were given, once each; parts of sequences are put together."""
    distinct = [axis for axis in axes if axis.distinct and axis.size > 1]
    table = {
        tuple(coordinates(rank)[axis.name] for axis in distinct): value
        for rank, value in reversed(list(enumerate(values)))
        if all(coordinates(rank)[axis.name] == 0 for axis in axes if not axis.distinct)
    }
    for at, axis in reversed(list(enumerate(distinct))):
        if axis.may_repeat:
            rows: dict[tuple[int, ...], list[Any]] = {}
            for key in sorted(table):
                rows.setdefault((*key[:at], *key[at + 1 :]), []).append(table[key])
            table = {key: found[0] if all_same(found) else _cat(found, axis.dim) for key, found in rows.items()}
            if any(value is None for value in table.values()):
                raise ValueError(
                    f"the batches of the ranks of the axis {axis.name!r} cannot be joined along dimension {axis.dim}"
                )
    return [table[key] for key in sorted(table)]


def join(parts: Sequence[Any]) -> Any:
    """The parts as one, along dimension 0; None where they do not fit together."""
    return parts[0] if len(parts) == 1 else _cat(parts, 0)


def _cat(parts: Sequence[Any], dim: int) -> Any:
    flat = [tree_flatten(part) for part in parts]
    if any(spec != flat[0][1] for _, spec in flat):
        return None
    leaves = []
    for column in zip(*(leaves for leaves, _ in flat), strict=True):
        if not isinstance(column[0], Tensor) or column[0].dim() <= dim:
            leaves.append(column[0])
        elif all(_but(leaf, dim) == _but(column[0], dim) for leaf in column):
            leaves.append(torch.cat(column, dim))
        else:
            return None
    return tree_unflatten(leaves, flat[0][1])


def _but(leaf: Tensor, dim: int) -> tuple[int, ...]:
    return tuple(size for at, size in enumerate(leaf.shape) if at != dim)


def all_same(parts: Sequence[Any]) -> bool:
    """Whether all have the same tensors in the same places."""
    first, spec = tree_flatten(parts[0])
    for part in parts[1:]:
        leaves, other = tree_flatten(part)
        if other != spec:
            return False
        for mine, theirs in zip(first, leaves, strict=True):
            if isinstance(mine, Tensor) and not (mine.shape == theirs.shape and torch.equal(mine, theirs)):
                return False
    return True


def on_cpu(value: Any) -> Any:
    """A batch with its tensors on the host, apart from what the run may still change."""
    return tree_map_only(Tensor, lambda leaf: leaf.detach().to("cpu", copy=True), value)
