"""Over NCCL: models of transformers whose experts and whose sequences lie on several ranks."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from tests.device.check import Check


def checks() -> Iterator[Check]:
    if find_spec("transformers") is None:
        return
    from tests.hf import test_attention, test_experts

    for attention in ("ring", "ulysses"):
        yield Check("models", f"sequences, {attention}", 2, test_attention._on_two, (attention,))
    for parallel in ({"expert": 2}, {"sequence": 2}):
        yield Check("models", f"auxiliary loss of routers, {parallel}", 2, test_experts._router_loss, (parallel,))
