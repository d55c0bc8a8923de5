"""The split of a sequence's tokens over the sequence group: contiguous or balanced parts, of any lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from colonnade.comm.messages import message_device
from colonnade.comm.torch_versions import hide_from_dispatch_modes
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.core import given_or_global
from colonnade.errors import LayoutError
from colonnade.parallel import wire
from colonnade.parallel.collectives import all_gather
from colonnade.parallel.wire import members_of

_FORWARD = -1
"""The id that torch reports for the running backward pass if there is none."""


class Segment(NamedTuple):
    """A run of tokens: its start in the full sequence, its start in the rank's part, and its length."""

    start: int
    local: int
    length: int


@dataclass(frozen=True)
class Parts:
    """The split of one sequence's tokens over the ranks of a group.

    Contiguous: rank i has the i-th run of tokens, of any length. Balanced: the sequence is split into twice as many
    near-equal runs as there are ranks, and rank i has runs i and -1-i, so that a causal mask gives all ranks the same
    work.
    """

    lengths: tuple[int, ...]
    balanced: bool = False

    def __post_init__(self) -> None:
        required = _lengths(sum(self.lengths), len(self.lengths), True) if self.balanced else self.lengths
        if required != self.lengths:
            raise LayoutError(
                f"balanced parts of {sum(self.lengths)} tokens have lengths {list(required)}, but the given lengths "
                f"are {list(self.lengths)}. Split with split_sequence(..., balanced=True), or use contiguous parts, "
                "which may have any lengths."
            )

    @staticmethod
    def of(total: int, size: int, balanced: bool = False) -> Parts:
        """Split `total` tokens over `size` ranks as equally as possible, with longer parts first."""
        return Parts(_lengths(total, size, balanced), balanced)

    @cached_property
    def segments(self) -> list[list[Segment]]:
        """The runs of tokens of each rank, in the order of the sequence."""
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
        """Return the positions of a rank's tokens in the full sequence."""
        runs = [torch.arange(run.start, run.start + run.length, device=device) for run in self.segments[rank]]
        return torch.cat(runs)


def split_sequence(
    x: Tensor, dim: int = 1, *, balanced: bool = False, context: ParallelContext | None = None
) -> Tensor:
    """Return this rank's part of a tensor that every rank of the sequence group has in full. No communication.

    In backward the other parts of `x` get zeros here, so gradients of parameters before this call are partial. A
    parameter that is replicated over the sequence group is all-reduced over this group anyway.

    Args:
        x: The full tensor.
        dim: The sequence dimension.
        balanced: Give each rank an early and a late run, for causal attention; see `Parts`.
        context: Defaults to the global one.
    """
    size, at = sequence_rank(given_or_global(context))
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
    """All-gather the full tensor, in the order of the sequence; backward sums the gradients of all ranks.

    Args:
        x: This rank's part.
        dim: The sequence dimension.
        lengths: The length of every rank's part; by default the ranks exchange them.
        balanced: Whether the parts are those of split_sequence(balanced=True).
        context: Defaults to the global one.

    Collective over the sequence group.
    """
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
    """Return the positions in the full sequence of this rank's `length` tokens, for position embeddings.

    Collective over the sequence group if `lengths` is not given.
    """
    context = given_or_global(context)
    _, at = sequence_rank(context)
    return parts_of(length, lengths, balanced, context).positions(at, device)


def sequence_rank(context: ParallelContext) -> tuple[int, int]:
    """Return (size of the sequence group, this rank's index in it); (1, 0) without a sequence group."""
    if not context.is_initialized(ParallelMode.SEQUENCE):
        return 1, 0
    return context.get_world_size(ParallelMode.SEQUENCE), context.get_local_rank(ParallelMode.SEQUENCE)


def parts_of(length: int, lengths: Sequence[int] | None, balanced: bool, context: ParallelContext) -> Parts:
    """Return the parts of all ranks, given that this rank has `length` tokens.

    Without `lengths` the ranks exchange them: a small collective that synchronizes with the device.
    """
    size, at = sequence_rank(context)
    members = members_of(ParallelMode.SEQUENCE, context)
    if lengths is None and members is not None:
        lengths = [number for (number,) in wire.numbers_of_all([length], members, message_device(context.device))]
    if lengths is None:
        return Parts((length,), balanced)
    if len(lengths) != size or lengths[at] != length:
        raise LayoutError(
            f"lengths is {list(lengths)}, but the sequence group has {size} ranks, and this rank (number {at}) has "
            f"{length} tokens. Pass one length for each rank, or leave lengths out."
        )
    return Parts(tuple(lengths), balanced)


class SharedLengths:
    """The lengths of all ranks' parts, exchanged once per pass for all layers of a model.

    The first layer of a pass exchanges them. A pass ends when a layer is called a second time or, in forward, when
    layers are called out of order (pipeline stages may alternate). Only the order of calls determines this, so all
    ranks take part in the same exchanges.
    """

    def __init__(self) -> None:
        self._layers = 0
        self._lengths: tuple[int, ...] = ()
        self._called: list[int] = []
        self._pass = _FORWARD

    def join(self) -> int:
        """Register a layer and return its number."""
        self._layers += 1
        return self._layers

    def of(self, layer: int, length: int, context: ParallelContext) -> tuple[int, ...]:
        """Return the lengths of all parts, for the layer with this number; `length` is that of this rank's part."""
        # Activation checkpointing calls layers again inside a backward pass, in another order.
        this_pass = torch._C._current_graph_task_id()
        known = self._pass == this_pass and self._called and layer not in self._called
        if not known or (this_pass == _FORWARD and layer != self._called[-1] + 1):
            # Another layer may exchange in the recomputation than in forward, so selective checkpointing, which expects the
            # same operations in both, must not see this one.
            with hide_from_dispatch_modes():
                self._lengths = parts_of(length, None, False, context).lengths
            self._called, self._pass = [], this_pass
        self._called.append(layer)
        return self._lengths


def _lengths(total: int, size: int, balanced: bool) -> tuple[int, ...]:
    runs = _even(total, 2 * size if balanced else size)
    return tuple(runs[at] + runs[-1 - at] for at in range(size)) if balanced else tuple(runs)


def _even(total: int, count: int) -> list[int]:
    return [total // count + (at < total % count) for at in range(count)]


def _starts(lengths: Sequence[int]) -> list[int]:
    return list(accumulate(lengths, initial=0))[:-1]
