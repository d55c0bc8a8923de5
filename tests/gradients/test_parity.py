"""Every scenario equals one process to 1e-12; and every planted bug is caught, twice over."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from colonnade._launch import launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.engine.build import initialize
from colonnade.engine.gradient_handler import BaseGradientHandler, PlannedGradientHandler, Reduction
from colonnade.errors import GradientError, LedgerError, ParityError
from colonnade.parallel.demand import joint_ranks
from colonnade.registry import GRADIENT_HANDLER
from colonnade.testing import compare, gather_gradients, gather_weights, plain_gradients, run_world
from tests.gradients.scenarios import MINE, SCENARIOS, Plain, Scenario
from tests.ranks import on_ranks

RTOL = 1e-12
FAST = {"TORCH_DISTRIBUTED_DEBUG": "OFF"}
"""For the long tables: the mismatch checks of DETAIL double their time, and the short ones run with them."""


def _start(scenario: Scenario, gpc: ParallelContext):
    return initialize(lambda: scenario.build(gpc), lambda parameters: torch.optim.SGD(parameters, lr=0.1), context=gpc)[
        0
    ]


def _run(name: str, **config: object) -> str:
    """One step of a scenario; returns the ledger as printed."""
    scenario = SCENARIOS[name]
    config = {**scenario.config, **config}
    with launch(config, context=ParallelContext(), verbose=False) as gpc:
        engine = _start(scenario, gpc)
        engine.zero_grad()
        scenario.run(engine, gpc)
        engine._sum_gradients()
        compare(scenario.truth(), gather_gradients(engine.model, gpc), RTOL)
        engine.close()
        return str(engine.ledger())


def _run_with_each(names: list[str], settings: list[dict[str, object]]) -> None:
    for name, sync in itertools.product(names, settings):
        try:
            _run(name, sync=sync)
        except ParityError as error:
            raise ParityError(f"{name} with {sync}: {error}") from error


@pytest.mark.parametrize("world", [2, 4, 8])
def test_gradients_equal_one_process_on_the_joined_batch(world):
    names = [name for name, scenario in SCENARIOS.items() if scenario.world == world]
    run_world(world, _run_with_each, names, [{}])


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["data 4", "data 2 x pipeline 4, tied", "expert 2 in data 4", "accumulation 3, uneven"]
)
def test_so_they_do_over_gloo_in_tiny_buckets_and_with_or_without_overlap(name):
    settings = [{"shared_memory": False}, {"bucket_mb": 0.0001}, {"overlap": True}, {"overlap": False}]
    run_world(SCENARIOS[name].world, _run_with_each, [name], settings, env=FAST)


def _steps(name: str) -> None:
    scenario = SCENARIOS[name]
    with launch(scenario.config, context=ParallelContext(), verbose=False) as gpc:
        engine = _start(scenario, gpc)
        truth = {key: value.clone() for key, value in gather_weights(engine.model, gpc).items()}
        for _ in range(3):
            engine.zero_grad()
            scenario.run(engine, gpc)
            assert engine.step() is True
        moved = compare(truth, gather_weights(engine.model, gpc), 1e-9, check=False)
        assert not moved.ok
        engine.close()


@pytest.mark.parametrize("name", ["data 2 x tensor 2", "data 2 x pipeline 4, tied", "expert 2 in data 4"])
def test_holders_of_the_same_part_stay_equal_to_the_bit_over_steps(name):
    run_world(SCENARIOS[name].world, _steps, name)


@GRADIENT_HANDLER.register_module
class ByHand(BaseGradientHandler):
    """Sums as a user would who has never heard of buckets; what is not of `part` is left to the built-ins."""

    def __init__(self, model, optimizer, part):
        super().__init__(model, optimizer)
        self.part = part

    def handle_gradient(self):
        for parameter in self._model.get_submodule(self.part).parameters():
            dist.all_reduce(parameter.grad, group=self.context.get_group(ParallelMode.DATA))
            parameter.grad = parameter.grad / self.context.data_parallel_size


@on_ranks(2)
def test_a_handler_by_hand_trains():
    scenario = SCENARIOS["data 2"]
    configs = ({}, {"flat_step": False}, {"clip_grad_norm": 1e9}, {"sync": {"shared_memory": False}})
    for config, part in itertools.product(configs, ("", "head")):
        handler = [{"type": "ByHand", "part": part}]
        with launch({"gradient_handler": handler, **config}, context=ParallelContext(), verbose=False) as gpc:
            engine, plain = _start(scenario, gpc), Plain()
            for counts in (None, (3, 5)):  # a mean, then sums of unequal counts
                engine.zero_grad()
                if counts is None:
                    scenario.run(engine, gpc)
                else:
                    x, y = scenario.batch(gpc.get_global_rank())
                    engine.backward((F.mse_loss(engine(x), y), counts[gpc.get_global_rank()]))
                engine.step()
                loss = sum(F.mse_loss(plain(x), y) for x, y in map(scenario.batch, range(2))) / sum(counts or (1, 1))
                plain_gradients(plain, loss)
                torch.optim.SGD(plain.parameters(), lr=0.1).step()
            compare(dict(plain.named_parameters()), gather_weights(engine.model, gpc), RTOL)
            engine.close()


@on_ranks(2)
def test_a_handler_by_hand_is_refused_by_name_where_zero_shards_its_gradients():
    for stage in (1, 2):
        config = {"gradient_handler": [{"type": "ByHand", "part": "head"}], "zero": stage}
        with (
            launch(config, context=ParallelContext(), verbose=False) as gpc,
            pytest.raises(
                GradientError, match=r"ByHand sums 'head\.weight' in handle_gradient.*PlannedGradientHandler"
            ),
        ):
            _start(SCENARIOS["data 2"], gpc)


# -- planted bugs -----------------------------------------------------------------------------------------


@GRADIENT_HANDLER.register_module
class Planted(BaseGradientHandler):
    """Reduces by hand, in one of four wrong ways (or the right one)."""

    def __init__(self, model, optimizer, bug):
        super().__init__(model, optimizer)
        self.bug = bug

    def handle_gradient(self):
        gpc = self.context
        layout, rank = gpc.layout, gpc.get_global_rank()
        for demand in self.demands():
            ranks = joint_ranks(layout, demand.placement, demand.owed, rank) if demand.owed else (rank,)
            divisor = 1
            for factor in demand.owed:
                divisor *= factor.divisor
            if self.bug == "wrong divisor":
                divisor = divisor * 2
            if self.bug == "wrong group":
                ranks = self._wrong(ranks, demand)
            gradient = demand.parameter.grad
            if gradient is None:
                gradient = demand.parameter.grad = torch.zeros_like(demand.parameter)
            if self.bug == "no reduce" or not demand.owed:
                continue
            # Twice the sum, once divided: a mean of means would be the same mean again.
            for _ in range(2 if self.bug == "twice" else 1):
                dist.all_reduce(gradient, group=gpc.group_of_ranks(ranks))
            gradient /= divisor

    def _wrong(self, ranks, demand):
        """Not the group that is owed, but one that all who share the parameter's shape are in."""
        gpc = self.context
        if gpc.pipeline_parallel_size > 1:
            return tuple(gpc.get_ranks_in_group(ParallelMode.DATA))
        everyone = tuple(range(gpc.world_size))
        return (gpc.get_global_rank(),) if ranks == everyone else everyone


BUGS = ["no reduce", "twice", "wrong divisor", "wrong group"]


def _planted(name: str, bug: str) -> tuple[str, str]:
    """(what the ledger says, what the comparison says when the ledger's check is waived)"""
    scenario = SCENARIOS[name]
    handler = [{"type": "Planted", "bug": bug}]
    messages = []
    for sync in ({"automatic": False}, {"automatic": False, "waive": ["*"]}):
        config = {**scenario.config, "gradient_handler": handler, "sync": sync}
        with launch(config, context=ParallelContext(), verbose=False) as gpc:
            gpc.ensure_groups(_joint_sets(scenario, gpc))
            try:
                engine = _start(scenario, gpc)
                engine.zero_grad()
                scenario.run(engine, gpc)
                engine._sum_gradients()
                compare(scenario.truth(), gather_gradients(engine.model, gpc), RTOL)
                messages.append("")
            except (LedgerError, ParityError) as error:
                messages.append(f"{type(error).__name__}: {error}")
            dist.barrier()
    return messages[0], messages[1]


def _joint_sets(scenario, gpc):
    handler = Planted(scenario.build(gpc), None, "")
    handler.attach(gpc)
    rank = gpc.get_global_rank()
    sets = [joint_ranks(gpc.layout, d.placement, d.owed, rank) for d in handler.demands() if d.owed]
    return [*sets, (rank,)]


def _each_planted(planted: list[tuple[str, str]]) -> list[tuple[str, str]]:
    return [_planted(name, bug) for name, bug in planted]


ONE_HOLDER = ("expert 4 in data 4", "twice")
"""Experts of size 4 have one holder: there is no second sum to see, only a second division."""
PLANTED = {(name, bug) for name in SCENARIOS for bug in BUGS if name != "accumulation 3, uneven"} - {ONE_HOLDER}
IN_TURN = {one for at, one in enumerate(sorted(PLANTED)) if at % 3 != 2}
"""Two thirds: each bug under several scenarios, and each scenario with two or three bugs. The long test has all."""


@pytest.mark.slow
@pytest.mark.parametrize("chosen", [IN_TURN, pytest.param(PLANTED, marks=pytest.mark.long)], ids=["in turn", "all"])
@pytest.mark.parametrize("world", [2, 4, 8])
def test_every_planted_bug_is_caught_by_the_ledger_and_by_the_comparison(world, chosen):
    planted = sorted(one for one in chosen if SCENARIOS[one[0]].world == world)
    for rank, found in enumerate(run_world(world, _each_planted, planted, env=FAST, timeout=110).values):
        for one, (ledger, comparison) in zip(planted, found, strict=True):
            assert ledger.startswith("LedgerError"), (rank, one, ledger)
            assert comparison.startswith("ParityError"), (rank, one, comparison)


def test_the_same_handler_without_a_bug_is_found_to_do_what_is_owed():
    for ledger, comparison in run_world(4, _planted, "expert 2 in data 4", "").values:
        assert ledger == comparison == ""


# -- a handler of one's own -------------------------------------------------------------------------------


@GRADIENT_HANDLER.register_module
class MineHandler(PlannedGradientHandler):
    """One line says what; buckets and overlap come by themselves."""

    def reductions(self) -> list[Reduction]:
        return self.over(MINE)


@GRADIENT_HANDLER.register_module
class NothingHandler(BaseGradientHandler):
    """Does nothing, and is found to do nothing."""

    def handle_gradient(self) -> None:
        self.called = True


@pytest.mark.parametrize(
    "handlers", [["MineHandler"], [{"type": "NothingHandler"}, {"type": "MineHandler", "bucket_mb": 1}]]
)
def test_a_handler_for_a_mode_of_ones_own_in_one_line(handlers):
    ledger = run_world(4, _run, "registered 2 x data 2", gradient_handler=handlers).values[0]
    assert "MineHandler" in ledger
    assert "DataParallelGradientHandler" in ledger
    assert "NothingHandler" not in ledger


@on_ranks(2)
def test_a_built_in_handler_works_by_hand_as_the_seeds_describe_it():
    scenario = SCENARIOS["data 2"]
    with launch({}, context=ParallelContext(), verbose=False) as gpc:
        model = scenario.build(gpc)
        handler = GRADIENT_HANDLER.get_module("DataParallelGradientHandler")(model, None)
        handler.attach(gpc)
        x, y = scenario.batch(gpc.get_local_rank(ParallelMode.DATA))
        for _ in range(2):
            model.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            handler.handle_gradient()
            compare(scenario.truth(), gather_gradients(model, gpc), RTOL)
