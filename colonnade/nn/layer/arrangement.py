"""`Arrangement`: how one tensor-parallel scheme shards activations and weights. The layers are written on top of it.

An activation has one of two spreads (shardings): *outer* between blocks, *inner* inside a block. A "column" weight maps
outer to inner, a "row" weight inner to outer. A custom scheme is a subclass, registered under the name of its tensor
mode.
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
from colonnade.nn.layer.spread import (
    Spread,
    Width,
    check_full_input,
    check_input,
    gather,
    mark_output,
    scatter,
    shard_sizes,
    size_of,
)
from colonnade.parallel.placement import Replicate, Shard, Spec
from colonnade.registry import Registry

Split = Literal["column", "row"]
Side = Literal["outer", "inner"]

ARRANGEMENT = Registry("arrangement", home="colonnade.nn.layer.modes")
"""Arrangements by tensor mode: '1d', '2d', '2.5d', '3d', and custom ones."""


class Arrangement(ABC):
    """How a tensor-parallel scheme shards activations and weights, and how it multiplies them.

    A `Spread` is the sharding of an activation: `outer` between blocks, `inner` inside a block. Weights are [out, in] as in
    torch, or [parts, out, in]: several weights sharded alike, such as query, key and value. A subclass sets `outer` and
    `inner` and implements `weight_modes`, `product` and `embed`.
    """

    outer: Spread
    inner: Spread
    uneven = False
    """Whether shards of a weight may differ in size."""

    multiplies_blocks = False
    """Whether a product is a single `multiply` of this rank's rows and its block of the weight, so that it may be in float8."""

    def __init__(self, context: ParallelContext, sequence_split: bool = False) -> None:
        self.context = context
        self.multiply: Callable[[Tensor, Tensor, Tensor | None], Tensor] = F.linear
        if sequence_split and not self.splits_sequence:
            raise ConfigError(
                f"{type(self).__name__} does not support sequence_split=True, because it already shards activations "
                "between blocks. Remove sequence_split, or use mode '1d', which replicates activations between "
                "blocks."
            )
        self.sequence_split = sequence_split

    splits_sequence = False
    """Whether `sequence_split=True` is supported."""

    @abstractmethod
    def weight_modes(self, split: Split) -> tuple[tuple[ParallelMode, ...], tuple[ParallelMode, ...]]:
        """Return (modes that shard the out dimension of a weight, modes that shard its in dimension), outermost first."""

    @abstractmethod
    def product(self, x: Tensor, weight: Tensor, split: Split) -> Tensor:
        """Multiply x by the transposed weight.

        A "column" weight maps the outer to the inner spread, a "row" weight the reverse.
        """

    @abstractmethod
    def embed(self, tokens: Tensor, weight: Tensor, rows: int, padding: int | None) -> Tensor:
        """Look up replicated tokens in a weight with `rows` rows that is sharded like a "column" weight.

        Returns:
            The embeddings, in the spread of activations between blocks.
        """

    def enter(self, x: Tensor) -> Tensor:
        """Convert an activation between blocks to the full input of this rank's rows of a "column" weight.

        Raises for schemes that do not multiply by single blocks, such as SUMMA.
        """
        raise PlacementError(
            f"{type(self).__name__} does not multiply a full input by one block of the weight. Use mode '1d', or a "
            "layer that supports the current mode."
        )

    @property
    def partial_modes(self) -> tuple[ParallelMode, ...]:
        """The modes that replicate weights but split the batch, so that gradients of weights are partial."""
        return ()

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, split: Split) -> Tensor:
        """Return the product plus the bias, which is sharded like the output."""
        y = self.product(x, weight, split)
        return y if bias is None else y + bias

    def target(self, split: Split) -> Spread:
        """Return the spread (sharding) of the output of a "column" or "row" weight."""
        return self.inner if split == "column" else self.outer

    def side(self, side: Side) -> Spread:
        """Return the spread (sharding) of activations between blocks ("outer") or inside a block ("inner")."""
        return self.outer if side == "outer" else self.inner

    def weight_placement(self, split: Split, parts: int = 1) -> dict[ParallelMode, Spec]:
        """Return the placement of a "column" or "row" weight of [out, in], or with several `parts`, [parts, out, in]."""
        out_modes, in_modes = self.weight_modes(split)
        first = 0 if parts == 1 else 1
        placed: dict[ParallelMode, Spec] = {mode: Shard(first) for mode in out_modes}
        placed.update({mode: Shard(first + 1) for mode in in_modes})
        placed.update({mode: Replicate(owes="sum") for mode in self.partial_modes})
        return placed

    def take_weight(self, full: Tensor, split: Split, unit: int = 1) -> Tensor:
        """Return this rank's block of a full weight. The inner dimension is sharded in multiples of `unit`."""
        out_modes, in_modes = self.weight_modes(split)
        block = self._take(full, -2, out_modes, unit if split == "column" else 1, "out_features")
        return self._take(block, -1, in_modes, unit if split == "row" else 1, "in_features")

    def take_along_hidden(self, full: Tensor, side: Side, unit: int = 1) -> Tensor:
        """Return this rank's shard of a parameter whose last dimension is the hidden dimension."""
        mode = self.side(side).hidden
        return full if mode is None else self._take(full, -1, (mode,), unit, "features")

    def first_row(self, rows: int) -> int:
        """Return the index of this rank's first row in a "column" weight of `rows` rows."""
        start, length = 0, rows
        for mode in self.weight_modes("column")[0]:
            sizes = self._sizes(length, mode, 1, "rows")
            at = self.context.get_local_rank(mode)
            start, length = start + sum(sizes[:at]), sizes[at]
        return start

    def hidden_sizes(self, length: int, side: Side, unit: int = 1) -> tuple[int, ...]:
        """Return the hidden size of each shard of an activation with the full hidden size `length`."""
        mode = self.side(side).hidden
        return (length,) if mode is None else self._sizes(length, mode, unit, "features")

    def is_split(self, side: Side) -> bool:
        """Return whether activations are sharded over several ranks on this `side`: between blocks ("outer") or inside a block
        ("inner").
        """
        return any(size_of(mode, self.context) > 1 for mode in self.side(side).modes)

    def __deepcopy__(self, memo: Any) -> Arrangement:
        """The same object: a copy of a module has the same process groups."""
        return self

    def __repr__(self) -> str:
        return f"{type(self).__name__}({'sequence_split=True' if self.sequence_split else ''})"

    def _take(self, x: Tensor, dim: int, modes: tuple[ParallelMode, ...], unit: int, name: str) -> Tensor:
        for mode in modes:
            sizes = self._sizes(x.shape[dim], mode, unit, name)
            at = self.context.get_local_rank(mode)
            # Only the first mode splits heads; a further one splits the features of the block.
            x, unit = x.narrow(dim, sum(sizes[:at]), sizes[at]), 1
        return x

    def _sizes(self, length: int, mode: ParallelMode, unit: int, name: str) -> tuple[int, ...]:
        return shard_sizes(length, mode, self.context, name, unit, even=not self.uneven)


class Whole(Arrangement):
    """No tensor parallelism: weights and activations are full on every rank."""

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
    """Return the arrangement for the tensor mode of the context; `Whole` without a tensor mode.

    Args:
        context: The context; defaults to the global one.
        sequence_split: Shard activations between blocks along the sequence (Megatron's sequence parallelism, mode '1d').
            Defaults to `parallel.tensor.sequence_split` of the config.
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
        raise PlacementError(f"the arrangement of mode {mode!r} is {built!r}. Inherit colonnade.nn.layer.Arrangement.")
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
    """Return this rank's shard of a replicated x; backward all-gathers the gradients.

    Args:
        x: The activation, with the same values on all ranks of the tensor group; the batch is dimension 0.
        sequence: The sequence dimension; None if x has none.
        hidden: The hidden dimension; None if x has none.
        unit: The hidden dimension is sharded in multiples of `unit`, for example the head size.
        side: The spread of the result: "outer" (between blocks) or "inner" (inside a block).
        arrangement: Defaults to that of the global context.
    """
    here = arrangement or arrange()
    check_full_input("partition_input", here, x)
    shard = scatter(x, here.side(side), here.context, (0, sequence, hidden), Width(None, unit, here.uneven))
    return mark_output("partition_input", here, shard, here.side(side))


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
    """All-gather an activation over the tensor group; backward takes this rank's shard of the gradient.

    The following layers must compute the same on all of these ranks.

    Args:
        x: The activation.
        sequence: The sequence dimension; None if x has none.
        hidden: The hidden dimension; None if x has none.
        features: The full hidden size; required if shards differ in size.
        unit: The hidden dimension is sharded in multiples of it.
        side: The spread of x; the logits of a `Classifier` are "inner".
        arrangement: Defaults to that of the global context.
    """
    here = arrangement or arrange()
    check_input("gather_output", here, x, side)
    full = gather(x, here.side(side), here.context, (0, sequence, hidden), Width(features, unit, here.uneven))
    return mark_output("gather_output", here, full, Spread())


def unsplit_sequence(x: Tensor, *, arrangement: Arrangement | None = None) -> Tensor:
    """All-gather an activation of the outer spread along the sequence; without `sequence_split`, return it unchanged.

    The following layers (pooling, a head) must compute the same on all ranks: build them with
    `arrange(sequence_split=False)`.
    """
    here = arrangement or arrange()
    check_input("unsplit_sequence", here, x, "outer")
    unsplit = gather(x, Spread(sequence=here.outer.sequence), here.context)
    return mark_output("unsplit_sequence", here, unsplit, replace(here.outer, sequence=None))


def masked_rows(tokens: Tensor, weight: Tensor, start: int, padding: int | None) -> Tensor:
    """Return one row of `weight` for each token; zeros for tokens of other ranks.

    `start` is the vocabulary index of the first row of `weight`.
    """
    rows = len(weight)
    if rows == 0:
        # A rank without rows stays in the graph, so that the weight gets an (empty) gradient.
        return weight.new_zeros((*tokens.shape, weight.shape[1])) + weight.sum()
    local = tokens - start
    outside = (local < 0) | (local >= rows)
    inside = padding - start if padding is not None and 0 <= padding - start < rows else None
    found = F.embedding(local.masked_fill(outside, 0), weight, inside)
    return found.masked_fill(outside.unsqueeze(-1), 0.0)
