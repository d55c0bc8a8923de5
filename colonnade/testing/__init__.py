"""The test harness: `run_world` runs a function on several ranks, `compare` compares results with a single process.

The tests of Colonnade use it; it is public, so that a custom parallelism can be tested in the same way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from colonnade._imports import lazy_names

if TYPE_CHECKING:
    from colonnade.launching.outcome import Outcome as Outcome
    from colonnade.launching.outcome import WorldError as WorldError
    from colonnade.launching.outcome import WorldResult as WorldResult
    from colonnade.testing.sync_debug import device_waits as device_waits
    from colonnade.testing.truth import Comparison as Comparison
    from colonnade.testing.truth import compare as compare
    from colonnade.testing.truth import gather_gradients as gather_gradients
    from colonnade.testing.truth import gather_weights as gather_weights
    from colonnade.testing.truth import in_double as in_double
    from colonnade.testing.truth import plain_gradients as plain_gradients
    from colonnade.testing.world import cuda_mps as cuda_mps
    from colonnade.testing.world import run_world as run_world

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "colonnade.launching.outcome": "Outcome WorldError WorldResult",
        "colonnade.testing.sync_debug": "device_waits",
        "colonnade.testing.truth": "Comparison compare in_double gather_gradients gather_weights plain_gradients",
        "colonnade.testing.world": "cuda_mps run_world",
    },
)
