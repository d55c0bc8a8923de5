"""Where the time of a step goes: marks on the host's clock, or events of a device that are read a step later."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

PHASES = ("data", "forward", "backward", "communication", "clip", "optimizer", "other")
"""What a step is made of. `communication` is what nothing else hides: waiting for sums of gradients and for messages of
the pipeline. Collectives inside a forward or backward pass count there. `other` is hooks, checkpoints and the loop itself."""


class PhaseTimes:
    """The marks of one step; reading them waits for nothing younger than they are."""

    def __init__(self, marks: list[tuple[str, Any]], end: Any) -> None:
        self._marks, self._end = marks, end

    def read(self) -> dict[str, float]:
        """Seconds by phase; those that took no time are left out."""
        seconds: dict[str, float] = {}
        ends = [mark for _, mark in self._marks[1:]] + [self._end]
        if not isinstance(self._end, float):
            self._end.synchronize()
        for (phase, begin), end in zip(self._marks, ends, strict=True):
            spent = end - begin if isinstance(end, float) else begin.elapsed_time(end) / 1000
            seconds[phase] = seconds.get(phase, 0.0) + spent
        return seconds


class PhaseClock:
    """Notes when a step goes from one phase to the next. On CUDA by events of the current stream: the host never waits."""

    def __init__(self, device: torch.device) -> None:
        self._on_device = device.type == "cuda"
        self.restart()

    def restart(self) -> None:
        """The next step begins now."""
        self._phase = "other"
        self._marks = [(self._phase, self._now())]

    def enter(self, phase: str) -> str:
        """From here on the time is that of `phase`; returns the one before."""
        before = self._phase
        if phase != before:
            self._phase = phase
            self._marks.append((phase, self._now()))
        return before

    def end_step(self) -> PhaseTimes:
        """The times of the step that ends here, on their way; the next one begins."""
        end = self._now()
        ended, self._marks = PhaseTimes(self._marks, end), [(self._phase, end)]
        return ended

    def _now(self) -> Any:
        if not self._on_device:
            return time.perf_counter()
        import torch  # here, so that pages of runs are made without it

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
