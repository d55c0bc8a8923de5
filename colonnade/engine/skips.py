"""Steps that were dropped, counted without making the host wait for the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class SkipReport:
    """Takes the flag of each step as a device tensor, and reads it on the host later."""

    def __init__(self) -> None:
        self.total = 0
        self.last = False
        self._flag: Tensor | None = None
        self._ready: torch.cuda.Event | None = None

    def note(self, found_inf: Tensor) -> None:
        """The flag of the step that is being made: 1.0 if it is dropped."""
        self.read()
        if found_inf.is_cuda:
            self._flag = torch.empty((), dtype=found_inf.dtype, pin_memory=True)
            self._flag.copy_(found_inf, non_blocking=True)
            self._ready = torch.cuda.Event()
            self._ready.record()
        else:
            self._flag = found_inf.clone()

    def read(self) -> bool | None:
        """Whether the last noted step was dropped; None if it has been read already, or there was none."""
        if self._flag is None:
            return None
        if self._ready is not None:
            self._ready.synchronize()
        skipped = bool(self._flag)
        self.total += skipped
        self.last = skipped
        self._flag = self._ready = None
        return skipped


class SkipAwareScheduler:
    """A learning-rate scheduler that stands still when the engine's last step was dropped."""

    def __init__(self, scheduler: Any, engine: Any) -> None:
        self._scheduler = scheduler
        self._engine = engine

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance, unless the last step was dropped. Waits for that step's norm."""
        if not self._engine.last_step_skipped:
            self._scheduler.step(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "_scheduler":  # a copy that is being made has none yet
            raise AttributeError(name)
        return getattr(self._scheduler, name)
