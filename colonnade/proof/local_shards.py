"""Shards in plain tensors: a script may give each rank a smaller parameter, without DTensor or `place`.

Nothing tells which elements of the full parameter such a tensor has. If the parameter of the single process is longer in
one dimension, the ranks are supposed to have its blocks in their order. The single process checks that: joined, the
blocks must be the weight that the script itself creates there. Otherwise the run cannot be compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from colonnade.proof.record import Piece, Record

LOCAL = "local.pt"


@dataclass(frozen=True)
class LocalTensors:
    """The initial values of tensors without a placement that differ between the ranks, and the coordinates of the ranks."""

    values: Sequence[Mapping[str, Tensor]]
    coordinates: Sequence[Mapping[str, int]]

    @classmethod
    def of(cls, records: Sequence[Record]) -> LocalTensors:
        """Collect them from plain torch scripts; an engine knows the placements of its parameters."""
        found: list[dict[str, Tensor]] = [{} for _ in records]
        first = records[0]
        for name, value in first.start.items() if not first.run.has_engine else ():
            some = [record.start.get(name) for record in records]
            is_plain = all(name in record.tensors and record.tensors[name].positions is None for record in records)
            if is_plain and any(one is None or not torch.equal(one, value) for one in some):
                for own, one in zip(found, some, strict=True):
                    if one is not None:
                        own[name] = one
        return cls(found, [record.run.coordinates for record in records])

    def joined(self, name: str, value: Tensor, own: Tensor) -> Tensor | None:
        """Join the blocks of a weight, of which the first rank has `value`; None if they are not the weight `own`."""
        block = block_of(tuple(value.shape), tuple(own.shape), self.coordinates)
        if block is None:
            return None
        dim, numbers = block
        pieces = [
            next(some.get(name, value) for some, at in zip(self.values, numbers, strict=True) if at == number)
            for number in range(max(numbers) + 1)
        ]
        if any(piece.shape != value.shape for piece in pieces):
            return None
        whole = torch.cat(pieces, dim)
        return whole if torch.equal(whole, own.to(whole.dtype).cpu()) else None


def block_of(
    shape: tuple[int, ...], full: tuple[int, ...], coordinates: Sequence[Mapping[str, int]]
) -> tuple[int, list[int]] | None:
    """Return (dimension, the number of each rank's block along it) for tensors that are shorter than the full one.

    None if more than one dimension is shorter, or if no axis of the run (nor the world) has as many ranks as blocks.
    """
    dims = [dim for dim, (size, whole) in enumerate(zip(shape, full, strict=False)) if size != whole]
    if len(shape) != len(full) or len(dims) != 1 or not shape[dims[0]] or full[dims[0]] % shape[dims[0]]:
        return None
    count = full[dims[0]] // shape[dims[0]]
    axes = [*([own[axis] for own in coordinates] for axis in ("model", "data")), [*range(len(coordinates))]]
    return next(((dims[0], numbers) for numbers in axes if sorted(set(numbers)) == [*range(count)]), None)


def with_local_shards(records: Sequence[Record], full: Mapping[str, tuple[int, ...]]) -> list[Record]:
    """Return the records with the positions of the blocks in plain tensors. `full` has the shapes in the single process."""
    found = []
    for at, record in enumerate(records):
        tensors = dict(record.tensors)
        for name, note in record.tensors.items():
            shape = full.get(name, note.shape)
            block = None
            if note.positions is None and note.shape != shape and not record.run.has_engine:
                block = block_of(note.shape, shape, [other.run.coordinates for other in records])
            if block is None:
                continue
            dim, numbers = block
            places = torch.arange(torch.Size(shape).numel()).view(shape).chunk(max(numbers) + 1, dim)[numbers[at]]
            # Blocks of ranks with distinct data are not reduced over these ranks: each has the contributions of all of them.
            required = note.required
            if numbers != [other.run.coordinates["model"] for other in records]:
                required = tuple(("EXPERT_DATA", (record.rank,), divisor) for _, _, divisor in note.required)
            tensors[name] = replace(
                note, shape=shape, positions=places, placement=f"block of dimension {dim}", required=required
            )
        if placed := {name: note.positions for name, note in tensors.items() if note is not record.tensors[name]}:

            def with_places(
                some: Mapping[str, list[Piece]], placed: Mapping[str, Any] = placed
            ) -> dict[str, list[Piece]]:
                """Gradients have the elements of their parameter."""
                return {
                    name: [replace(piece, positions=placed.get(name, piece.positions)) for piece in pieces]
                    for name, pieces in some.items()
                }

            steps = [
                replace(
                    step,
                    total=with_places(step.total),
                    clipped=with_places(step.clipped),
                    stepped=with_places(step.stepped),
                )
                for step in record.steps
            ]
            record = replace(record, tensors=tensors, steps=steps)
        found.append(record)
    return found
