"""The guard: what has come apart between ranks is named with rank and parameter, within one interval."""

from __future__ import annotations

import json
import re
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from colonnade._launch import launch
from colonnade.checkpoint import CheckpointManager
from colonnade.comm import waits
from colonnade.comm.torch_versions import is_alive
from colonnade.config import load_config
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.engine import guard as module
from colonnade.engine.build import initialize
from colonnade.engine.checks import guard_of
from colonnade.engine.gradient_handler import BaseGradientHandler
from colonnade.errors import ConfigError, GradientError
from colonnade.nn.layer import Linear, arrange
from colonnade.registry import GRADIENT_HANDLER
from colonnade.testing import WorldError, run_world
from tests.models.grid import GRID, Case, is_long, trained
from tests.ranks import on_ranks


class _ByHand(BaseGradientHandler):
    """Averages the gradients of one layer over the data ranks; `skips` are calls (by step, rank) that are left out."""

    layer = ""
    skips: tuple[tuple[int, int], ...] = ()

    def __init__(self, model: nn.Module, optimizer: Any = None) -> None:
        super().__init__(model, optimizer)
        self.step = 0

    def handle_gradient(self) -> None:
        group = self.context.get_group(ParallelMode.DATA)
        rank = self.context.get_global_rank()
        self.step += 1
        for name, parameter in self._model.named_parameters():
            if name.startswith(self.layer):
                if name.endswith("weight") and (self.step, rank) in self.skips:
                    continue
                dist.all_reduce(parameter.grad, group=group)
                parameter.grad /= dist.get_world_size(group)


@GRADIENT_HANDLER.register_module
class FirstByHand(_ByHand):
    layer = "0."


@GRADIENT_HANDLER.register_module
class LastByHand(_ByHand):
    layer = "1."


def start(config: dict[str, Any], model: Any = None) -> tuple[ParallelContext, Any]:
    gpc = launch(config, context=ParallelContext(), verbose=False)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) if model is None else model(gpc)
    # Steps so small that they do not round a difference of one ulp away again.
    optimizer = lambda p: torch.optim.AdamW(p, lr=1e-12)  # noqa: E731
    return gpc, initialize(net, optimizer, context=gpc)[0]


def train(engine: Any, steps: int) -> None:
    place = engine.context.get_local_rank(ParallelMode.DATA)
    for _ in range(steps):
        engine.zero_grad()
        engine.backward(engine(torch.full((2, 4), 1.0 + place)).square().mean())
        engine.step()


def said(run: Any, *arguments: Any) -> str:
    with pytest.raises(GradientError) as caught:
        run(*arguments)
    return str(caught.value)


def one_ulp(parameter: torch.Tensor, at: int = 3) -> None:
    with torch.no_grad():
        flat = parameter.view(-1)
        flat[at] = torch.nextafter(flat[at], torch.tensor(9.0))


def check_drift() -> None:
    """A weight, or a moment, that is off by one ulp on one rank."""
    gpc, engine = start({"guard": {"every": 2}})
    train(engine, 4)
    if gpc.get_global_rank() == 1:
        one_ulp(engine.model[1].weight)
    told = said(train, engine, 2)
    assert re.search(r"after 6 steps\. They last agreed after 4 steps", told)
    assert engine._watch._guard._log.steps  # of which the message told
    assert "the weights of '1.weight': rank 1 differs bitwise from rank 0, 2, 3" in told
    assert "'0.weight'" not in told.partition("the optimizer")[0]
    engine.close()
    gpc.destroy()
    for flat in (True, False):
        gpc, engine = start({"guard": {"every": 3}, "flat_step": flat})
        train(engine, 1)
        if gpc.get_global_rank() == 2:
            one_ulp(engine.optimizer.state[engine.model[0].bias]["exp_avg_sq"], 1)
        guard, waited = engine._watch._guard, list[bool]()
        engine._sync.before_pass = partial(waited.append, True)  # for weights that are on their way
        told = said(guard.check)
        assert waited
        assert "after 1 steps. They last agreed after 0 steps" in told
        assert "the optimizer's 'exp_avg_sq of 0.bias': rank 2 differs bitwise from rank 0, 1, 3" in told
        if flat:
            engine.close()
            assert not is_alive(guard._group)
        gpc.destroy()
        engine.close()  # the group is gone


def check_parts() -> None:
    """Under data 2 x tensor 2 only ranks that hold the same part are compared."""
    split = {"parallel": {"tensor": {"size": 2, "mode": "1d"}}}

    def build(gpc: ParallelContext) -> nn.Module:
        here = arrange(gpc)
        return nn.Sequential(Linear(4, 8, arrangement=here), nn.ReLU(), Linear(8, 4, split="row", arrangement=here))

    for zero in (0, 1, 2, 3):
        gpc, engine = start({**split, "zero": zero, "guard": {"every": 1}}, build)
        train(engine, 3)
        if zero < 3:
            if gpc.get_global_rank() == 3:
                one_ulp(engine.model[0].weight)
            told = said(engine._watch._guard.check)
            assert "the weights of '0.weight': rank 3 differs bitwise from rank 1" in told
            assert "2.bias" not in told
        engine.close()
        gpc.destroy()
    check_order_of_groups(split, build)


def check_order_of_groups(split: dict[str, Any], build: Any) -> None:
    """Sums that are planned in another order on one rank."""
    gpc, engine = start({**split, "guard": {"every": 1}, "sync": {"bucket_mb": 1e-5, "first_bucket_mb": 1e-5}}, build)
    train(engine, 2)
    buckets = engine._sync.synchroniser.buckets
    if gpc.get_global_rank() == 0:
        mine = [at for at, bucket in enumerate(buckets) if len(bucket.sum.ranks) == 2]
        buckets[mine[0]], buckets[mine[1]] = buckets[mine[1]], buckets[mine[0]]
    told = said(engine._watch._guard.check)
    assert re.search(
        r"the planned reductions differ: rank 0 starts the reduction of '.*', but rank 2 starts the reduction of '.*'",
        told,
    )
    engine.close()
    gpc.destroy()


def check_order() -> None:
    """Two handlers of as many elements, in another order on one rank: their gradients are summed with each other's."""
    handlers = [{"type": "FirstByHand"}, {"type": "LastByHand"}]
    gpc, engine = start({"guard": {"every": 3}, "gradient_handler": handlers})
    train(engine, 3)
    if gpc.get_global_rank() == 2:
        engine._sync.handlers.reverse()
    told = said(train, engine, 3)
    call = (
        r"calls at step 3 over ranks \[0, 1, 2, 3\]: rank 0, 1, 3 FirstByHand calls all_reduce of '0.weight', "
        r"rank 2 LastByHand calls all_reduce of '1.weight'"
    )
    assert re.search(call, told), told
    assert "(the order of handlers): rank 0, 1, 3 FirstByHand begins, rank 2 LastByHand begins" in told
    engine.close()
    gpc.destroy()


def check_no_alarm(folder: str) -> None:
    """Healthy runs say nothing, and are saved; a rank that drifted is not."""
    gpc, engine = start({"guard": True, "gradient_accumulation": 2, "clip_grad_norm": 1.0})
    train(engine, 6)
    with CheckpointManager(folder, gpc) as manager:
        manager.save(3, engine.model, engine.optimizer)
        assert not engine._watch._guard._log.steps  # what was compared is not kept
        if gpc.get_global_rank() == 0:
            one_ulp(engine.model[0].bias, 0)
        assert "the weights of '0.bias'" in said(manager.save, 4, engine.model, engine.optimizer)
        assert manager.steps() == [3]
        engine.close()
        manager.save(5, engine.model, engine.optimizer)  # nobody looks any more
    gpc.destroy()


@pytest.mark.slow
@on_ranks(4)
def test_what_has_come_apart_is_named_on_four_ranks(tmp_path):
    folder = str(tmp_path)
    check_drift()
    check_parts()
    check_order()
    check_no_alarm(folder)


def skip_one(every: int) -> None:
    """Rank 1 leaves a sum of its fourth step out, and is one call ahead from then on; all sums are of as many elements."""
    waits.PUBLISH_AFTER = 0.6
    FirstByHand.skips = ((4, 1),)
    handlers = [{"type": "FirstByHand"}, {"type": "LastByHand"}]

    def build(gpc: ParallelContext) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))

    _, engine = start({"guard": {"every": every}, "gradient_handler": handlers}, build)
    train(engine, every)


@pytest.mark.slow
def test_a_rank_that_skips_a_sum_is_named_where_the_others_would_wait_for_ever():
    with pytest.raises(WorldError) as caught:
        run_world(2, skip_one, 6)
    told = str(caught.value)
    assert (
        "rank 0 is in LastByHand, at all_reduce of '1.weight' over ranks [0, 1] of step 5 and waits for rank 1" in told
    )
    assert (
        "The calls of the two ranks differ from step 3 on: rank 1 LastByHand calls all_reduce of '1.weight', rank 0 FirstByHand calls all_reduce of "
        "'0.weight'" in told
    )


def train_guarded(cases: list[Case], zero: int) -> None:
    for case in cases:
        trained(case, zero, guard={"every": 1})


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(("first", "zero"), [(0, 0), (1, 0), (2, 0), (3, 0), (0, 3)])
def test_healthy_runs_are_let_alone(first, zero):
    """A quarter of the mixes on four ranks, in every step."""
    cases = [case for case in GRID if case.ranks == 4 and not is_long(case)]
    run_world(4, train_guarded, cases[first::4], zero, timeout=100)


@pytest.mark.parametrize(("given", "message"), [({"every": 0}, "every"), ({"interval": 5}, "every"), (7, "guard")])
def test_nonsense_in_the_config_is_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        load_config({"guard": given})


def test_alone_there_is_nobody_to_compare_with():
    with launch({"guard": True}, context=ParallelContext(), verbose=False) as gpc:
        assert guard_of(nn.Linear(2, 2), None, gpc, None) is None


# -- what is said, by arithmetic alone ---------------------------------------------------------------------

A, B = ("Mine", "all_reduce of 'a'", (0, 1, 2, 3)), ("Mine", "all_reduce of 'b'", (0, 1, 2, 3))
BEGINS, LATER = ("Mine", "begins", ()), ("Later", "begins", ())


def told(**said: Any) -> Any:
    return json.loads(json.dumps({"calls": [], "groups": [], "planned": {}, "replicas": {}, **said}))


def test_calls_that_part_are_said_of_all_ranks_of_an_opinion():
    groups = [[1, [0, 1, 2, 3]], [2, None]]
    said = {
        0: told(calls=[[BEGINS, A], [BEGINS, A]], groups=groups),
        2: told(calls=[[BEGINS, A], [BEGINS, B]], groups=groups),
        5: told(calls=[[BEGINS, A], [LATER, A]], groups=groups),
    }
    assert list(module._calls_apart({1: {7: [2, 3], 8: [0, 1]}}, said, 10)) == [
        "calls at step 11 over ranks [0, 1, 2, 3]: rank 0, 1 Mine calls all_reduce of 'a', rank 2, 3 Mine calls "
        "all_reduce of 'b'"
    ]
    assert list(module._calls_apart({2: {7: [5, 6], 8: [0, 1]}, 3: {7: [0], 8: [2]}}, said, 0)) == [
        "calls at step 1 (the order of handlers): rank 0, 1 Mine begins, rank 5, 6 Later begins"
    ]
    assert list(module._calls_apart({2: {7: [0, 1], 8: [2, 3]}}, said, 0)) == []


@pytest.mark.parametrize(
    ("place", "calls", "found"),
    [
        ("in Mine, at all_reduce of 'b' over ranks [0, 1, 2, 3] of step 1", [[A], [B]], True),
        ("in Mine, at all_reduce of 'a' over ranks [0, 1, 2, 3] of step 1", [[A], []], False),  # may wait for a third
        ("in Mine, at all_reduce of 'b' over ranks [1, 3] of step 1", [[A], [B]], False),
        ("summing the gradients", [[A], [B]], False),
        ("in Mine, at all_reduce of 'b' over ranks [0, 1, 2, 3] of step 1", None, False),
    ],
)
def test_a_rank_waits_in_vain_for_one_that_has_called_something_else(place, calls, found):
    said = module._waits_in_vain(2, [(A,), (A,)], place, json.loads(json.dumps(calls)))
    assert said == ((1, "Mine calls all_reduce of 'a'", "Mine calls all_reduce of 'b'") if found else None)


def test_state_is_what_the_optimizer_keeps_as_plain_tensors():
    parameter, moment = torch.ones(3), torch.ones(2)
    kept = {"exp_avg": moment, "step": 3, "rows": torch.eye(2).to_sparse()}

    def names(optimizer: Any) -> list[str]:
        return [name for name, value in module._state_of(optimizer, parameter) if value is moment]

    assert names(SimpleNamespace(state={parameter: kept})) == ["exp_avg"]
    assert names(SimpleNamespace(state={})) == names(SimpleNamespace()) == []
    shard = SimpleNamespace(state=kept, start=4, stop=6)
    for found, expected in ((shard, ["exp_avg[4:6]"]), (None, [])):
        sharded = SimpleNamespace(flat_shard={parameter: found}.get, param_groups=[], load_state_dict=print)
        assert names(sharded) == expected
