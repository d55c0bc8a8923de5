"""The `sync` section of a config, and a handler's own options, read into `SyncOptions`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch

from colonnade.engine.gradient_handler._options import SyncOptions
from colonnade.errors import ConfigError, did_you_mean, listed

_DTYPES = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "fp64": torch.float64,
    "float64": torch.float64,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
}


def read_options(settings: Mapping[str, Any]) -> SyncOptions:
    """`SyncOptions` from keys and values as they stand in a config; dtypes may be texts, None is the default."""
    known = [field.name for field in fields(SyncOptions)]
    for key in settings:
        if key not in known:
            raise ConfigError(
                f"unknown option {key!r} of a gradient handler; allowed: {listed(known)}.{did_you_mean(key, known)}"
            )
    values = {key: value for key, value in settings.items() if value is not None}
    if isinstance(values.get("reduce_dtype"), str):
        values["reduce_dtype"] = _dtype(values["reduce_dtype"])
    return SyncOptions(**values)


def _dtype(name: str) -> torch.dtype:
    if name not in _DTYPES:
        raise ConfigError(f"reduce_dtype={name!r}; allowed: {listed(_DTYPES)}.{did_you_mean(name, _DTYPES)}")
    return _DTYPES[name]
