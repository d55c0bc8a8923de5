"""Run a function on real processes and compare what they did: the harness Colonnade is tested with.

It is public, so that a parallelism of your own can be tested in the same way.
"""

from __future__ import annotations

from colonnade.testing.gpu import cuda_mps
from colonnade.testing.outcome import Outcome, WorldError, WorldResult
from colonnade.testing.truth import Comparison, compare, gather_gradients, gather_weights, plain_gradients
from colonnade.testing.world import run_world

__all__ = [
    "Comparison",
    "Outcome",
    "WorldError",
    "WorldResult",
    "compare",
    "cuda_mps",
    "gather_gradients",
    "gather_weights",
    "plain_gradients",
    "run_world",
]
