"""Watchers for tests: which operations ran, which collectives, how much memory was taken."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode


class Operations(TorchDispatchMode):
    """Counts the names of all operations, and the bytes of the largest tensor they returned."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.names.append(str(func))
        if not func.is_view and func.overloadpacket.__name__[-1] != "_":
            for tensor in result if isinstance(result, (list, tuple)) else [result]:
                self.largest = max(self.largest, getattr(tensor, "nbytes", 0))
        return result

    @property
    def host_reads(self) -> int:
        """How often a value was brought to the host."""
        return sum("_local_scalar_dense" in name for name in self.names)


@contextmanager
def collectives() -> Iterator[list[str]]:
    """The names of the collectives called inside; the real ones still run."""
    called: list[str] = []
    names = ("all_reduce", "all_gather", "all_gather_into_tensor", "broadcast", "reduce", "all_gather_object")
    with mock.patch.multiple(dist, **{name: _noted(getattr(dist, name), called) for name in names}):
        yield called


def _noted(collective: Callable[..., Any], called: list[str]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        called.append(collective.__name__)
        return collective(*args, **kwargs)

    return run
