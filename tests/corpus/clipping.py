"""Clipping that is decided on rightly and then done wrongly."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch


def forget(engine: Any) -> None:
    """The norm is told; no gradient is scaled."""
    decide = engine._stepper.policy.decide

    def decided(norms: Any) -> Any:
        decision = decide(norms)
        return replace(decision, divisor=torch.ones_like(decision.divisor))

    engine._stepper.policy.decide = decided


def twice(engine: Any) -> None:
    """The coefficient is applied twice."""
    decide = engine._stepper.policy.decide

    def decided(norms: Any) -> Any:
        decision = decide(norms)
        return replace(decision, divisor=decision.divisor.square())

    engine._stepper.policy.decide = decided
