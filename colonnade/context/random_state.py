"""Every random stream of a rank as one value: the context's (torch on each device, by mode), Python's and numpy's."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch

from colonnade.context.parallel_context import ParallelContext


def random_state(context: ParallelContext) -> dict[str, Any]:
    """Where every random stream of this rank stands."""
    version, numbers, gauss = random.getstate()
    state = {"streams": context.streams.state_dict(), "python": (version, torch.tensor(numbers, device="cpu"), gauss)}
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state()
        state["numpy"] = (name, torch.tensor(keys.astype("int64"), device="cpu"), *rest)
    return state


def set_random_state(state: Mapping[str, Any], context: ParallelContext) -> None:
    """Put back what `random_state` gave."""
    context.streams.load_state_dict(state["streams"])
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss))
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and "numpy" in state:
        name, keys, *rest = state["numpy"]
        numpy.random.set_state((name, keys.tolist(), *rest))


def why_not_here(state: Mapping[str, Any], context: ParallelContext) -> str | None:
    """Why the streams cannot be put back on this device; None if they can."""
    on_cuda = "cuda" in state["streams"]["default"]
    if on_cuda and not torch.cuda.is_available():
        return "it was saved on cuda"
    return "it was saved without cuda" if context.device.type == "cuda" and not on_cuda else None
