"""Timers by name, on the host's clock: nothing waits for a device."""

from __future__ import annotations

import time


class Timer:
    """A stopwatch with a history of its laps, in seconds."""

    def __init__(self) -> None:
        self.history: list[float] = []
        self._since: float | None = None
        self._last = 0.0

    def start(self) -> None:
        self._since = time.perf_counter()

    def stop(self) -> float:
        """End the lap and return its seconds; 0 if none was begun."""
        if self._since is None:
            return 0.0
        self._last = time.perf_counter() - self._since
        self._since = None
        self.history.append(self._last)
        return self._last

    def reset(self) -> None:
        """Forget everything."""
        self.history.clear()
        self._since, self._last = None, 0.0

    def get_elapsed_time(self) -> float:
        """The seconds of the last lap."""
        return self._last


class MultiTimer:
    """Timers by name, made when they are first asked for. A trainer times Train-epoch, Train-step and Test-epoch."""

    def __init__(self) -> None:
        self._timers: dict[str, Timer] = {}

    def start(self, name: str) -> None:
        self.get_timer(name).start()

    def stop(self, name: str) -> float:
        return self.get_timer(name).stop()

    def get_timer(self, name: str) -> Timer:
        return self._timers.setdefault(name, Timer())

    def reset(self, name: str | None = None) -> None:
        """Forget the laps of one timer, or of all."""
        for timer in [self.get_timer(name)] if name is not None else self._timers.values():
            timer.reset()
