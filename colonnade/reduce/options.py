"""How gradients are synchronised: the keys of `sync` in a config, which a named handler takes too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch

from colonnade.errors import ConfigError, did_you_mean, listed

_DTYPES = {
    "fp64": torch.float64,
    "float64": torch.float64,
    "fp32": torch.float32,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
}
HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class SyncOptions:
    """How gradients are synchronised; every default suits the device and the transport.

    `bucket_mb=None` is the size that suits the transport, `first_bucket_mb=None` (of the bucket that is full first)
    likewise. `reduce_dtype` is what they are reduced in: added in it where it is wider than they are, sent in it where it is
    narrower; stage 3 of ZeRO reads it too. `compress` ("bf16" or "fp16") is what they are sent in, beside a wider
    `reduce_dtype`. `fixed_order` adds in rank order, so that bits do not depend on bucket
    sizes. `shared_memory=True` is an error where it cannot be had; "auto" falls back.
    """

    bucket_mb: float | None = None
    first_bucket_mb: float | None = None
    overlap: bool | Literal["auto"] = "auto"
    reduce_dtype: torch.dtype | None = None
    compress: torch.dtype | None = None
    fixed_order: bool = False
    shared_memory: bool | Literal["auto"] = "auto"

    @classmethod
    def read(cls, settings: Mapping[str, Any]) -> SyncOptions:
        """From keys and values as they stand in a config; dtypes may be texts, None is the default."""
        known = [field.name for field in fields(cls)]
        for key in settings:
            if key not in known:
                raise ConfigError(
                    f"unknown option {key!r} of a gradient handler; allowed: {listed(known)}.{did_you_mean(key, known)}",
                    code="C003",
                )
        values = {key: value for key, value in settings.items() if value is not None}
        for key in ("reduce_dtype", "compress"):
            if isinstance(values.get(key), str):
                values[key] = _dtype(key, values[key])
        return cls(**values)

    def __post_init__(self) -> None:
        for name in ("bucket_mb", "first_bucket_mb"):
            size = getattr(self, name)
            if size is not None and not size > 0:
                raise ConfigError(f"{name} must be more than 0, not {size!r}", code="C003")
        for name in ("overlap", "shared_memory"):
            if getattr(self, name) not in (True, False, "auto"):
                raise ConfigError(f'{name} is True, False or "auto", not {getattr(self, name)!r}', code="C003")
        dtype = self.reduce_dtype
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ConfigError(f"reduce_dtype is a floating point dtype, not {dtype!r}", code="C003")
        if self.compress not in (None, *HALVES):
            raise ConfigError(f'compress is "bf16", "fp16" or None, not {self.compress!r}', code="C003")
        if self.compress is not None and dtype in HALVES and dtype is not self.compress:
            raise ConfigError(
                f"compress={self.compress} and reduce_dtype={dtype} are two dtypes to send in; give one of them, or a wider "
                f"reduce_dtype",
                code="C003",
            )

    def sum_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which gradients of `dtype` are added: never narrower; fp16 would overflow in its own."""
        least = torch.float32 if dtype is torch.float16 else _real(dtype)
        wanted = self.reduce_dtype or least
        return wanted if not dtype.is_complex and wanted.itemsize > least.itemsize else least

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which gradients of `dtype` are sent: never wider."""
        real, narrow = _real(dtype), self.narrow
        return narrow if narrow is not None and narrow.itemsize < real.itemsize else real

    @property
    def narrow(self) -> torch.dtype | None:
        """The half-precision dtype that wider gradients are sent in, if one was asked for."""
        return self.compress or (self.reduce_dtype if self.reduce_dtype in HALVES else None)


def _dtype(key: str, name: str) -> torch.dtype:
    known = [text for text, dtype in _DTYPES.items() if key != "compress" or dtype in HALVES]
    if name not in known:
        raise ConfigError(f"{key}={name!r}; allowed: {listed(known)}.{did_you_mean(name, known)}", code="C003")
    return _DTYPES[name]


def _real(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real() if dtype.is_complex else dtype
