"""Formulas for ZeRO: memory and communication per rank and step of every stage, for any number of ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from colonnade.gradients.bucket import STAGING_BUFFERS
from colonnade.gradients.sums import HALVES


@dataclass(frozen=True)
class HeldBytes:
    """The memory of one rank at the end of a backward pass, in bytes by purpose; `turns` is the staging memory of stage 2."""

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
    """Compute the memory of each rank at the end of a backward pass.

    Args:
        stage: The ZeRO stage; 0 for plain data parallelism.
        numel: The number of elements of all parameters.
        ranks: The number of ranks over which state is sharded.
        width: Bytes of an element of the parameters. At stage 3, of the shards: 4 with fp32 master weights.
        state: Bytes of optimizer state per element.
        master: Bytes of an element of a master copy; 0 for none.
        largest: Elements of the largest bucket, for the staging memory of stage 2.
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
    """The dimension along which stage 3 shards a parameter: the first, unless it is short and another divides evenly.

    FSDP2 allocates on every rank the memory that the first rank needs. For the shape [3, hidden, hidden], sharding dimension 0
    would therefore take a third of the tensor per rank, on any number of ranks.
    """
    if shape[0] % ranks == 0 or shape[0] // ranks >= 16:
        return 0
    return next((dim for dim, size in enumerate(shape) if size % ranks == 0), 0)


def bytes_moved(stage: int, numel: int, ranks: int, *, width: int = 4, passes: int = 1) -> float:
    """Bytes that one rank sends per step of `passes` backward passes, with ring collectives.

    Stages 0 and 1 reduce once. Stage 2 reduces in every pass (except with a pipeline). Stage 3 also all-gathers parameters twice
    in every pass.
    """
    once = (ranks - 1) / ranks * numel * width
    return once * {0: 2, 1: 2, 2: passes + 1, 3: 3 * passes}[stage]


@torch.no_grad()
def make_fp32(parameters: Iterable[nn.Parameter]) -> None:
    """Convert half-precision parameters and their gradients to fp32; the parameters stay the same objects."""
    for parameter in parameters:
        if parameter.dtype in HALVES:
            grad, parameter.grad = parameter.grad, None
            parameter.data = parameter.data.float()
            parameter.grad = None if grad is None else grad.float()


def dtypes_of(parameter: Tensor) -> tuple[torch.dtype | None, torch.dtype | None]:
    """The dtypes in which FSDP2 all-gathers a parameter and reduce-scatters its gradient; None if unchanged or unknown."""
    found: tuple[torch.dtype | None, torch.dtype | None] = getattr(parameter, "fsdp_dtypes", (None, None))
    return found
