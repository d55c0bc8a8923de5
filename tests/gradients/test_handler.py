"""Handlers by themselves: which are attached, what each plans, in which order they run, and who multiplies by a factor."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from colonnade._launch import launch
from colonnade.context.layout import Layout
from colonnade.context.layout_builder import build_layout
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode as M
from colonnade.engine.build import initialize
from colonnade.engine.gradient_handler import (
    BaseGradientHandler,
    DataParallelGradientHandler,
    PlannedGradientHandler,
    ZeROGradientHandler,
)
from colonnade.errors import ConfigError, GradientError
from colonnade.gradients.handler import attach_automatic, build_gradient_handler, build_handlers
from colonnade.gradients.ledger import match
from colonnade.gradients.sums import Reduction, read_demands
from colonnade.parallel.placement import Replicate, Shard, place
from colonnade.registry import GRADIENT_HANDLER


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
            {MOE: {("plain", "DATA"), ("sums", "DATA"), ("expert", "EXPERT_DATA")}, REST: {("sums", "TENSOR")}},
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


# -- handlers of an engine ---
@GRADIENT_HANDLER.register_module
class SyncNotes(BaseGradientHandler):
    """Notes what it is told."""

    scales = False

    def __init__(self, model: nn.Module, optimizer: Any = None) -> None:
        super().__init__(model, optimizer)
        self.told: list[Any] = []

    def handle_gradient(self) -> None:
        self.told.append("handle")

    def prepare(self, last: bool) -> None:
        self.told.append(("prepare", last))

    def set_scale(self, scale: Any) -> bool:
        self.told.append(("scale", scale))
        return self.scales

    def close(self) -> None:
        self.told.append("close")

    def covers(self) -> list[Any]:
        return []


@GRADIENT_HANDLER.register_module
class SyncScales(SyncNotes):
    scales = True


@GRADIENT_HANDLER.register_module
class SyncNothing:
    def __init__(self, model: Any, optimizer: Any) -> None: ...


class Sums(torch.optim.SGD):
    """One that sums gradients itself."""

    def sync_grad(self) -> None:
        self.told = [*getattr(self, "told", ()), "sync_grad"]


def test_an_optimizer_that_sums_itself_comes_first_and_once():
    model = nn.Linear(1, 1)
    sums, plain = Sums(model.parameters()), torch.optim.SGD(model.parameters())

    def names(named: list[str], optimizer: Any) -> list[str]:
        with launch({}, context=ParallelContext(), verbose=False) as gpc:
            built = build_handlers(named, model, optimizer, gpc)
            assert all(handler.context is gpc for handler, _ in built)
            return [type(handler).__name__ for handler, _ in built]

    assert names(["SyncNotes", "SyncScales"], sums) == ["ZeROGradientHandler", "SyncNotes", "SyncScales"]
    assert names(["SyncNotes", "ZeROGradientHandler"], sums) == ["SyncNotes", "ZeROGradientHandler"]
    assert names(["SyncNotes"], plain) == ["SyncNotes"]
    with pytest.raises(GradientError, match=r"needs an optimizer with sync_grad\(\), but SGD"):
        names(["ZeROGradientHandler"], plain)


def test_an_optimizer_that_sums_itself_is_told_what_it_wants_to_hear():
    model = nn.Linear(1, 1)
    quiet = ZeROGradientHandler(model, Sums(model.parameters()))
    quiet.prepare(True)
    assert quiet.set_scale(2.0) is False
    quiet.handle_gradient()
    assert quiet._optimizer.told == ["sync_grad"]
    told: list[Any] = []
    optimizer = SimpleNamespace(
        sync_grad=lambda: told.append("sync"), prepare=told.append, set_scale=told.append, param_groups=[]
    )
    handler = ZeROGradientHandler(model, optimizer)
    handler.prepare(True)
    assert handler.set_scale(2.0) is True
    handler.handle_gradient()
    assert told == [True, 2.0, "sync"]
    optimizer.param_groups = [{"params": [model.weight]}]
    handler.attach(SimpleNamespace(layout=build_layout({}, 2), get_global_rank=lambda: 0))  # type: ignore[arg-type]
    assert [(one.names, one.ranks, one.divisor) for one in handler.covers()] == [(("weight",), (0, 1), 2)]


@pytest.mark.parametrize("counted", [False, True])
def test_a_handler_hears_of_every_pass_and_runs_when_the_sums_have_ended(counted):
    config = {"gradient_handler": ["SyncNotes", "SyncScales"], "gradient_accumulation": 2}
    with launch(config, context=ParallelContext(), verbose=False) as gpc:
        model = nn.Linear(1, 1)
        engine = initialize(model, torch.optim.SGD(model.parameters(), lr=1.0), context=gpc)[0]
        for _ in range(2):
            loss = engine(torch.ones(1, 1)).sum()
            engine.backward((loss, 2) if counted else loss)
            engine.step()
        for handler in engine.gradient_handlers[-2:]:
            passes, (scale, factor), handled = handler.told[:2], handler.told[2], handler.told[3]
            assert passes == [("prepare", False), ("prepare", True)]
            assert (scale, None if factor is None else float(factor)) == ("scale", 0.25 if counted else None)
            assert handled == "handle"
        engine.close()
        assert all(handler.told[-1] == "close" for handler in engine.gradient_handlers[-2:])


def test_what_cannot_be_built_or_has_no_handle_gradient_is_refused():
    model = nn.Linear(1, 1)
    assert isinstance(build_gradient_handler("SyncNotes", model, None), SyncNotes)
    assert isinstance(build_gradient_handler({"type": "SyncScales"}, model, None), SyncScales)
    with pytest.raises(ConfigError, match=r"SyncNothing has no handle_gradient\(\)"):
        build_gradient_handler("SyncNothing", model, None)
    with pytest.raises(ConfigError, match=r"SyncNotes could not be built with \{'x': 1\}"):
        build_gradient_handler({"type": "SyncNotes", "x": 1}, model, None)
