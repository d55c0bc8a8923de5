"""What can go wrong in a trainer, as types a user can catch."""

from __future__ import annotations

from colonnade.errors import ColonnadeError


class TrainerError(ColonnadeError, RuntimeError):
    """Training cannot go on; raised on every rank."""


class HookError(TrainerError):
    """A hook raised; says which one, at which point of its life cycle, at which step. Raised on every rank."""
