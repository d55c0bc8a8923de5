"""What the config asks for: the dtype of the forward pass, and whether the optimizer steps on fp32 weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import nn

from colonnade.engine.precision.scaler import LossScaler, scaler_options
from colonnade.errors import ConfigError
from colonnade.optim.zero.fsdp import make_fp32


@dataclass(frozen=True)
class Precision:
    """What the config asks for: the autocast dtype (None: off), and the settings of a loss scaler (None: off)."""

    dtype: torch.dtype | None = None
    scaler: Mapping[str, Any] | None = None
    master_weights: bool = True
    """Whether the optimizer steps on fp32 weights."""

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Precision:
        """From the `fp16` and `bf16` keys; `master_weights` may stand under `zero` as well."""
        fp16, bf16, masters = config.get("fp16"), config.get("bf16"), _masters(config)
        if isinstance(fp16, Mapping) and (not fp16.get("enabled", True) or fp16.get("mode", "any") is None):
            fp16 = None
        if fp16:
            settings = dict(fp16) if isinstance(fp16, Mapping) else {}
            return cls(torch.float16, {key: value for key, value in settings.items() if value is not None}, masters)
        return cls(torch.bfloat16 if bf16 else None, None, masters)

    def apply(self, model: nn.Module, device: torch.device, stage: int) -> None:
        """Run the model's forward passes in the chosen dtype, beside this stage of ZeRO.

        With master weights (the default) the optimizer steps on fp32: parameters are fp32, and autocast casts them where
        it pays. Those of half precision are made fp32 here, but where ZeRO keeps an fp32 copy of its own. Without,
        parameters are cast, and the optimizer steps on what the model computes with.
        """
        if self.dtype is None:
            return
        if not self.master_weights:
            model.to(self.dtype)
        elif stage == 0:
            make_fp32(model.parameters())
        _check_castable(model, self.dtype)
        for module in model if isinstance(model, nn.ModuleList) else [model]:
            _autocast_module(module, device.type, self.dtype)

    def undo(self, *modules: Any) -> None:
        """Give modules their own forward pass back; of others, and of None, this does nothing."""
        for module in modules:
            for one in module if isinstance(module, nn.ModuleList) else [module]:
                if getattr(type(one), "_autocasts", False):
                    one.__class__ = type(one).__mro__[1]

    def around(self, criterion: Any, device: torch.device) -> Any:
        """The criterion under the same rule, which takes most losses in fp32 whatever the model's output is."""
        if self.dtype is None or criterion is None:
            return criterion
        if isinstance(criterion, nn.Module):
            return _autocast_module(criterion, device.type, self.dtype)
        return _autocast(criterion, device.type, self.dtype)

    def build_scaler(self, device: torch.device) -> LossScaler | None:
        """The loss scaler of fp16; bf16 has the range of fp32 and needs none."""
        return LossScaler(device, **scaler_options(self.scaler)) if self.scaler is not None else None


def _masters(config: Mapping[str, Any]) -> bool:
    """`master_weights` has one meaning, whichever section it stands in."""
    sections = {key: config.get(key) for key in ("bf16", "zero")}
    given = {
        key: one["master_weights"]
        for key, one in sections.items()
        if isinstance(one, Mapping) and "master_weights" in one
    }
    if len(set(given.values())) > 1:
        raise ConfigError(
            f"bf16.master_weights={given['bf16']} and zero.master_weights={given['zero']}: both say whether the optimizer "
            f"steps on fp32 weights. Give one of them, or both the same value.",
            code="C003",
        )
    return bool(next(iter(given.values()), True))


def _check_castable(model: nn.Module, dtype: torch.dtype) -> None:
    """Refuse a model in float64: autocast leaves that as it is, so the config would have no effect."""
    floating = {name: p.dtype for name, p in model.named_parameters() if p.is_floating_point()}
    if floating and all(found is torch.float64 for found in floating.values()):
        key = "bf16" if dtype is torch.bfloat16 else "fp16"
        raise ConfigError(
            f"{key} has no effect on this model: {next(iter(floating))} and all its other parameters are float64, which "
            f"autocast leaves as they are. Pass model.float(), or leave {key} out.",
            code="C003",
        )


def _autocast_module(module: nn.Module, device_type: str, dtype: torch.dtype) -> nn.Module:
    """Let the module's forward pass run under autocast.

    By a class of its own, not by a method on the instance: that would belong to this module in a copy of it too, and
    keep the module alive.
    """
    if "forward" in vars(module):
        module.forward = _autocast(module.forward, device_type, dtype)
        return module
    own = type(module)
    if getattr(own, "_autocasts", False):  # from an engine that was not closed
        own = own.__mro__[1]
    made = type(own.__name__, (own,), {"_autocasts": True, "__module__": own.__module__})
    made.forward = _autocast(own.forward, device_type, dtype)  # type: ignore[attr-defined]
    module.__class__ = made
    return module


def _autocast(forward: Callable[..., Any], device_type: str, dtype: torch.dtype) -> Callable[..., Any]:
    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device_type, dtype=dtype):
            return forward(*args, **kwargs)

    return run
