"""Run a function on real processes and compare what they did: the harness Colonnade is tested with.

It is public, so that a parallelism of your own can be tested in the same way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from colonnade._lazy import lazy_names

if TYPE_CHECKING:
    from colonnade.testing.outcome import Outcome as Outcome
    from colonnade.testing.outcome import WorldError as WorldError
    from colonnade.testing.outcome import WorldResult as WorldResult
    from colonnade.testing.truth import Comparison as Comparison
    from colonnade.testing.truth import compare as compare
    from colonnade.testing.truth import gather_gradients as gather_gradients
    from colonnade.testing.truth import gather_weights as gather_weights
    from colonnade.testing.truth import plain_gradients as plain_gradients
    from colonnade.testing.world import run_world as run_world

_NAMES = {
    **dict.fromkeys(("Outcome", "WorldError", "WorldResult"), "colonnade.testing.outcome"),
    **dict.fromkeys(
        ("Comparison", "compare", "gather_gradients", "gather_weights", "plain_gradients"), "colonnade.testing.truth"
    ),
    "run_world": "colonnade.testing.world",
}
__all__ = sorted(_NAMES)


def __getattr__(name: str) -> Any:
    return lazy_names(__name__, name, _NAMES)


def __dir__() -> list[str]:
    return sorted([*globals(), *_NAMES])
