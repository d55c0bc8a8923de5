"""No false alarm: runs with nothing wrong in them are found equal to one process, in every dtype; and a wrong one is not."""

from __future__ import annotations

from typing import Any

import pytest

from colonnade.testing import run_world
from tests.corpus.healthy import sweep
from tests.corpus.runner import Run, bug_of, verified
from tests.corpus.table import QUICK
from tests.corpus.tensorflow_466_summed import plant

pytestmark = pytest.mark.slow
DTYPES: dict[str, dict[str, Any]] = {"fp32": {}, "bf16": {"bf16": True}}


@pytest.mark.parametrize(
    ("first", "count"),
    [(0, 12), *(pytest.param(first, 20, marks=pytest.mark.long) for first in range(12, 200, 20))],
)
def test_nothing_is_said_of_a_healthy_run(first: int, count: int) -> None:
    wrong, refused, equal = sweep(first, min(count, 200 - first))
    assert not wrong, "\n".join(f"{name}: {problem[:2000]}" for name, problem in wrong.items())
    assert equal + len(refused) == min(count, 200 - first)
    assert len(refused) <= 1, refused


def _doubled(settings: dict[str, Any]) -> list[str]:
    """On a rank: what is said of gradients that are summed and not averaged, in single precision and below."""
    run = Run(bug_of("tensorflow_466_summed"))
    run.config |= settings
    plant(run)
    run.batches = lambda context, step: [(x.float(), y.float()) for x, y in run.kind.batches(context, step)]
    return verified(run, loose=True, double=False).causes


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_doubled_gradient_is_seen_above_the_rounding(dtype: str) -> None:
    assert run_world(2, _doubled, DTYPES[dtype], env=QUICK).values[0] == ["summed-not-averaged"]
