"""Arrangement: what one tensor mode does with activations and weights. The layers are written once, on top of it.

An activation has one of two spreads: *outer* between blocks, *inner* inside one. A "column" weight leads from
outer to inner, a "row" weight back. A tensor mode of one's own is a subclass, registered by the mode's name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

from torch import Tensor
from torch.nn import functional as F

from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.core import given_or_global
from colonnade.errors import ConfigError, PlacementError
from colonnade.nn.layer.spread import Spread, Width, cut, gather, gives, scatter, size_of, takes, takes_whole
from colonnade.parallel.placement import Replicate, Shard, Spec
from colonnade.registry import Registry

Split = Literal["column", "row"]
Side = Literal["outer", "inner"]

ARRANGEMENT = Registry("arrangement", home="colonnade.nn.layer.modes")
"""Arrangements by tensor mode: '1d', '2d', '2.5d', '3d', and yours."""


class Arrangement(ABC):
    """How a tensor mode splits activations and weights, and how it multiplies them.

    Weights are [out, in] as torch has them, or [parts, out, in]: parts that are split alike, such as query, key
    and value. A subclass sets `outer` and `inner` and says the rest in four methods.
    """

    outer: Spread
    inner: Spread
    uneven = False
    """Whether a weight may be cut into uneven parts."""

    multiplies_blocks = False
    """Whether a product is one `multiply` of this rank's rows and block of the weight, which may then be in float8."""

    def __init__(self, context: ParallelContext, sequence_split: bool = False) -> None:
        self.context = context
        self.multiply: Callable[[Tensor, Tensor, Tensor | None], Tensor] = F.linear
        if sequence_split and not self.splits_sequence:
            raise ConfigError(
                f"sequence_split=True: {type(self).__name__} splits activations already; sequence splitting is for "
                f"mode '1d', whose activations between blocks are whole"
            )
        self.sequence_split = sequence_split

    splits_sequence = False
    """Whether `sequence_split=True` means something here."""

    @abstractmethod
    def weight_modes(self, split: Split) -> tuple[tuple[ParallelMode, ...], tuple[ParallelMode, ...]]:
        """The modes that cut the out and the in dimension of a weight, outermost first."""

    @abstractmethod
    def product(self, x: Tensor, weight: Tensor, split: Split) -> Tensor:
        """x times the transposed weight: from the source's spread to the target's."""

    @abstractmethod
    def embed(self, tokens: Tensor, weight: Tensor, rows: int, padding: int | None) -> Tensor:
        """The rows of a weight of so many rows, lying as a "column" one, for whole tokens; in the outer spread."""

    def enter(self, x: Tensor) -> Tensor:
        """What this rank's rows of a "column" weight are multiplied with, out of the outer spread, where that is all it takes."""
        raise PlacementError(
            f"under {type(self).__name__} a product is more than that of this rank's block and an input"
        )

    @property
    def summed(self) -> tuple[ParallelMode, ...]:
        """The modes on which weights are whole and each rank sees other rows of the batch."""
        return ()

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, split: Split) -> Tensor:
        """The product, and the bias in the target's spread."""
        y = self.product(x, weight, split)
        return y if bias is None else y + bias

    def target(self, split: Split) -> Spread:
        """The spread that a weight gives."""
        return self.inner if split == "column" else self.outer

    def side(self, side: Side) -> Spread:
        """A spread by its name."""
        return self.outer if side == "outer" else self.inner

    def weight_placement(self, split: Split, parts: int = 1) -> dict[ParallelMode, Spec]:
        """The placement of a weight."""
        out_modes, in_modes = self.weight_modes(split)
        first = 0 if parts == 1 else 1
        placed: dict[ParallelMode, Spec] = {mode: Shard(first) for mode in out_modes}
        placed.update({mode: Shard(first + 1) for mode in in_modes})
        placed.update({mode: Replicate(owes="sum") for mode in self.summed})
        return placed

    def take_weight(self, whole: Tensor, split: Split, unit: int = 1) -> Tensor:
        """This rank's block of a whole weight. The dimension that is inside is cut in multiples of `unit`."""
        out_modes, in_modes = self.weight_modes(split)
        block = self._take(whole, -2, out_modes, unit if split == "column" else 1, "out_features")
        return self._take(block, -1, in_modes, unit if split == "row" else 1, "in_features")

    def take_along_hidden(self, whole: Tensor, side: Side, unit: int = 1) -> Tensor:
        """This rank's part of a parameter whose last dimension is the hidden one."""
        mode = self.side(side).hidden
        return whole if mode is None else self._take(whole, -1, (mode,), unit, "features")

    def first_row(self, rows: int) -> int:
        """Where this rank's rows of a "column" weight with so many rows begin."""
        start, length = 0, rows
        for mode in self.weight_modes("column")[0]:
            sizes = self._sizes(length, mode, 1, "rows")
            at = self.context.get_local_rank(mode)
            start, length = start + sum(sizes[:at]), sizes[at]
        return start

    def hidden_sizes(self, length: int, side: Side, unit: int = 1) -> tuple[int, ...]:
        """The lengths of the hidden parts of an activation."""
        mode = self.side(side).hidden
        return (length,) if mode is None else self._sizes(length, mode, unit, "features")

    def is_split(self, side: Side) -> bool:
        """Whether ranks hold different parts of an activation."""
        return any(size_of(mode, self.context) > 1 for mode in self.side(side).modes)

    def __deepcopy__(self, memo: Any) -> Arrangement:
        """The same: a copy of a module is in the same world."""
        return self

    def __repr__(self) -> str:
        return f"{type(self).__name__}({'sequence_split=True' if self.sequence_split else ''})"

    def _take(self, x: Tensor, dim: int, modes: tuple[ParallelMode, ...], unit: int, what: str) -> Tensor:
        for mode in modes:
            sizes = self._sizes(x.shape[dim], mode, unit, what)
            at = self.context.get_local_rank(mode)
            x, unit = x.narrow(dim, sum(sizes[:at]), sizes[at]), 1
        return x

    def _sizes(self, length: int, mode: ParallelMode, unit: int, what: str) -> tuple[int, ...]:
        return cut(length, mode, self.context, what, unit, even=not self.uneven)


class Whole(Arrangement):
    """No tensor parallelism: every rank has whole weights and activations."""

    outer = Spread()
    inner = Spread()
    splits_sequence = multiplies_blocks = True

    def weight_modes(self, split: Split) -> tuple[tuple[ParallelMode, ...], tuple[ParallelMode, ...]]:
        return (), ()

    def product(self, x: Tensor, weight: Tensor, split: Split) -> Tensor:
        return self.linear(x, weight, None, split)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, split: Split) -> Tensor:
        return self.multiply(x, weight.flatten(0, -2), bias)

    def enter(self, x: Tensor) -> Tensor:
        return x

    def embed(self, tokens: Tensor, weight: Tensor, rows: int, padding: int | None) -> Tensor:
        return F.embedding(tokens, weight, padding)


def arrange(context: ParallelContext | None = None, sequence_split: bool | None = None) -> Arrangement:
    """The arrangement of a context's tensor mode; `Whole` where there is none.

    `sequence_split` left out is `parallel.tensor.sequence_split` of the config, and False if that is not set.
    """
    context = given_or_global(context)
    tensor = (context.config.get("parallel") or {}).get("tensor") if context.is_launched else None
    section: Mapping[str, Any] = tensor if isinstance(tensor, Mapping) else {}
    wanted = section.get("sequence_split", False) if sequence_split is None else sequence_split
    mode = str(section.get("mode") or "").lower()
    if not mode or mode not in ARRANGEMENT:
        return Whole(context, bool(wanted))
    built = ARRANGEMENT.get_module(mode)(context, bool(wanted))
    if not isinstance(built, Arrangement):
        raise PlacementError(f"the arrangement of mode {mode!r} is {built!r}; inherit colonnade.nn.layer.Arrangement")
    return built


def partition_input(
    x: Tensor,
    *,
    sequence: int | None = -2,
    hidden: int | None = -1,
    unit: int = 1,
    side: Side = "outer",
    arrangement: Arrangement | None = None,
) -> Tensor:
    """This rank's part of a whole x, the same on all ranks of the tensor group; backward joins the gradients.

    `sequence` and `hidden` say where those dimensions are, None where x has none; the batch is dimension 0.
    """
    here = arrangement or arrange()
    takes_whole("partition_input", here, x)
    part = scatter(x, here.side(side), here.context, (0, sequence, hidden), Width(None, unit, here.uneven))
    return gives("partition_input", here, part, here.side(side))


def gather_output(
    x: Tensor,
    *,
    sequence: int | None = -2,
    hidden: int | None = -1,
    features: int | None = None,
    unit: int = 1,
    side: Side = "outer",
    arrangement: Arrangement | None = None,
) -> Tensor:
    """The whole of an activation, on every rank of the tensor group; backward takes this rank's part.

    What follows must be the same on all of them. `features` is the whole hidden size; it is needed where the parts
    are uneven. The logits of a `Classifier` are of side "inner".
    """
    here = arrangement or arrange()
    takes("gather_output", here, x, side)
    whole = gather(x, here.side(side), here.context, (0, sequence, hidden), Width(features, unit, here.uneven))
    return gives("gather_output", here, whole, Spread())


def unsplit_sequence(x: Tensor, *, arrangement: Arrangement | None = None) -> Tensor:
    """An activation of the outer spread with its whole sequence; as it is unless `sequence_split`.

    What follows (pooling, a head) must be the same on all ranks: build it with `arrange(sequence_split=False)`.
    """
    here = arrangement or arrange()
    takes("unsplit_sequence", here, x, "outer")
    unsplit = gather(x, Spread(sequence=here.outer.sequence), here.context)
    return gives("unsplit_sequence", here, unsplit, replace(here.outer, sequence=None))


def masked_rows(tokens: Tensor, weight: Tensor, start: int, padding: int | None) -> Tensor:
    """The rows of `weight` for the tokens that are among start, start + 1, ...; zeros for the others."""
    rows = len(weight)
    if rows == 0:
        return weight.new_zeros((*tokens.shape, weight.shape[1])) + weight.sum()
    local = tokens - start
    outside = (local < 0) | (local >= rows)
    inside = padding - start if padding is not None and 0 <= padding - start < rows else None
    found = F.embedding(local.masked_fill(outside, 0), weight, inside)
    return found.masked_fill(outside.unsqueeze(-1), 0.0)
