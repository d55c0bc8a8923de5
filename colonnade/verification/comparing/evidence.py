"""What a parallel run did and what one process did on the same weights and batches, side by side.

Plain data: it is gathered or read from files, and compared with no process group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class Part:
    """What one rank holds of a whole tensor. `positions` are the places of its elements in the flat whole; None: all, in order."""

    rank: int
    value: Tensor
    positions: Tensor | None = None


@dataclass(frozen=True)
class Compared:
    """One tensor (or number) of the reference, and what the ranks hold of it.

    `spread` is how far the reference moves (2-norm) when its weights are changed by one ulp: the noise that rounding alone makes.
    `terms` is how many terms each element sums, at most.
    """

    truth: Tensor
    found: Sequence[Part]
    spread: float = 0.0
    terms: int = 1


@dataclass(frozen=True)
class GradientEvidence:
    """A parameter's gradient in one step: after all handlers, and what it was made of."""

    total: Compared
    """After the handlers, before clipping."""
    raw: Sequence[Sequence[Part]] = ()
    """For each pass (micro-batch) of the step: what each rank's backward gave, before anything was reduced."""
    truth_of_passes: Sequence[Tensor] = ()
    """For each pass: the reference's gradient of that pass, weighted as in the total, so that these add up to it."""
    truth_of_shards: Sequence[Tensor] = ()
    """For each share of the batch that ranks see apart: the reference's gradient of the mean over that share alone."""
    clipped: Compared | None = None


@dataclass(frozen=True)
class StepEvidence:
    """One step of both runs. Numbers of the ranks are by rank; None: that rank has none (an earlier pipeline stage, say)."""

    loss: float
    found_loss: Sequence[float | None]
    gradients: Mapping[str, GradientEvidence]
    weights: Mapping[str, Compared]
    buffers: Mapping[str, Compared] = field(default_factory=dict)
    activations: Mapping[str, Compared] = field(default_factory=dict)
    """By name of the module, in the order of the reference's forward pass."""
    recomputed: Mapping[str, Compared] = field(default_factory=dict)
    """What modules gave that ran again during the backward pass: it must be what they gave the first time."""
    norm: float | None = None
    found_norm: Sequence[float | None] = ()
    norms: Mapping[str, float] = field(default_factory=dict)
    """By group, layer or parameter, as `engine.grad_norms()` names them."""
    found_norms: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    loss_spread: float = 0.0


@dataclass(frozen=True)
class ParameterInfo:
    """What the run says of a parameter: its placement, and the ledger's lines for it."""

    placement: str = "replicated"
    ledger: Sequence[str] = ()
    owed: Sequence[tuple[str, tuple[int, ...], float]] = ()
    """(mode, ranks, divisor) of each sum that its gradient owes, on the first rank that holds it."""
    tied: Sequence[str] = ()
    """The other names of the same weight."""


@dataclass(frozen=True)
class Evidence:
    """The whole comparison. `groups` are the groups of every mode with more than one rank in a group."""

    world_size: int
    groups: Mapping[str, Sequence[Sequence[int]]]
    distinct_data: Sequence[str]
    """The modes whose ranks see distinct data."""
    parameters: Mapping[str, ParameterInfo]
    weights_at_start: Mapping[str, Compared]
    steps: Sequence[StepEvidence]
    dtype: str = "float64"
    accumulation: int = 1
    max_norm: float | None = None
    norm_type: float = 2.0
    notes: Sequence[str] = ()
    """What was changed for the comparison: dropout set to 0, say."""
    resting_apart: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Of each module that trains on some ranks and is in evaluation mode on others: those."""
    cut_apart: Sequence[str] = ()
    """The modes of which each rank took its part of a batch of its own, where all should cut the same one."""
    masks_apart: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Of each module that drops: the ranks that drop other elements of what they hold alike."""
