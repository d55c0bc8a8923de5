"""What a gradient reduction is and how it may be done: plain data that handlers hand to the reducer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from colonnade.errors import ConfigError, did_you_mean, listed

Callback = Callable[[Tensor, tuple[str, ...]], None]
"""Called once per bucket and step with the reduced flat buffer and the names of the parameters in it."""

WIRE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class GroupReduction:
    """One reduction that is owed: final gradient = sum over `ranks` / `divisor`.

    `ranks` are global and this rank is among them; `group` is the torch group of exactly these ranks, or
    None where `ranks` is this rank alone. The parameters stand in the same order on every rank of `ranks`;
    their names may differ (a weight that is tied between pipeline stages has one name on each).
    """

    names: tuple[str, ...]
    parameters: tuple[nn.Parameter, ...]
    ranks: tuple[int, ...]
    group: ProcessGroup | None
    divisor: float
    between_stages: bool = False
    """Whether the ranks are at several pipeline stages: they come to this sum at unlike moments of a step, and one that
    waited for another in the middle of it would hold up the pipeline. So it is never started early."""


@dataclass(frozen=True)
class PowerSGD:
    """Low-rank compression: `rank` columns per matrix, from step `start_step` on (exact sums before it)."""

    rank: int = 4
    start_step: int = 10

    def __post_init__(self) -> None:
        if self.rank < 1 or self.start_step < 0:
            raise ConfigError(f"powersgd needs rank >= 1 and start_step >= 0, not {self}")


Compression = torch.dtype | PowerSGD | None


@dataclass(frozen=True)
class SyncOptions:
    """How gradients are synchronised; every default is chosen by the reducer for the device and transport.

    `bucket_mb=None` is the size that suits the transport. `compress` is "bf16", "fp16", "powersgd" or
    `dict(type="powersgd", rank=4, start_step=10)`. `fixed_order` sums in rank order, so that bits do not
    depend on bucket sizes. `shared_memory=True` is an error where it cannot be had; "auto" falls back.
    """

    bucket_mb: float | None = None
    first_bucket_mb: float = 1.0
    overlap: bool | Literal["auto"] = "auto"
    reduce_dtype: torch.dtype | None = None
    compress: str | Mapping[str, Any] | PowerSGD | None = None
    fixed_order: bool = False
    shared_memory: bool | Literal["auto"] = "auto"
    callback: Callback | None = None

    def __post_init__(self) -> None:
        for name in ("bucket_mb", "first_bucket_mb"):
            size = getattr(self, name)
            if size is not None and not size > 0:
                raise ConfigError(f"{name} must be more than 0, not {size!r}")
        for name in ("overlap", "shared_memory"):
            if getattr(self, name) not in (True, False, "auto"):
                raise ConfigError(f'{name} is True, False or "auto", not {getattr(self, name)!r}')
        if self.reduce_dtype is not None and not self.reduce_dtype.is_floating_point:
            raise ConfigError(f"reduce_dtype is a floating point dtype, not {self.reduce_dtype}")
        # A mapping becomes a record, so that options can be compared and hashed.
        if isinstance(self.compress, Mapping):
            object.__setattr__(self, "compress", _from_mapping(self.compress))
        elif isinstance(self.compress, str) and self.compress not in WIRE_DTYPES:
            object.__setattr__(self, "compress", _from_mapping({"type": self.compress}))

    @property
    def compression(self) -> Compression:
        """The dtype on the wire, the PowerSGD settings, or None."""
        if isinstance(self.compress, str):
            return WIRE_DTYPES[self.compress]
        return self.compress if isinstance(self.compress, PowerSGD) else None


def _from_mapping(given: Mapping[str, Any]) -> str | PowerSGD:
    settings = dict(given)
    kind = settings.pop("type", None)
    known = [*WIRE_DTYPES, "powersgd"]
    if kind not in known:
        raise ConfigError(f"compress is one of {listed(known)}, not {kind!r}.{did_you_mean(str(kind), known)}")
    allowed = [field.name for field in fields(PowerSGD)] if kind == "powersgd" else []
    for key in settings:
        if key not in allowed:
            raise ConfigError(f"{kind} takes {listed(allowed)}, not {key!r}.{did_you_mean(key, allowed)}")
    return PowerSGD(**settings) if kind == "powersgd" else kind
