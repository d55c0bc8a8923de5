"""Slips of a loop, and backward passes that fail: said by name, and no rank is left waiting."""

from __future__ import annotations

import copy
import gc
import logging
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import colonnade
from colonnade._launch import launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.engine.build import initialize
from colonnade.engine.gradient_handler import BaseGradientHandler, PlannedGradientHandler
from colonnade.errors import GradientError, PlacementError
from colonnade.nn.layer import arrange
from colonnade.registry import GRADIENT_HANDLER
from colonnade.testing import gather_weights, run_world
from tests.engine.twins import CONFIGS, twins
from tests.gradients import scenarios
from tests.gradients.scenarios import numbers
from tests.ranks import on_ranks


class Fails(torch.autograd.Function):
    """The identity, whose backward pass raises where it is told to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fail: bool) -> Tensor:
        ctx.fail = fail
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if ctx.fail:
            raise RuntimeError("out of memory, say")
        return grad, None


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = (nn.Linear(5, 5).double() for _ in range(3))

    def forward(self, x: Tensor, fail: bool = False) -> Tensor:
        return self.third(torch.tanh(self.second(Fails.apply(torch.tanh(self.first(x)), fail))))


def _batch(rank: int, step: int) -> Tensor:
    return numbers(3, 5, seed=10 * step + rank)


@pytest.mark.parametrize(("accumulation", "counted"), [(1, False), (3, False), (2, True)])
@on_ranks(2)
def test_a_backward_pass_that_fails_costs_one_step_on_all_ranks(accumulation: int, counted: bool):
    """Rank 1 fails in step 1, both fail in step 3: these steps are dropped on both ranks, and the others are right."""
    for config in CONFIGS:
        config = {**config, "gradient_accumulation": accumulation}
        with twins(config, Net, lambda model: torch.optim.AdamW(model.parameters(), lr=0.1)) as both:
            for step in range(6):
                fails = step == 3 or (step == 1 and both.rank == 1)
                _try_step(both.engine, both.rank, step, fails, accumulation, counted)
                if step not in (1, 3):
                    passes = range(accumulation * step, accumulation * (step + 1))
                    both.follow(lambda plain, rank, at: plain(_batch(rank, at)).square().mean(), *passes)
            both.engine.zero_grad()
            assert both.engine.skipped_steps == 2


def _try_step(engine: Any, rank: int, step: int, fail: bool, accumulation: int, counted: bool) -> None:
    for at in range(accumulation * step, accumulation * (step + 1)):
        engine.zero_grad()
        out = engine(_batch(rank, at), fail=fail and at == accumulation * step).square()
        loss = (out.sum(), out.numel()) if counted else out.mean()
        if fail:
            with pytest.raises(RuntimeError, match="out of memory"):
                engine.backward(loss)
            with pytest.raises(GradientError, match=r"Call engine\.zero_grad\(\)"):
                engine.step()
            return
        engine.backward(loss)
        engine.step()


class Split(scenarios.Split):
    def forward(self, x: Tensor, fail: bool = False) -> Tensor:
        return super().forward(Fails.apply(x.requires_grad_(), fail))


@on_ranks(2)
def test_a_step_is_not_given_up_where_some_ranks_would_not_hear_of_it():
    """Tensor parallelism alone sums no gradient over its ranks, so nobody would tell rank 0 to drop the step."""
    for config in CONFIGS[:4:3]:
        with launch({"parallel": {"tensor": 2}, **config}, context=ParallelContext(), verbose=False) as gpc:
            engine = initialize(Split(gpc), lambda p: torch.optim.SGD(p, lr=0.1), context=gpc)[0]
            loss = engine(numbers(3, 6, seed=0), fail=gpc.get_global_rank() == 1).square().mean()
            if gpc.get_global_rank() == 0:
                engine.backward(loss)
            else:
                with pytest.raises(RuntimeError, match="out of memory"):
                    engine.backward(loss)
                with pytest.raises(GradientError, match=r"Ranks 0 share no gradient all-reduce with this rank"):
                    engine.zero_grad()
            engine.close()


@GRADIENT_HANDLER.register_module
class ThirdByHand(BaseGradientHandler):
    def handle_gradient(self):
        for parameter in self._model.third.parameters():
            dist.all_reduce(parameter.grad, group=self.context.get_group(ParallelMode.DATA))
            parameter.grad /= self.context.data_parallel_size


@GRADIENT_HANDLER.register_module
class OthersByPlan(PlannedGradientHandler):
    def reductions(self):
        return self.over(ParallelMode.DATA, ["first.*", "second.*"])


@on_ranks(2)
def test_a_handler_by_hand_is_not_called_for_a_step_that_was_given_up():
    for handlers in (["ThirdByHand"], ["ThirdByHand", "OthersByPlan"]):
        with launch({"gradient_handler": handlers}, context=ParallelContext(), verbose=False) as gpc:
            model, rank = Net(), gpc.get_global_rank()
            engine = initialize(model, lambda p: torch.optim.SGD(p, lr=0.1), context=gpc)[0]
            for step in range(3):
                _try_step(engine, rank, step, step == rank == 1, 1, counted=False)
            gather_weights(model, gpc)
            assert engine.skipped_steps == 1
            engine.close()


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("accumulation", [1, 2])
@on_ranks(2)
def test_a_backward_pass_that_fails_in_a_loop_over_uneven_batches(accumulation: int, at_once: bool):
    """Rank 1 fails in its third pass, and gives the step up in its handler (`at_once`) or at the next `zero_grad`."""
    for config in CONFIGS:
        with launch({**config, "gradient_accumulation": accumulation}, context=ParallelContext(), verbose=False) as gpc:
            model, rank, seen = Net(), gpc.get_global_rank(), 0
            engine = initialize(model, lambda p: torch.optim.SGD(p, lr=0.1), context=gpc)[0]
            for at in engine.batches(range(5 + 2 * rank)):
                seen += 1
                engine.zero_grad()
                loss = engine(_batch(rank, at), fail=rank == 1 and at == 2).square().mean()
                try:
                    engine.backward(loss)
                    engine.step()
                except RuntimeError as error:
                    if "out of memory" not in str(error):
                        raise
                    if at_once:
                        engine.zero_grad()
            assert seen == 5 + 2 * rank
            assert engine.skipped_steps == 1
            gather_weights(model, gpc)
            engine.close()


@pytest.mark.parametrize("always", [False, True])
@on_ranks(2)
def test_a_step_that_was_given_up_does_not_advance_the_learning_rate_on_any_rank(always: bool):
    """Rank 1 fails in step 1. Its loop calls the scheduler all the same (`always`), or not: the rates stay equal."""
    for config in CONFIGS:
        with launch(config, context=ParallelContext(), verbose=False) as gpc:
            model, rank, rates = Net(), gpc.get_global_rank(), []
            optimizer = torch.optim.SGD(model.parameters(), lr=0.8)
            inner = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
            engine, *_, scheduler = initialize(model, optimizer, lr_scheduler=inner, context=gpc)
            for step in range(4):
                engine.zero_grad()
                loss, failed = engine(_batch(rank, step), fail=step == rank == 1).square().mean(), False
                try:
                    engine.backward(loss)
                    engine.step()
                    assert engine.last_step_skipped == (step == 1)
                except RuntimeError:
                    failed = True
                if always or not failed:
                    scheduler.step()
                rates.append(optimizer.param_groups[0]["lr"])
            assert rates == [0.4, 0.4, 0.2, 0.1], f"with {config}"
            gather_weights(model, gpc)
            engine.close()


@on_ranks(2)
def test_steps_by_hand_are_said_by_name():
    for config in CONFIGS:
        with launch(config, context=ParallelContext(), verbose=False) as gpc:
            model = Net()
            engine = initialize(model, lambda p: torch.optim.AdamW(p, lr=0.1), context=gpc)[0]

            def begin(engine: Any = engine, step: int = 0, rank: int = gpc.get_global_rank()) -> Tensor:
                engine.zero_grad()
                return engine(_batch(rank, step)).square().mean()

            for _ in range(3):
                engine.backward(begin())
                engine.step()
            begin().backward()
            with pytest.raises(GradientError, match=r"Call engine\.backward\(loss\)"):
                engine.step()
            engine.backward(begin())
            with pytest.raises(GradientError, match=r"Call engine\.step\(\)"):
                engine.optimizer.step()
            engine.step()
            engine.backward(begin())
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            with pytest.raises(GradientError, match=r"changed between backward and step.*clip_grad_norm in the config"):
                engine.step()
            dist.barrier()  # the other rank may be in its backward pass still, and tell this one of a bucket
            engine.close()


@on_ranks(2)
def test_an_optimizer_whose_state_was_sharded_is_not_taken_again():
    """What an optimizer had learnt is in its sharded twin: a second engine would start from nothing, without a word."""
    for stage, second in ((1, 1), (2, 0)):
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        with launch({"zero": stage}, context=ParallelContext(), verbose=False) as gpc:
            engine = initialize(model, optimizer, context=gpc)[0]
            engine.backward(engine(_batch(0, 0)).square().mean())
            engine.step()
            sharded, state = engine.optimizer, engine.optimizer.state_dict()
            engine.close()
        with launch({"zero": second}, context=ParallelContext(), verbose=False) as gpc:
            for one in (optimizer, sharded):
                with pytest.raises(GradientError, match=r"sharded by an earlier initialize\(\).*load_state_dict"):
                    initialize(model, one, context=gpc)
            fresh = torch.optim.AdamW(model.parameters(), lr=0.1)
            fresh.load_state_dict(state)
            engine = initialize(model, fresh, context=gpc)[0]
            engine.backward(engine(_batch(0, 1)).square().mean())
            engine.step()
            assert {float(kept["step"]) for kept in engine.optimizer.state_dict()["state"].values()} == {2.0}
            engine.close()


@on_ranks(2)
def test_nothing_waits_for_the_garbage_collector():
    """Without Python's garbage collector: nothing of an engine stays, and old buckets go when new ones come."""
    for config in [*CONFIGS, {"clip_grad_norm": 1.0, "bf16": True}]:
        gc.collect()
        gc.disable()
        with launch(config, context=ParallelContext(), verbose=False) as gpc:
            dtype = torch.float32 if "bf16" in config else torch.float64
            model = Net().to(dtype)
            engine = initialize(model, lambda p: torch.optim.AdamW(p, lr=0.1), context=gpc)[0]
            old = [weakref.ref(bucket) for bucket in engine._sync.synchroniser.buckets]
            for step in range(3):
                if step == 1 and "zero" not in config:
                    model.first.requires_grad_(False)
                engine.zero_grad()
                engine.backward(engine(_batch(0, step).to(dtype)).square().mean())
                engine.step()
            if "zero" not in config:
                assert all(bucket() is None for bucket in old), "buckets that were laid out anew"
            parts = [engine, model, engine.optimizer, engine._sync, engine._sync.synchroniser, engine._stepper]
            buckets = engine._sync.synchroniser.buckets
            flats = [bucket.buffer.flat for bucket in buckets]
            alive = [weakref.ref(part) for part in [*parts, *buckets, *flats]]
            engine.close()
            del engine, model, parts, buckets, flats
            left = [type(ref()).__name__ for ref in alive if ref() is not None]
            assert not left, f"with {config}"
        gc.enable()


@on_ranks(2)
def test_double_precision_as_the_default_dtype():
    torch.set_default_dtype(torch.float64)
    for config in CONFIGS:
        with launch(config, context=ParallelContext(), verbose=False) as gpc:
            engine = initialize(nn.Linear(3, 3), lambda p: torch.optim.AdamW(p, lr=0.1), context=gpc)[0]
            for _ in range(2):
                engine.zero_grad()
                engine.backward(engine(torch.ones(2, 3)).square().mean())
                engine.step()
            engine.close()


def _repeated() -> list[str]:
    """What is warned of, for each model."""
    said: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said[-1] += record.getMessage()

    logging.getLogger("colonnade").addHandler(Keep(logging.WARNING))
    split = {"size": 2, "mode": "1d"}
    for tensor, build in (
        (2, lambda gpc: nn.Linear(4, 4)),
        (2, lambda gpc: colonnade.nn.Linear.from_module(nn.Linear(4, 4), arrangement=arrange(gpc))),
        (split, lambda gpc: nn.Linear(4, 4)),
        (split, lambda gpc: colonnade.nn.Linear.from_module(nn.Linear(4, 4), arrangement=arrange(gpc))),
        (2, scenarios.Split),
        ({"size": 2, "mode": "sequence"}, lambda gpc: nn.Linear(4, 4)),
        (1, lambda gpc: nn.Linear(4, 4)),
    ):
        said.append("")
        with launch({"parallel": {"tensor": tensor}}, context=ParallelContext(), verbose=False) as gpc:
            initialize(build(gpc), lambda p: torch.optim.SGD(p, lr=0.1), context=gpc)[0].close()
    return said


def test_ranks_that_would_repeat_each_others_work_are_told_of_it_once():
    first, second = run_world(2, _repeated).values
    repeat = "no parameter of the model is sharded over the 2 ranks of TENSOR, so these ranks repeat the same work"
    whole = "layers of colonnade.nn in the model are replicated on all 2 ranks of TENSOR"
    assert [(text.count(repeat), text.count(whole)) for text in first] == [(1, 0), (1, 1), (1, 0), *[(0, 0)] * 4]
    assert "tensor=dict(size=2, mode='1d')" in first[0]
    assert not any(second)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight


def test_a_tie_that_from_module_would_lose_is_refused():
    Embedding, Classifier, Linear = colonnade.nn.Embedding, colonnade.nn.Classifier, colonnade.nn.Linear
    with launch({"schedule": {"type": "OneFOneB", "num_microbatches": 2}}, context=ParallelContext()) as gpc:

        def parameters(model: Any) -> int:
            engine = initialize(model, lambda p: torch.optim.SGD(p, lr=0.1), context=gpc)[0]
            engine.close()
            return len(list(engine.model.parameters()))

        whole = Tied()
        first = Embedding.from_module(whole.embedding)
        for head in (Classifier.from_module(whole.head), Linear.from_module(whole.head), whole.head):
            with pytest.raises(PlacementError, match=r"'0.weight' and '1.weight' come from one.*weight=embedding"):
                parameters(nn.Sequential(first, head))
            stages = colonnade.split([nn.Sequential(first), nn.Sequential(head)])
            with pytest.raises(PlacementError, match="come from one full parameter"):
                parameters(stages)
        assert parameters(nn.Sequential(first, Classifier.from_module(whole.head, weight=first.weight))) == 1
        assert parameters(nn.Sequential(first, Classifier.from_module(copy.deepcopy(whole.head)))) == 2
        assert parameters(nn.Sequential(first, whole.requires_grad_(False).head)) == 2
