"""What a stage holds and moves, by arithmetic: bytes per rank and per step, for any number of ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from colonnade.gradients.bucket import STAGING_BUFFERS
from colonnade.gradients.sums import HALVES


@dataclass(frozen=True)
class HeldBytes:
    """Bytes on one rank at the end of a backward pass, by what they are for."""

    parameters: float
    gradients: float
    state: float
    turns: float

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.state + self.turns


def bytes_held(
    stage: int, numel: int, ranks: int, *, width: int = 4, state: int = 8, master: int = 0, largest: int = 0
) -> HeldBytes:
    """What each of `ranks` holds of `numel` elements of `width` bytes with `state` bytes of optimizer state each.

    At stage 3 `width` is that of the shards: 4 with fp32 masters, which the shards are then. `master` is the width of a
    master copy (0: none). `largest` is the number of elements of the largest bucket
    (stage 2, whose buckets take turns in the memory of two).
    """
    per_rank = numel / ranks
    gradient_width = master or width
    return HeldBytes(
        parameters=width * (per_rank if stage == 3 else numel),
        gradients={
            0: width * numel,
            1: width * numel + (master * per_rank if master else 0),
            2: gradient_width * per_rank,
            3: width * per_rank,
        }[stage],
        state=(state + master) * (numel if stage == 0 else per_rank),
        turns=STAGING_BUFFERS * width * largest if stage == 2 else 0,
    )


def shard_dim(shape: Sequence[int], ranks: int) -> int:
    """Along which dimension stage 3 shards a parameter: the first, unless that is short and another can be cut evenly.

    FSDP2 takes on every rank the memory that the first rank needs: of [3, hidden, hidden] a third, on however many ranks.
    """
    if shape[0] % ranks == 0 or shape[0] // ranks >= 16:
        return 0
    return next((dim for dim, size in enumerate(shape) if size % ranks == 0), 0)


def bytes_moved(stage: int, numel: int, ranks: int, *, width: int = 4, passes: int = 1) -> float:
    """What one rank sends per step of `passes` backward passes, with ring collectives.

    Stages 0 and 1 sum once. Stage 2 sums at every pass (but under a pipeline), and stage 3 gathers parameters
    twice besides.
    """
    once = (ranks - 1) / ranks * numel * width
    return once * {0: 2, 1: 2, 2: passes + 1, 3: 3 * passes}[stage]


@torch.no_grad()
def make_fp32(parameters: Iterable[nn.Parameter]) -> None:
    """Give those of half precision fp32 values; they stay the same objects."""
    for parameter in parameters:
        if parameter.dtype in HALVES:
            grad, parameter.grad = parameter.grad, None
            parameter.data = parameter.data.float()
            parameter.grad = None if grad is None else grad.float()


def dtypes_of(parameter: Tensor) -> tuple[torch.dtype | None, torch.dtype | None]:
    """What a shard is gathered in, and what its gradient is reduced in; None: as it is."""
    found: tuple[torch.dtype | None, torch.dtype | None] = getattr(parameter, "fsdp_dtypes", (None, None))
    return found
