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


OFTEN = {("data 2", 1), ("data 2 x tensor 2", 2), ("data 4", 3)}
"""Every stage in `make test`; all layouts with all stages in `make long`."""
EVERY = [
    pytest.param(name, stage, marks=pytest.mark.slow if (name, stage) in OFTEN else pytest.mark.long)
    for name in CASES
    for stage in (1, 2, 3)
]


@pytest.mark.parametrize(("name", "stage"), EVERY)
def test_every_optimizer_clipped_and_accumulated(name, stage):
    run_world(CASES[name].world, check_parity, name, _ways((stage,)), timeout=110)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name if name == "data 2" else pytest.param(name, marks=pytest.mark.long) for name in CASES]
)
def test_by_collectives_instead_of_shared_memory(name):
    ways = [
        Way(stage, optimizer, 0.3, accumulation, shared_memory=False)
        for stage, optimizer, accumulation in [(1, "AdamW", 1), (2, "AdamW", 3), (2, "SGD", 1), (1, "Adagrad", 3)]
    ]
    run_world(CASES[name].world, check_parity, name, ways, timeout=110)


@pytest.mark.slow
@pytest.mark.parametrize("shared_memory", ["auto", pytest.param(False, marks=pytest.mark.long)])
def test_options_of_stages_1_and_2(shared_memory):
    """Whole gradients given back, gathers that run on into the next forward, and one large bucket."""
    ways = [
        Way(stage, "AdamW", 0.3, 3, shared_memory, more)
        for stage, more in [
            (1, (("reduce_scatter", False),)),
            (1, (("gather_ahead", True),)),
            (2, (("gather_ahead", True),)),
            (1, (("bucket_mb", 25),)),
            (2, (("bucket_mb", 25),)),
            (2, (("offload", True),)),
        ]
    ]
    run_world(2, check_parity, "data 2", ways)
    run_world(4, check_parity, "data 2 x tensor 2", ways, timeout=110)
