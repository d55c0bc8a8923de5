"""The `zero` section of a config, read into a record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from colonnade.errors import ConfigError


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
