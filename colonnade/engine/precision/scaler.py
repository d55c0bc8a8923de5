"""A loss scale whose decision is the same on every rank.

The scaled gradients are never unscaled in a pass of their own: the norm is divided by the scale, and the scale
joins the clip divisor inside the optimizer step. Whether a step is dropped follows from the norm of the
whole world, so every rank drops it, and the scale falls, together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from colonnade.errors import ConfigError
from colonnade.optim.norm import Norms


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
        self.count.copy_(state.get("count", torch.ones((), device="cpu")))


def scaler_options(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a `LossScaler` among the keys of `fp16`."""
    options = {key: value for key, value in settings.items() if key not in ("mode", "enabled")}
    if options.pop("hysteresis", 1) != 1:
        raise ConfigError("fp16.hysteresis: only 1 is known here: the scale falls after each dropped step", code="C003")
    return options
