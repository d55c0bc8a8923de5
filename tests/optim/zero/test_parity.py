"""Stages 1, 2 and 3 equal one process to 1e-10: loss, gradients, norm, and weights after five steps."""

from __future__ import annotations

from itertools import product

import pytest

from colonnade.testing import run_world
from tests.optim.zero.cases import CASES, OPTIMIZERS, Way, check_parity

CLIPS = (None, 0.3)


def _ways(stages: tuple[int, ...]) -> list[Way]:
    return [Way(*way) for way in product(stages, OPTIMIZERS, CLIPS, (1, 3))]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_data_2(stage):
    ways = [Way(stage, "AdamW", 0.3), Way(stage, "SGD", None, 3), Way(stage, "Adagrad", 0.3, 3)]
    run_world(2, check_parity, "data 2", ways)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("stages", [(1,), (2,), (3,)], ids=lambda stages: f"stage {stages[0]}")
def test_every_optimizer_clipped_and_accumulated(name, stages):
    case = CASES[name]
    run_world(case.world, check_parity, name, _ways(stages), timeout=110)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_by_collectives_instead_of_shared_memory(name):
    ways = [
        Way(stage, optimizer, 0.3, accumulation, shared_memory=False)
        for stage, optimizer, accumulation in [(1, "AdamW", 1), (2, "AdamW", 3), (2, "SGD", 1), (1, "Adagrad", 3)]
    ]
    run_world(CASES[name].world, check_parity, name, ways, timeout=110)


@pytest.mark.slow
@pytest.mark.parametrize("shared_memory", ["auto", False])
def test_options_of_stages_1_and_2(shared_memory):
    """Whole gradients given back, gathers that run on into the next forward, and one large bucket."""
    ways = [
        Way(stage, "AdamW", 0.3, 3, shared_memory, more)
        for stage, more in [
            (1, (("reduce_scatter", False),)),
            (1, (("prefetch", True),)),
            (2, (("prefetch", True),)),
            (1, (("bucket_mb", 25),)),
            (2, (("bucket_mb", 25),)),
            (2, (("offload", True),)),
        ]
    ]
    run_world(2, check_parity, "data 2", ways)
    run_world(4, check_parity, "data 2 x tensor 2", ways, timeout=110)
