"""Which handlers come by themselves, and what each of them plans, by arithmetic alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from colonnade.context.layout import Layout
from colonnade.context.layout_builder import build_layout
from colonnade.context.parallel_mode import ParallelMode as M
from colonnade.engine.gradient_handler import DataParallelGradientHandler, PlannedGradientHandler
from colonnade.gradients.handler import attach_automatic
from colonnade.gradients.ledger import match
from colonnade.gradients.sums import Reduction, read_demands
from colonnade.parallel.placement import Replicate, Shard, place


def model(layout: Layout) -> nn.Module:
    """A plain weight, one that owes a sum over TENSOR, and an expert's, where there are such modes."""
    made = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in ("plain", "sums", "expert")})
    for name, mode, spec in (("sums", M.TENSOR, Replicate(owes="sum")), ("expert", M.EXPERT, Shard(0))):
        if mode in layout.modes:
            place(made[name].weight, {mode: spec})
    return made


def rows(found: list[Reduction]) -> set[tuple[str, str]]:
    return {(name.partition(".")[0], one.mode.name) for one in found for name in one.names}


DATA, MOE, SEQUENCE, REST = (
    f"{name}GradientHandler" for name in ("DataParallel", "Moe", "SequenceParallel", "Placement")
)


@pytest.mark.parametrize(
    ("parallel", "ranks", "expected"),
    [
        ({}, 1, {}),
        ({}, 2, {DATA: {("plain", "DATA"), ("sums", "DATA"), ("expert", "DATA")}}),
        ({"tensor": 2}, 2, {REST: {("sums", "TENSOR")}}),
        (
            {"tensor": 2, "sequence": 2},
            8,
            {
                SEQUENCE: {(name, mode) for name in ("plain", "sums", "expert") for mode in ("DATA", "SEQUENCE")},
                REST: {("sums", "TENSOR")},
            },
        ),
        (
            {"tensor": 2, "expert": 2},
            8,
            {
                MOE: {("plain", "DATA"), ("sums", "DATA"), ("expert", "EXPERT_DATA")},
                REST: {("sums", "TENSOR")},
            },
        ),
    ],
)
def test_every_row_is_taken_by_one_handler(parallel, ranks, expected):
    layout = build_layout({"parallel": parallel}, ranks)
    built = model(layout)
    demands = read_demands(built, layout, 0)
    attached, ledger = attach_automatic(match(demands, [], layout, 0), built, None)
    assert {type(one).__name__: rows(one.reductions_among(demands)) for one in attached} == expected
    assert ledger.open_rows() == []
    done = {(row.parameter.partition(".")[0], row.mode): row.done_by for row in ledger.rows}
    assert done == {row: name for name, taken in expected.items() for row in taken}


class Mine(PlannedGradientHandler):
    def reductions(self) -> list[Reduction]:
        return self.over(M.DATA)


def context_of(layout: Layout) -> Any:
    return SimpleNamespace(
        layout=layout, get_global_rank=lambda: 0, get_ranks_in_group=lambda mode: layout.group_of(mode, 0)
    )


def test_over_divides_by_what_is_owed_unless_another_divisor_is_given():
    layout = build_layout({"parallel": {"tensor": 2}}, 4)
    handler = Mine(model(layout))
    handler.attach(context_of(layout))

    def said(found: list[Reduction]) -> list[tuple[Any, ...]]:
        return [([name.partition(".")[0] for name in one.names], one.ranks, one.divisor) for one in found]

    assert said(handler.covers()) == [(["plain", "sums", "expert"], (0, 2), 2)]
    assert said(handler.over(M.TENSOR)) == [(["plain", "sums", "expert"], (0, 1), 1)]
    assert said(handler.over(M.DATA, "plain.*", divisor=5)) == [(["plain"], (0, 2), 5)]


def test_the_former_name_of_reductions_works_with_a_warning():
    with pytest.warns(DeprecationWarning, match=r"Old defines plan\(\).*rename it to reductions\(\)"):

        class Old(DataParallelGradientHandler):
            def plan(self) -> list[Reduction]:
                return super().plan()[:1]

    with pytest.warns(DeprecationWarning, match="Alone"):

        class Alone(PlannedGradientHandler):
            def plan(self) -> list[Reduction]:
                return self.over(M.DATA, "plain.*")

    class New(Old):
        def reductions(self) -> list[Reduction]:
            return [*super().reductions(), *super().reductions()]

    layout = build_layout({"parallel": {"tensor": 2}}, 4)
    for kind, count in ((Old, 1), (Alone, 1), (New, 2)):
        handler = kind(model(layout))
        handler.attach(context_of(layout))
        assert [one.ranks for one in handler.covers()] == [(0, 2)] * count
        assert [one.ranks for one in handler.plan()] == [(0, 2)] * count
