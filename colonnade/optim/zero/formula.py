"""What a stage holds and moves, by arithmetic: bytes per rank and per step, for any number of ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from colonnade.errors import ConfigError
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


# --- The `zero` section of a config ---


@dataclass(frozen=True)
class ZeroSettings:
    """What is sharded (`stage`) and how.

    All stages read `offload` and `master_weights` (the optimizer steps on fp32 weights).
    Stages 1 and 2 read `reduce_scatter` (False, stage 1 only: every rank gets the whole gradient back), `bucket_mb` and
    `gather_ahead` (parameters are gathered while the next forward pass runs).
    Stage 3 reads `prefetch` (how many modules are gathered ahead), `replicate` (the axis, beside
    data, over which shards are replicas), `wrap` (patterns of module names) and `reshard` (give
    parameters back after their forward pass). `gather_dtype` and `reduce_dtype` (stage 3) come from other sections:
    what fp32 weights are gathered in, and what gradients are reduced in.
    """

    stage: int = 0
    reduce_scatter: bool = True
    offload: bool = False
    bucket_mb: float | None = None
    gather_ahead: bool = False
    prefetch: int = 0
    master_weights: bool = True
    replicate: str | None = None
    wrap: tuple[str, ...] = ()
    reshard: bool = True
    gather_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None

    @classmethod
    def read(cls, given: Any) -> ZeroSettings:
        """From the value of the `zero` key: nothing, a stage, or a dict."""
        if given is None or isinstance(given, int):
            return cls(stage=int(given or 0))
        values: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
        if "offload" in values:
            values["offload"] = _offload(values["offload"])
        if "prefetch" in values:
            values["prefetch"] = int(values["prefetch"])
        if "wrap" in values:
            wrap = values["wrap"]
            values["wrap"] = (wrap,) if isinstance(wrap, str) else tuple(wrap)
        settings = cls(**values)
        settings._check(values)
        return settings

    def _check(self, given: Mapping[str, Any]) -> None:
        only = {3: ("replicate", "wrap", "reshard", "prefetch"), 1: ("reduce_scatter",)}
        for stage, keys in only.items():
            for key in keys:
                if key in given and self.stage != stage and not (key == "reduce_scatter" and self.reduce_scatter):
                    raise ConfigError(
                        f"zero.{key}={given[key]!r} is for stage {stage}, not for stage {self.stage}", code="C003"
                    )
        if self.stage == 3:
            for key in ("bucket_mb", "gather_ahead"):
                if key in given:
                    raise ConfigError(
                        f"zero.{key} is for stages 1 and 2: at stage 3, FSDP2 groups by module", code="C003"
                    )


def _offload(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if value == "cpu":
        return True
    raise ConfigError(f"zero.offload={value!r}; allowed are True, False and 'cpu'", code="C003")


def dtypes_of(parameter: Tensor) -> tuple[torch.dtype | None, torch.dtype | None]:
    """What a shard is gathered in, and what its gradient is reduced in; None: as it is."""
    found: tuple[torch.dtype | None, torch.dtype | None] = getattr(parameter, "fsdp_dtypes", (None, None))
    return found


@torch.no_grad()
def make_fp32(parameters: Iterable[nn.Parameter]) -> None:
    """Give those of half precision fp32 values; they stay the same objects."""
    for parameter in parameters:
        if parameter.dtype in HALVES:
            grad, parameter.grad = parameter.grad, None
            parameter.data = parameter.data.float()
            parameter.grad = None if grad is None else grad.float()
