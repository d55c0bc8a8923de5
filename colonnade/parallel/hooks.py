"""Hooks of ours on a user's model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class ModelHook:
    """A hook that belongs to this model alone: a copy of the model, or one that was pickled, does without it."""

    def __init__(self, act: Callable[..., None] | None = None) -> None:
        self._act = act

    def __call__(self, *args: Any) -> None:
        if self._act is not None:
            self._act(*args)

    def __reduce__(self) -> tuple[type[ModelHook], tuple[()]]:
        return ModelHook, ()
