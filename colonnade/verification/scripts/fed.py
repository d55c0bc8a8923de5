"""What stands in the place of a script's loader, batches and criterion: what goes through it is noted, or, alone, replaced."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from colonnade.verification.scripts.job import Stage

_LOADED = 64  # batches of each loader that are kept


class Loaded:
    """Batches of a loader; alone, those of all ranks, as far as the ranks took any."""

    def __init__(self, own: Iterator[Any], key: str, stage: Stage) -> None:
        self._own, self._key, self._stage = own, key, stage

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._stage.through(self._key, next(self._own), most=_LOADED)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)


class Batches:
    """The batches of a script of plain torch, which go past the stage; all else is theirs."""

    def __init__(self, own: Any, stage: Stage) -> None:
        self._own, self._stage = own, stage

    def __iter__(self) -> Iterator[Any]:
        for batch in self._own:
            yield self._stage.through("batch", batch)

    def __len__(self) -> int:
        return len(self._own)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)


class Criterion:
    """The user's criterion, which is given the labels of all ranks where it is given those of one."""

    def __init__(self, own: Any, stage: Stage) -> None:
        self._own, self._stage = own, stage

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        stage = self._stage
        if torch.is_grad_enabled() and stage._begun and not stage._fed_by_schedule:
            args, kwargs = stage.through("criterion", (args, kwargs))
        return self._own(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)
