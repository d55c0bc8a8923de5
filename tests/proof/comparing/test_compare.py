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


def test_shards_are_compared_at_their_places():
    assert row(LocalValue(0, TRUTH[0], TOP), LocalValue(1, TRUTH[1], BOTTOM)).status == "equal"
    assert row(LocalValue(0, TRUTH[1], TOP), LocalValue(1, TRUTH[0], BOTTOM)).ranks == (0, 1)


def test_the_error_is_in_units_of_the_tolerance():
    found = TRUTH.clone()
    found[0, 0] += 3e-9
    assert row(LocalValue(0, found)).error == pytest.approx(3, rel=1e-3)


def test_elements_that_nobody_holds_are_counted():
    missing = row(LocalValue(0, TRUTH[0], TOP))
    assert missing.status == "missing"
    assert "no rank has 3 of its elements" in missing.detail
    assert row().detail == "no rank has it"


def test_replicas_that_differ_are_named():
    wrong = row(LocalValue(0, TRUTH), LocalValue(1, TRUTH + 1), LocalValue(2, TRUTH))
    assert wrong.ranks == (1,)
    assert "ranks [1]" in wrong.detail


def test_a_rank_may_hold_nothing():
    nothing = LocalValue(2, torch.zeros(0), torch.zeros(0, dtype=torch.int64))
    assert row(LocalValue(0, TRUTH), LocalValue(1, TRUTH + 1), nothing).ranks == (1,)


def test_what_is_not_finite_names_its_ranks():
    broken = row(LocalValue(0, TRUTH), LocalValue(1, TRUTH * nan))
    assert (broken.status, broken.ranks, broken.error) == ("not finite", (1,), inf)


def test_a_shape_that_does_not_fit_differs():
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
        "dropout masks",
        "activation",
        "loss",
        "recomputed activation",
        "gradient",
        "norm",
        "clipped gradient",
        "weights",
        "buffer",
    ]
