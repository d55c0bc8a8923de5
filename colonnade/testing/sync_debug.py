"""The places where the host waits for a GPU, found by `torch.cuda.set_sync_debug_mode`."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_SHOWN = 4
"""Frames of a place."""


def device_waits(step: Callable[[], Any]) -> list[str]:
    """Run `step`, and return a line for each call in it for which the host waited for the device.

    A line has the innermost frames outside of torch, innermost first. Waits for a CUDA event are not found, because torch does not
    report them. Without a GPU the list is empty.

    Example::

        from colonnade.testing import device_waits

        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step():
            optimizer.zero_grad()
            model(torch.ones(3, 4)).sum().backward()
            optimizer.step()

        assert device_waits(step) == []
    """
    places: list[str] = []
    of_torch = str(Path(torch.__file__).parent)

    def note(message: Warning | str, *_: Any, **__: Any) -> None:
        if "called a synchronizing" in str(message):
            frames = [frame for frame in traceback.extract_stack()[:-1] if "warnings.py" not in frame.filename]
            own = [frame for frame in frames if not frame.filename.startswith(of_torch)] or frames
            places.append(" < ".join(f"{_short(frame.filename)}:{frame.lineno}" for frame in reversed(own[-_SHOWN:])))

    if not torch.cuda.is_available():
        step()
        return []
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return places


def _short(filename: str) -> str:
    return "/".join(Path(filename).parts[-2:])
