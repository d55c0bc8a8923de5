"""The probe: what it recognises, what it leaves alone, and what it says where ranks do different things."""

from __future__ import annotations

import random
import time
from collections import deque
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional

from colonnade._launch import launch
from colonnade.context.layout_builder import build_layout
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.engine.build import initialize
from colonnade.engine.gradient_handler import BaseGradientHandler
from colonnade.errors import LedgerError
from colonnade.gradients import probe
from colonnade.gradients.sums import read_demands
from colonnade.registry import GRADIENT_HANDLER
from colonnade.testing import run_world
from tests.ranks import on_ranks


class Model(nn.Module):
    """Gradients of many elements, of a few, and of one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(7, 5)
        self.scale = nn.Parameter(torch.ones(()))
        self.shift = nn.Parameter(torch.zeros(2))


class OverData(BaseGradientHandler):
    """A mean over DATA by hand; `how` is what the tests vary."""

    def __init__(self, model: nn.Module, optimizer: Any, how: str = "") -> None:
        super().__init__(model, optimizer)
        self.how = how

    @property
    def group(self) -> Any:
        return self.context.get_group(ParallelMode.DATA)

    @property
    def size(self) -> int:
        return self.context.data_parallel_size

    def gradients(self) -> list[torch.Tensor]:
        return [parameter.grad for parameter in self._model.parameters()]


@GRADIENT_HANDLER.register_module
class Compressed(OverData):
    def handle_gradient(self) -> None:
        gradients = self.gradients()
        if self.how == "int8 in one bucket":
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            self._int8(flat)
            for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
                gradient.copy_(part.view_as(gradient))
            return
        for gradient in gradients:
            if self.how == "int8":
                self._int8(gradient)
            elif self.how == "int8, gathered":
                self._gathered(gradient)
            elif self.how == "int8, no overflow":
                self._narrow(gradient)
            else:
                small = gradient.to(getattr(torch, self.how)) / self.size
                dist.all_reduce(small, group=self.group)
                gradient.copy_(small)

    def _int8(self, gradient: torch.Tensor) -> None:
        """One scale for all ranks, summed as int32; the mean is rounded to int8 again."""
        scale = gradient.abs().max() / 127
        dist.all_reduce(scale, op=dist.ReduceOp.MAX, group=self.group)
        whole = (gradient / scale).round().to(torch.int8).to(torch.int32)
        dist.all_reduce(whole, group=self.group)
        mean = whole * scale / self.size
        step = mean.abs().max().clamp(min=1e-12) / 127
        gradient.copy_((mean / step).round() * step)

    def _gathered(self, gradient: torch.Tensor) -> None:
        """A scale of each rank's own; sums are taken after a gather."""
        scale = gradient.abs().max() / 127
        mine = (gradient / scale).round().to(torch.int8)
        parts, scales = [[torch.empty_like(t) for _ in range(self.size)] for t in (mine, scale)]
        dist.all_gather(parts, mine, group=self.group)
        dist.all_gather(scales, scale, group=self.group)
        gradient.copy_(sum(part.float() * by for part, by in zip(parts, scales, strict=True)) / self.size)

    def _narrow(self, gradient: torch.Tensor) -> None:
        """Summed as int8: each rank uses its share of the 127 steps."""
        scale = gradient.abs().max() / (127 // self.size)
        dist.all_reduce(scale, op=dist.ReduceOp.MAX, group=self.group)
        small = (gradient / scale).round().to(torch.int8)
        dist.all_reduce(small, group=self.group)
        gradient.copy_(small * scale / self.size)


@GRADIENT_HANDLER.register_module
class Wrong(OverData):
    """Sums that are wrong by their numbers."""

    def handle_gradient(self) -> None:
        group = self.context.get_group(ParallelMode.TENSOR) if self.how == "over TENSOR" else self.group
        for gradient in self.gradients():
            small = gradient.bfloat16() if self.how == "bf16 by 3" else gradient
            for _ in range(2 if "twice" in self.how else 1):
                dist.all_reduce(small, group=group)
            if self.how not in ("undivided", "twice, undivided"):
                small = small / (3 if "by 3" in self.how else self.size)
            gradient.copy_(small)


@GRADIENT_HANDLER.register_module
class InLevels(OverData):
    """The weight over DATA and then over SEQUENCE; `how` says what becomes of the bias."""

    def handle_gradient(self) -> None:
        for name, parameter in self._model.named_parameters():
            over = ["DATA", "SEQUENCE"] if name == "weight" else self.how.split()
            for mode in over:
                dist.all_reduce(parameter.grad, group=self.context.get_group(ParallelMode[mode]))
            parameter.grad /= 4 if name == "weight" or len(set(over)) == 1 else 8


@GRADIENT_HANDLER.register_module
class Unlike(OverData):
    """Ranks that do different things."""

    def handle_gradient(self) -> None:
        rank = self.context.get_global_rank()
        if self.how == "raises on rank 2" and rank == 2:
            raise ValueError("no such thing")
        if self.how == "opposite order":
            modes = [ParallelMode.DATA, ParallelMode.TENSOR]
            for mode in modes if rank in (0, 3) else reversed(modes):
                dist.all_reduce(self.gradients()[0], group=self.context.get_group(mode))
            return
        for at, gradient in enumerate(self.gradients()):
            if rank == 2 and at == {"skips the last on rank 2": 3}.get(self.how, 0) and "skips" in self.how:
                continue
            if "functional" in self.how:
                gradient.copy_(functional.all_reduce(gradient, "sum", self.group))
                continue
            if self.how == "another dtype on rank 2" and rank == 2:
                gradient = gradient.double()
            if self.how == "gather on rank 2" and rank == 2:
                dist.all_gather([torch.empty_like(gradient) for _ in range(self.size)], gradient, group=self.group)
            elif self.how == "slow on rank 2":
                time.sleep(1.2 if rank == 2 and at == 0 else 0)
                dist.all_reduce(gradient, group=self.group)
                gradient /= self.size
            else:
                self.group.allreduce([gradient]).wait()


def _build(handler: dict[str, Any]) -> Any:
    """Who does what by parameter, or the error; and how long it took."""
    began = time.monotonic()
    config = {"parallel": {"tensor": 2}, "gradient_handler": [handler], "sync": {"automatic": False}}
    with launch(config, context=ParallelContext(), verbose=False) as gpc:
        try:
            engine = initialize(Model(), lambda p: torch.optim.SGD(p, lr=1), context=gpc)[0]
        except LedgerError as error:
            return str(error), time.monotonic() - began
        engine.close()
        return {(row.parameter, row.mode, row.divisor): row.done_by for row in engine.ledger().rows}, 0


def _build_all(handlers: list[dict[str, Any]]) -> list[Any]:
    return [_build(handler) for handler in handlers]


COMPRESSED = ["bfloat16", "float16", "int8", "int8 in one bucket", "int8, gathered", "int8, no overflow"]
WRONG = {
    "twice": "Wrong sums twice over DATA [0, 2]",
    "twice, undivided": "Wrong sums twice over DATA [0, 2]",
    "undivided": "Wrong sums over DATA [0, 2] and divides by 1, but 2 ranks saw distinct data",
    "by 3": "Wrong sums over DATA [0, 2] and divides by 3, but 2 ranks saw distinct data",
    "bf16 by 3": "Wrong sums over DATA [0, 2] and divides by 3, but 2 ranks saw distinct data",
    "over TENSOR": "[0, 1], but its placement (replicated) requires DATA [0, 2] / 2",
}
SAME = ". Let the handler make the same calls on every rank"
FIRST = "calls all_reduce of 1 element (float32) over ranks [0, 2]"
UNLIKE = {
    "skips the first on rank 2": "Unlike: rank 2 calls all_reduce of 2 elements (float32) over ranks [0, 2] where rank 0 "
    f"{FIRST} (after 0 equal calls over these ranks){SAME}",
    "skips the last on rank 2": "Unlike: rank 2 ends handle_gradient() where rank 0 calls all_reduce of 5 elements "
    f"(float32) over ranks [0, 2] (after 3 equal calls over these ranks){SAME}",
    "skips one of the functional calls on rank 2": "Unlike: rank 2 calls all_reduce of 2 elements",
    "another dtype on rank 2": f"(float64) over ranks [0, 2] where rank 0 {FIRST}",
    "gather on rank 2": f"rank 2 calls all_gather of 2 elements (float32) over ranks [0, 2] where rank 0 {FIRST}",
    "raises on rank 2": f"rank 2 stops with ValueError: no such thing where rank 0 {FIRST}",
    # Four ranks wait in a ring: whichever sees it first says it of itself and the one it waits for.
    "opposite order": FIRST.removesuffix("[0, 2]"),
}
ALL = [
    *({"type": "Compressed", "how": how} for how in COMPRESSED),
    *({"type": "Wrong", "how": how} for how in WRONG),
    *({"type": "Unlike", "how": how} for how in [*UNLIKE, "slow on rank 2"]),
]


@pytest.fixture(scope="module")
def built() -> dict[tuple[str, str], list[Any]]:
    """Every handler of this page on the same four ranks: (type, how) -> what each rank saw."""
    # Without torch's own check of mismatches: it would raise, where otherwise a rank aborts or waits.
    ranks = run_world(4, _build_all, ALL, env={"TORCH_DISTRIBUTED_DEBUG": "OFF"}).values
    return {(one["type"], one["how"]): [rank[at] for rank in ranks] for at, one in enumerate(ALL)}


@pytest.mark.parametrize("how", COMPRESSED)
def test_a_handler_that_compresses_is_recognised(built, how):
    names = [name for name, _ in Model().named_parameters()]
    for rows, _ in built["Compressed", how]:
        assert rows == {(name, "DATA", 2): "Compressed" for name in names}


@pytest.mark.parametrize("how", WRONG)
def test_wrong_sums_are_told_by_what_they_are(built, how):
    for rank, (error, _) in enumerate(built["Wrong", how]):
        assert isinstance(error, str)
        if rank == 0:
            assert WRONG[how] in error


def _in_levels(hows: list[str]) -> list[str]:
    found = []
    for how in hows:
        config = {"parallel": {"sequence": 2}, "gradient_handler": [{"type": "InLevels", "how": how}]}
        with launch(config, context=ParallelContext(), verbose=False) as gpc:
            torch.manual_seed(0)
            with pytest.raises(LedgerError) as refused:
                initialize(nn.Linear(6, 3), lambda p: torch.optim.SGD(p, lr=1), context=gpc)
            found.append(str(refused.value))
    return found


def test_a_level_that_was_forgotten_is_named():
    forgot_sequence, forgot_data, wrong_divisor = run_world(
        4, _in_levels, ["DATA", "SEQUENCE", "DATA SEQUENCE"]
    ).values[0]
    divided = "and divides by 4, the divisor of all required reductions, but does not sum over"
    assert f"bias: InLevels sums over DATA [0, 2] {divided} SEQUENCE [0, 1]" in forgot_sequence
    assert f"bias: InLevels sums over SEQUENCE [0, 1] {divided} DATA [0, 2]" in forgot_data
    assert "bias: InLevels sums over DATA and SEQUENCE [0, 1, 2, 3] and divides by 8, but 4 ranks saw" in wrong_divisor


@pytest.mark.parametrize("how", UNLIKE)
def test_where_ranks_call_different_things_every_rank_says_who_and_what_within_seconds(built, how):
    errors = [error for error, _ in built["Unlike", how]]
    assert any(UNLIKE[how] in error for error in errors), errors
    if how == "raises on rank 2":
        assert "Unlike.handle_gradient() raised ValueError" in errors.pop(2)
    assert all(SAME in error and " where rank " in error for error in errors), errors
    assert max(seconds for _, seconds in built["Unlike", how]) < 15


def test_a_rank_that_is_slow_is_waited_for(built):
    assert all(isinstance(rows, dict) for rows, _ in built["Unlike", "slow on rank 2"])


@GRADIENT_HANDLER.register_module
class Idle(BaseGradientHandler):
    """Does nothing, and counts how often."""

    runs = 0

    def handle_gradient(self) -> None:
        Idle.runs += 1


def _answers(stage: nn.Module, rank: int) -> list[list[int]]:
    """Of each run, how many sums explain each gradient that was let alone."""
    layout, values, found = build_layout({"parallel": {"pipeline": 2}}, 2), probe._ProbeValues(2), []
    demands = read_demands(stage, layout, rank)
    probed = [probe._Probed.of(demand, layout, rank) for demand in demands]
    for _ in range(2):
        values.next_run()
        for one in probed:
            one.values.append(values.of(rank, one.columns).double())
        found.append([len(probe._explain(Idle(stage), one, values, rank)) for one in probed])
    return found


def _stage(rank: int, expected: list[list[int]]) -> nn.Module:
    """A long gradient, and one of a single element whose name gives it marks that are as clear as expected."""
    for at in range(1000):
        stage = nn.Module()
        stage.register_parameter("long", nn.Parameter(torch.ones(9)))
        stage.register_parameter(f"short{at}", nn.Parameter(torch.ones(())))
        if _answers(stage, rank) == expected:
            return stage
    raise AssertionError("no such name")


def _looks_again() -> int:
    config = {"parallel": {"pipeline": 2}, "schedule": "NonPipelineSchedule", "gradient_handler": ["Idle"]}
    with launch(config, context=ParallelContext(), verbose=False) as gpc:
        rank = gpc.get_global_rank()
        model = _stage(rank, [[1, 2 - rank], [1, 1]])
        engine = initialize(model, torch.optim.SGD(model.parameters(), lr=1), context=gpc)[0]
        engine.close()
    return Idle.runs


def test_all_ranks_look_again_as_long_as_a_gradient_of_one_of_them_is_unclear():
    assert run_world(2, _looks_again).values == [2, 2]


# -- state ------------------------------------------------------------------------------------------------


@GRADIENT_HANDLER.register_module
class OfTrained(OverData):
    """A mean over DATA of the parameters that are trained at present."""

    def handle_gradient(self) -> None:
        for parameter in self._model.parameters():
            if parameter.requires_grad:
                dist.all_reduce(parameter.grad, group=self.group)
                parameter.grad /= self.size


@on_ranks(2)
def test_a_handler_that_skips_frozen_parameters_is_right():
    config = {"gradient_handler": ["OfTrained"], "sync": {"automatic": False}}
    with launch(config, context=ParallelContext(), verbose=False) as gpc:
        model = Model()
        model.linear.requires_grad_(False)
        engine = initialize(model, lambda p: torch.optim.SGD(p, lr=1), context=gpc)[0]
        engine.close()
        rows = {row.parameter: row.done_by for row in engine.ledger().rows}
        trained = [parameter.requires_grad for parameter in model.parameters()]
    assert rows == dict.fromkeys(("scale", "shift", "linear.weight", "linear.bias"), "OfTrained")
    assert trained == [True, True, False, False]


@GRADIENT_HANDLER.register_module
class Stateful(OverData):
    """Error feedback, a step counter and random numbers."""

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        super().__init__(model, optimizer)
        self.steps = 0
        self.errors = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
        self.alias = self.errors["scale"]
        self.history: Any = ([1], deque([2]), {3})

    def handle_gradient(self) -> None:
        self.steps += 1
        self.fresh = self.steps
        self.history[0].append(self.steps)
        self.history[1].clear()
        self.history[2].add(self.steps + 3)
        torch.rand(1), random.random()
        for (name, error), gradient in zip(list(self.errors.items()), self.gradients(), strict=True):
            error.add_(gradient)
            self.errors[name] = torch.ones(3)
            dist.all_reduce(gradient, group=self.group)
            gradient /= self.size


@on_ranks(2)
def test_a_handler_with_state_and_the_random_streams_are_as_before():
    numpy = pytest.importorskip("numpy")
    with launch({"gradient_handler": ["Stateful"]}, context=ParallelContext(), verbose=False) as gpc:
        model = Model()
        kept = [torch.full_like(parameter, 7) for parameter in model.parameters()]
        for parameter, gradient in zip(model.parameters(), kept, strict=True):
            parameter.grad = gradient
        torch.manual_seed(5), random.seed(5), numpy.random.seed(5)
        engine = initialize(model, torch.optim.SGD(model.parameters(), lr=1), context=gpc)[0]
        drawn = torch.rand(1).item(), random.random(), numpy.random.rand()
        torch.manual_seed(5), random.seed(5), numpy.random.seed(5)
        assert drawn == (torch.rand(1).item(), random.random(), numpy.random.rand())
        (handler,) = engine.gradient_handlers
        assert handler.steps == 0
        assert not hasattr(handler, "fresh")
        assert handler.alias is handler.errors["scale"]
        assert all(
            error.shape == p.shape and not error.any() for error, p in zip(handler.errors.values(), kept, strict=True)
        )
        assert handler.history == ([1], deque([2]), {3})
        engine.close()


# -- marks ------------------------------------------------------------------------------------------------


def _rounded(rows: torch.Tensor, how: str) -> torch.Tensor:
    """The mean of the rows, taken one by one in little precision."""
    if how == "bf16":
        total = torch.zeros(rows.shape[1], dtype=torch.bfloat16)
        for row in rows:
            total += row.bfloat16()
        return (total / len(rows)).double()
    scale = rows.abs().max() / 127
    mean = (rows / scale).round().sum(0) * scale / len(rows)
    step = mean.abs().max() / 127
    return ((mean / step).round() * step).double()


@pytest.mark.parametrize("how", ["bf16", "int8"])
@pytest.mark.parametrize("ranks", [2, 3, 8, 64, 1000, 4096])
def test_marks_survive_little_precision_over_thousands_of_ranks(ranks, how):
    marks = probe._ProbeValues(ranks + 1)
    marks.next_run()
    columns = torch.arange(32)
    everyone, fewer = tuple(range(ranks)), tuple(range(1, ranks + 1))
    values = _rounded(marks._runs[0][:ranks, columns].double(), how)
    step = probe._INT8 * marks.largest_sum(ranks)
    assert probe._divisor(values, marks.total(everyone, columns), ranks, step, exact=False) == ranks
    assert probe._divisor(values, marks.total(fewer, columns), ranks, step, exact=False) is None or ranks > 64


def test_marks_are_six_numbers_around_zero() -> None:
    values = {*probe._VALUES.tolist()}
    assert values == {-value for value in values}, "sums over many ranks stay near zero"
    assert len(values) == 6
    assert 0 not in values, "or a rank could be left out unseen"
