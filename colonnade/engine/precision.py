"""Mixed precision: the dtype of the forward pass, and a loss scale whose decision is the same on every rank.

The scaled gradients are never unscaled in a pass of their own: the norm is divided by the scale, and the scale
joins the clip divisor inside the optimizer step. Whether a step is dropped follows from the norm of the
whole world, so every rank drops it, and the scale falls, together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from colonnade.errors import ConfigError
from colonnade.optim.norm import Norms


@dataclass(frozen=True)
class Precision:
    """What the config asks for: the autocast dtype (None: off), and the settings of a loss scaler (None: off)."""

    dtype: torch.dtype | None = None
    scaler: Mapping[str, Any] | None = None
    master_weights: bool = True

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Precision:
        """From the `fp16` and `bf16` keys."""
        fp16, bf16 = config.get("fp16"), config.get("bf16")
        if isinstance(fp16, Mapping) and (not fp16.get("enabled", True) or fp16.get("mode", "any") is None):
            fp16 = None
        if fp16:
            settings = dict(fp16) if isinstance(fp16, Mapping) else {}
            return cls(torch.float16, {key: value for key, value in settings.items() if value is not None})
        if bf16:
            masters = bf16.get("master_weights", True) if isinstance(bf16, Mapping) else True
            return cls(torch.bfloat16, None, bool(masters))
        return cls()

    def apply(self, model: nn.Module, device: torch.device) -> None:
        """Run the model's forward passes in the chosen dtype.

        With master weights (the default) parameters stay fp32 and autocast casts them where it pays; without,
        the parameters themselves are cast.
        """
        if self.dtype is None:
            return
        if not self.master_weights:
            model.to(self.dtype)
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
        return LossScaler(device, **_scaler_options(self.scaler)) if self.scaler is not None else None


class LossScaler:
    """The loss scale as a device tensor; grows after `growth_interval` good steps, falls after a dropped one."""

    def __init__(
        self,
        device: torch.device,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        min_scale: float | None = None,
        max_scale: float | None = None,
        dynamic_grad_scale: bool = True,
    ) -> None:
        self.scale = torch.tensor(float(init_scale), device=device)
        self.count = torch.ones((), device=device)
        """What a loss given as (sum, count) is divided by for its backward pass, so that fp16 meets the gradients of a mean:
        about the count of the step before, as a power of two, by which dividing costs no precision."""
        self._good_steps = torch.zeros((), dtype=torch.int32, device=device)
        self._factors = (growth_factor, backoff_factor, growth_interval)
        self._limits = (min_scale, max_scale)
        self._dynamic = dynamic_grad_scale

    def unscaled(self, norms: Norms) -> Norms:
        """The norms of the gradients as they would be without the scale."""
        p = norms.p
        factor = self.scale.double() if p == float("inf") else self.scale.double() ** p
        return Norms(p, norms.sums / factor, norms.nonfinite)

    def expect(self, count: Tensor) -> None:
        """The losses of the next step will have about this count."""
        self.count.copy_(torch.where(count.isfinite() & (count > 1), count, 1.0).log2().floor().exp2())

    def update(self, found_inf: Tensor) -> None:
        """After a step; `found_inf`: whether its gradient was not finite."""
        if not self._dynamic:
            return
        torch._amp_update_scale_(self.scale, self._good_steps, found_inf.float().reshape(()), *self._factors)
        low, high = self._limits
        if low is not None or high is not None:
            self.scale.clamp_(low, high)

    def state_dict(self) -> dict[str, Tensor]:
        return {"scale": self.scale, "good_steps": self._good_steps, "count": self.count}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.scale.copy_(state["scale"])
        self._good_steps.copy_(state["good_steps"])
        self.count.copy_(state.get("count", torch.ones(())))


def _check_castable(model: nn.Module, dtype: torch.dtype) -> None:
    """Refuse a model in float64: autocast leaves that as it is, so the config would have no effect."""
    floating = {name: p.dtype for name, p in model.named_parameters() if p.is_floating_point()}
    if floating and all(found is torch.float64 for found in floating.values()):
        key = "bf16" if dtype is torch.bfloat16 else "fp16"
        raise ConfigError(
            f"{key} has no effect on this model: {next(iter(floating))} and all its other parameters are float64, which "
            f"autocast leaves as they are. Pass model.float(), or leave {key} out."
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


def _scaler_options(settings: Mapping[str, Any]) -> dict[str, Any]:
    options = {key: value for key, value in settings.items() if key not in ("mode", "enabled")}
    if options.pop("hysteresis", 1) != 1:
        raise ConfigError("fp16.hysteresis: only 1 is known here: the scale falls after each dropped step")
    return options
