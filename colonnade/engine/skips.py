"""Steps that were dropped: counted, and kept from learning-rate schedulers. Only `SkipReport.read` makes the host wait."""

from __future__ import annotations

from collections import deque
from typing import Any

from torch import Tensor

from colonnade.comm.host_copy import STEPS_LATE, HostCopy


class SkipReport:
    """Takes the flag of each step as a device tensor, and reads it on the host later."""

    def __init__(self) -> None:
        self.total = 0
        self.last = False
        self.flag: HostCopy | None = None
        """The flag of the last step, read or not."""
        self._pending: deque[HostCopy] = deque()

    def note(self, found_inf: Tensor) -> None:
        """The flag of the step that is being made: 1.0 if it is dropped."""
        self.poll()
        self.flag = HostCopy(found_inf)
        self._pending.append(self.flag)

    def poll(self) -> int:
        """Count the flags that have come; how many of these steps were dropped."""
        return self._count(wait=False)

    def read(self) -> int:
        """Count all flags; waits for the last step. How many of those not counted before were dropped."""
        return self._count(wait=True)

    def _count(self, wait: bool) -> int:
        dropped = 0
        while self._pending and (wait or self._pending[0].ready()):
            self.last = self._pending.popleft().read() > 0
            dropped += self.last
        self.total += dropped
        return dropped


class SkipAwareScheduler:
    """A learning-rate scheduler that stands still when the engine's last step was dropped.

    On a device nobody waits for that: it goes on, and stands still two calls later instead, the same on every rank.
    """

    def __init__(self, scheduler: Any, engine: Any) -> None:
        self._scheduler = scheduler
        self._engine = engine
        self._flags: deque[HostCopy] = deque()
        self._ahead = 0

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance, unless the last step was dropped."""
        flag = self._engine.last_skip_flag
        if flag is not None:
            self._flags.append(flag)
        while self._flags and (self._flags[0].on_host or len(self._flags) > STEPS_LATE):
            self._ahead += self._flags.popleft().read() > 0
        if self._ahead:
            self._ahead -= 1
            return
        self._scheduler.step(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_flags": deque()}  # what is on its way to the host cannot be copied

    def __getattr__(self, name: str) -> Any:
        if name == "_scheduler":  # a copy that is being made has none yet
            raise AttributeError(name)
        return getattr(self._scheduler, name)
