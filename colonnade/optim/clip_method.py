"""Clip methods: reduced norms in, a divisor per slot and a skip flag out.

A method sees only numbers that are the same bits on every rank, and keeps its history in device tensors
that it changes in place: so all ranks decide alike, nothing waits for the device, and a CUDA graph can
hold the step. The gradient is divided by the divisor, which is at least 1: divisor = max(1, (norm + 1e-6)
/ limit), the inverse of torch's clip coefficient.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from colonnade.config.settings import positive
from colonnade.errors import CheckpointError
from colonnade.optim.norm import Norms
from colonnade.registry import Registry

CLIP_METHOD = Registry("clip method", home="colonnade.optim.clip_history")

EPSILON = 1e-6
"""Torch's addition to the norm, once for the whole norm."""


def divisor_to(norm: Tensor, limit: Tensor | float) -> Tensor:
    """What the gradient is divided by so that its norm does not exceed `limit` (inf: no limit, always 1)."""
    if isinstance(limit, float) and math.isinf(limit):
        return torch.ones_like(norm)
    return ((norm + EPSILON) / limit).clamp(min=1.0)


class Measured:
    """What a method decides on: the total norm, the norm of every slot, and whether all is finite (0-dim).

    `each`: every slot is to be clipped by its own norm.
    """

    def __init__(self, norm: Tensor, norms: Norms, bad: Tensor, each: bool = False) -> None:
        self.norm, self.each = norm, each
        self._norms = norms
        self._bad = bad

    @cached_property
    def slots(self) -> Tensor:
        return self._norms.per_slot()

    @property
    def clipped_by(self) -> Tensor:
        """The norm that a limit is for: the total one, or with `per="layer"` and `per="parameter"` that of every slot."""
        return self.slots if self.each else self.norm

    @property
    def count(self) -> int:
        """How many slots there are."""
        return len(self._norms.sums)

    @cached_property
    def finite(self) -> Tensor:
        return self._bad.logical_not()


@dataclass(frozen=True)
class Verdict:
    """A divisor (0-dim, or one per slot) and, for methods that drop steps, a 0-dim bool."""

    divisor: Tensor
    skip: Tensor | None = None


class ClipMethod(ABC):
    """Base of all clip methods; a method with memory says in `history` how it starts.

    `decide` may read `self.state` and must change it through `self.remember`, which keeps it unchanged on a
    step that is not finite. `by_slot` says that it limits every slot by its own norm (`measured.slots`, or
    `measured.clipped_by`), as `per="layer"` and `per="parameter"` ask for; without it they are refused.
    """

    by_slot: ClassVar[bool] = False

    def __init__(self) -> None:
        self.state: dict[str, Tensor] = {}

    @abstractmethod
    def decide(self, measured: Measured) -> Verdict:
        """The divisor and the skip flag, from device tensors alone: no branch on a value."""

    def history(self, slots: int) -> dict[str, Tensor]:
        """The state before the first step."""
        return {}

    def __call__(self, measured: Measured) -> Verdict:
        device = measured.norm.device
        if not self.state:
            self.state = self.history(measured.count)
        self.state = {name: tensor.to(device) for name, tensor in self.state.items()}
        return self.decide(measured)

    def remember(self, finite: Tensor, **new: Tensor) -> None:
        """Store the new values of the named state tensors in place, unless the step is not finite."""
        for name, value in new.items():
            old = self.state[name]
            old.copy_(torch.where(finite, value, old))

    def state_dict(self) -> dict[str, Tensor]:
        """A copy of the state; empty before the first step and for methods without memory."""
        return {name: tensor.clone() for name, tensor in self.state.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over a state of the same method with the same settings."""
        if not state:
            self.state = {}
            return
        slots = max(tensor.numel() for tensor in state.values())
        expected = self.history(slots)
        shapes = {name: tuple(tensor.shape) for name, tensor in expected.items()}
        found = {name: tuple(tensor.shape) for name, tensor in state.items()}
        if shapes != found:
            raise CheckpointError(
                f"the clip state holds {found}, but {type(self).__name__} needs {shapes}; "
                "load it with the clip method and the settings it was saved with",
                code="C083",
            )
        self.state = {name: tensor.detach().clone() for name, tensor in state.items()}


@CLIP_METHOD.register_module("norm")
class NormClip(ClipMethod):
    """One fixed limit for the total norm, or for that of every slot; max_norm = inf measures and changes nothing."""

    by_slot = True

    def __init__(self, max_norm: float) -> None:
        super().__init__()
        self.max_norm = positive("max_norm", max_norm)

    def decide(self, measured: Measured) -> Verdict:
        return Verdict(divisor_to(measured.clipped_by, self.max_norm))
