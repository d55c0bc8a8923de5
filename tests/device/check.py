"""A check of `nccl_check`: a function of the tests for every rank of a world."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple


class Check(NamedTuple):
    """A function for every rank of a world, and what must hold for what the ranks return."""

    part: str
    name: str
    ranks: int
    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()
    verify: Callable[[Sequence[Any]], None] | None = None
    places_itself: bool = False
    """Tensors that the function makes stay where it makes them; else they are moved to the GPU."""
    only_on_gpu: bool = False
    """Left out by `--backend gloo`."""

    def __str__(self) -> str:
        return f"{self.part}: {self.name} ({self.ranks} ranks)"
