"""Clipping against the gathered gradient in fp64, on every layout of the table of failures met in the field.

Worlds are started once per number of ranks and run through all layouts and checks of that size in turn.
"""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path

import pytest
import torch

from colonnade.testing import WorldError, WorldResult, run_world
from tests.optim import field_torch
from tests.optim.field_facts import Fact, judge
from tests.optim.field_layouts import CASES
from tests.optim.field_survey import survey
from tests.optim.field_table import ROWS, Row, checks_of_world, markdown

PAGE = Path(__file__).parents[2] / "docs" / "evidence" / "clipping.md"
ON_CPU = {"CUDA_VISIBLE_DEVICES": ""}
BEGIN, END = "<!-- table of failures: begin -->\n", "<!-- table of failures: end -->"


def run_all(world: int, p: float) -> dict[str, list[Fact]]:
    """On a rank: every layout and every check of this number of ranks."""
    found = {name: survey(name, p) for name, case in CASES.items() if case.world == world}
    if p == 2.0:
        found |= {check.__name__: check() for check in checks_of_world(world)}
    return found


@cache
def world_of(world: int, p: float) -> WorldResult:
    """One run for all tests of this size, failed or not."""
    # Checking every collective against the other ranks' doubles the time: the slow tests do it.
    quick = {"TORCH_DISTRIBUTED_DEBUG": "OFF"} if p == 2.0 else {}
    return run_world(world, run_all, world, p, timeout=110, check=False, env={**ON_CPU, **quick})


def by_rank(world: int, name: str, p: float = 2.0) -> list[list[Fact]]:
    """What every rank reports of one layout or check."""
    result = world_of(world, p)
    if not result.ok:
        raise WorldError(result)
    return [found[name] for found in result.values]


def test_all_37_failures_are_in_the_table_and_each_is_checked() -> None:
    print(markdown())
    assert [row.number for row in ROWS] == list(range(1, 38))
    for row in ROWS:
        assert row.cases or row.checks, row
        assert bool(row.checks) == bool(row.world), row


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.number}")
def test_the_failure_does_not_happen_here(row: Row) -> None:
    if row.needs_cuda and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    for name in row.cases:
        judge(by_rank(CASES[name].world, name))
    for check in row.checks:
        judge(run_world(row.world, check).values if row.needs_cuda else by_rank(row.world, check.__name__))


@pytest.mark.parametrize("name", CASES)
def test_every_layout_by_function_and_by_engine(name: str) -> None:
    judge(by_rank(CASES[name].world, name))


ORDER_OF_WORLD = {1: 1.0, 2: 1.0, 4: 3.0, 8: math.inf}
# Every layout with one order besides 2 in `make test`, with all of them in `make long`.
BY_ORDER = [
    pytest.param(name, p, marks=[] if ORDER_OF_WORLD[case.world] == p else [pytest.mark.long])
    for name, case in CASES.items()
    if case.engine
    for p in (1.0, 3.0, math.inf)
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "p"), BY_ORDER)
def test_every_layout_by_engine_for_every_order(name: str, p: float) -> None:
    judge(by_rank(CASES[name].world, name, p))


def test_an_engine_over_two_meshes_and_plain_tensors() -> None:
    judge(run_world(4, field_torch.mixed_meshes_by_engine, env=ON_CPU).values)


def test_an_engine_over_fsdp_over_a_tensor_plan() -> None:
    judge(run_world(4, field_torch.fsdp_over_tensor_by_engine, env=ON_CPU).values)


def test_the_table_in_the_documentation_is_this_one() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text.partition(BEGIN)[2].partition(END)[0] == markdown()
