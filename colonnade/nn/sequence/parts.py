"""Which tokens of a sequence lie on which rank of the sequence group: contiguous or balanced parts, of any lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from colonnade.comm.messages import message_device
from colonnade.comm.torch_versions import unwatched
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.core import given_or_global
from colonnade.errors import LayoutError
from colonnade.parallel import wire
from colonnade.parallel.collectives import all_gather
from colonnade.parallel.wire import members_of

_FORWARD = -1
"""Torch's number of the backward pass that is under way, where there is none."""


class Segment(NamedTuple):
    """A run of tokens: where it starts in the whole sequence, where in the rank's part, and its length."""

    start: int
    local: int
    length: int


@dataclass(frozen=True)
class Parts:
    """The tokens of one sequence on the ranks of a group.

    Contiguous: rank i has the i-th run of tokens, of any length. Balanced: the sequence is cut into twice as many
    near-equal runs as there are ranks, and rank i has run i and run -1-i, so that under a causal mask all ranks
    have the same work.
    """

    lengths: tuple[int, ...]
    balanced: bool = False

    def __post_init__(self) -> None:
        wanted = _lengths(sum(self.lengths), len(self.lengths), True) if self.balanced else self.lengths
        if wanted != self.lengths:
            raise LayoutError(
                f"balanced parts of {sum(self.lengths)} tokens have lengths {list(wanted)}, not {list(self.lengths)}; "
                f"split with split_sequence(..., balanced=True), or use contiguous parts, which may have any lengths"
            )

    @staticmethod
    def of(total: int, size: int, balanced: bool = False) -> Parts:
        """The parts of `total` tokens on `size` ranks, as equal as can be, longer ones first."""
        return Parts(_lengths(total, size, balanced), balanced)

    @cached_property
    def segments(self) -> list[list[Segment]]:
        """For each rank its runs of tokens, in the order of the sequence."""
        if not self.balanced:
            starts = _starts(self.lengths)
            return [[Segment(start, 0, length)] for start, length in zip(starts, self.lengths, strict=True)]
        runs = _even(sum(self.lengths), 2 * len(self.lengths))
        starts = _starts(runs)
        return [
            [Segment(starts[at], 0, runs[at]), Segment(starts[-1 - at], runs[at], runs[-1 - at])]
            for at in range(len(self.lengths))
        ]

    def positions(self, rank: int, device: torch.device | None = None) -> Tensor:
        """Where in the whole sequence the tokens of a rank stand."""
        runs = [torch.arange(run.start, run.start + run.length, device=device) for run in self.segments[rank]]
        return torch.cat(runs)


def split_sequence(
    x: Tensor, dim: int = 1, *, balanced: bool = False, context: ParallelContext | None = None
) -> Tensor:
    """This rank's part of a tensor that every rank of the sequence group has whole. No communication.

    In backward the rest of `x` gets zeros here: a parameter behind it owes a sum over the sequence group, which is
    what placements say of every parameter that is replicated there.
    """
    size, at = sequence_place(given_or_global(context))
    if size == 1:
        return x
    runs = Parts.of(x.size(dim), size, balanced).segments[at]
    first, *rest = (x.narrow(dim, run.start, run.length) for run in runs)
    return torch.cat([first, *rest], dim) if rest else first


def gather_sequence(
    x: Tensor,
    dim: int = 1,
    *,
    lengths: Sequence[int] | None = None,
    balanced: bool = False,
    context: ParallelContext | None = None,
) -> Tensor:
    """The whole tensor, in the order of the sequence, on every rank; in backward, the sum of all ranks' gradients."""
    context = given_or_global(context)
    parts = parts_of(x.size(dim), lengths, balanced, context)
    rows = all_gather(x, ParallelMode.SEQUENCE, dim, parts.lengths, context=context)
    if not parts.balanced:
        return rows
    ranks = _starts(parts.lengths)
    runs = sorted(
        (run.start, ranks[rank] + run.local, run.length)
        for rank, segments in enumerate(parts.segments)
        for run in segments
    )
    return torch.cat([rows.narrow(dim, at, length) for _, at, length in runs], dim)


def sequence_positions(
    length: int,
    *,
    lengths: Sequence[int] | None = None,
    balanced: bool = False,
    device: torch.device | None = None,
    context: ParallelContext | None = None,
) -> Tensor:
    """The positions in the whole sequence of this rank's `length` tokens, for position embeddings."""
    context = given_or_global(context)
    _, at = sequence_place(context)
    return parts_of(length, lengths, balanced, context).positions(at, device)


def sequence_place(context: ParallelContext) -> tuple[int, int]:
    """(ranks of the sequence group, this rank's place in it); (1, 0) where there is none."""
    if not context.is_initialized(ParallelMode.SEQUENCE):
        return 1, 0
    return context.get_world_size(ParallelMode.SEQUENCE), context.get_local_rank(ParallelMode.SEQUENCE)


def parts_of(length: int, lengths: Sequence[int] | None, balanced: bool, context: ParallelContext) -> Parts:
    """The parts of all ranks, of which this one has `length` tokens.

    Where `lengths` is not given the ranks tell each other: a small collective that waits for the device.
    """
    size, at = sequence_place(context)
    members = members_of(ParallelMode.SEQUENCE, context)
    if lengths is None and members is not None:
        lengths = [each for (each,) in wire.numbers_of_all([length], members, message_device(context.device))]
    if lengths is None:
        return Parts((length,), balanced)
    if len(lengths) != size or lengths[at] != length:
        raise LayoutError(
            f"lengths={list(lengths)} for a sequence group of {size} ranks, where this rank (number {at}) has {length} "
            f"tokens: give one length for each rank, or leave it out"
        )
    return Parts(tuple(lengths), balanced)


class SharedLengths:
    """The lengths of the parts, for layers that attend to the same sequences one after another, as those of one model do.

    The first layer of a pass lets the ranks tell each other. Another pass begins with a layer that comes again, or, in
    forward, one that is not the next: the stages of a pipeline may take turns. That follows from the order of calls alone,
    never from a length, so all ranks ask together.
    """

    def __init__(self) -> None:
        self._layers = 0
        self._lengths: tuple[int, ...] = ()
        self._asked: list[int] = []
        self._pass = _FORWARD

    def join(self) -> int:
        """The number of one more layer."""
        self._layers += 1
        return self._layers

    def of(self, layer: int, length: int, context: ParallelContext) -> tuple[int, ...]:
        """The lengths for the layer of this number, which has so many tokens here."""
        # A backward pass that computes layers again goes through them in its own order.
        this_pass = torch._C._current_graph_task_id()
        known = self._pass == this_pass and self._asked and layer not in self._asked
        if not known or (this_pass == _FORWARD and layer != self._asked[-1] + 1):
            with unwatched():  # a layer that did not ask in forward may be the one that does here
                self._lengths = parts_of(length, None, False, context).lengths
            self._asked, self._pass = [], this_pass
        self._asked.append(layer)
        return self._lengths


def _lengths(total: int, size: int, balanced: bool) -> tuple[int, ...]:
    runs = _even(total, 2 * size if balanced else size)
    return tuple(runs[at] + runs[-1 - at] for at in range(size)) if balanced else tuple(runs)


def _even(total: int, count: int) -> list[int]:
    return [total // count + (at < total % count) for at in range(count)]


def _starts(lengths: Sequence[int]) -> list[int]:
    return list(accumulate(lengths, initial=0))[:-1]
