"""Statuses, ranks and what nobody holds."""

from __future__ import annotations

from math import inf, nan

import pytest
import torch

from colonnade.proof.compare import Compared, LocalValue, compare, compare_tensor
from tests.proof.made_up import World

TRUTH = torch.arange(6, dtype=torch.float64).view(2, 3)
TOP, BOTTOM = torch.arange(3), torch.arange(3, 6)


def row(*parts):
    return compare_tensor(Compared(TRUTH, parts), 1e-9, "gradient", "w", 0)


NOTHING = LocalValue(2, torch.zeros(0), torch.zeros(0, dtype=torch.int64))


@pytest.mark.parametrize(
    ("parts", "status", "ranks", "detail"),
    [
        ([LocalValue(0, TRUTH[0], TOP), LocalValue(1, TRUTH[1], BOTTOM)], "equal", (), ""),
        ([LocalValue(0, TRUTH[1], TOP), LocalValue(1, TRUTH[0], BOTTOM)], "differs", (0, 1), ""),
        ([LocalValue(0, TRUTH[0], TOP)], "missing", (), "no rank has 3 of its elements"),
        ([], "missing", (), "no rank has it"),
        ([LocalValue(rank, TRUTH + (rank == 1)) for rank in range(3)], "differs", (1,), "replicas differ: ranks [1]"),
        ([LocalValue(0, TRUTH), LocalValue(1, TRUTH + 1), NOTHING], "differs", (1,), "replicas differ: ranks [1]"),
        ([LocalValue(0, TRUTH), LocalValue(1, TRUTH * nan)], "not finite", (1,), ""),
        ([LocalValue(0, TRUTH[:1])], "differs", (0,), ""),  # a shape that does not match
    ],
)
def test_the_row_of_a_tensor(parts, status, ranks, detail):
    found = row(*parts)
    assert (found.status, found.ranks, found.detail) == (status, ranks, detail)
    assert found.error == inf or status in ("equal", "differs")


def test_the_error_is_in_units_of_the_tolerance():
    found = TRUTH.clone()
    found[0, 0] += 3e-9
    assert row(LocalValue(0, found)).error == pytest.approx(3, rel=1e-3)
    assert row(LocalValue(0, TRUTH[:1])).error == inf


def test_the_ranks_losses_may_be_those_of_their_own_shares():
    def of_share(world, value, at, rank):
        return value + (0.25 if rank else -0.25)

    rows = compare(World(2, 1, plant={"loss": of_share}).evidence())
    assert all(one.ok for one in rows)
    rows = compare(World(2, 1, plant={"loss": lambda world, value, **_: value * 1.001}).evidence())
    assert [one.quantity for one in rows if not one.ok] == ["loss", "loss"]


def test_rows_come_in_the_order_of_a_step():
    names = list(dict.fromkeys(one.quantity for one in compare(World(2, 1, max_norm=1.0).evidence())))
    assert names == [
        "weights at start",
        "random numbers",
        "activation",
        "loss",
        "recomputed activation",
        "gradient",
        "norm",
        "clipped gradient",
        "weights",
        "buffer",
    ]
