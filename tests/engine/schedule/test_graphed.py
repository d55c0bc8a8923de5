"""Passes as CUDA graphs: on a GPU the steps of an engine with and without; on a CPU what the host does around a replay."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from colonnade._launch import launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.engine import build
from colonnade.engine.build import initialize
from colonnade.engine.engine import Observer
from colonnade.engine.schedule import graphed
from colonnade.engine.schedule.graphed import WARM_UP, GraphedSchedule
from colonnade.errors import GradientError
from colonnade.models import GPT

STEPS = WARM_UP + 5
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
VOCABULARY, LENGTH, ROWS = 32, 16, 4


class FakeGraph:
    """Runs the recorded work again, on the same tensors."""

    def __init__(self) -> None:
        self.work: Callable[[], Any] = lambda: None

    def replay(self) -> None:
        self.work()


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recordings on a CPU: what is recorded runs when it is replayed, and writes into the results of the recording."""
    if torch.cuda.is_available():
        pytest.skip("the tests with real recordings run in its place")
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: FakeStream())
    monkeypatch.setattr(GraphedSchedule, "_record", record)
    monkeypatch.setattr(build, "bool", lambda value: False, raising=False)  # no graph of the optimizer step
    monkeypatch.setattr(graphed, "graphed", lambda schedule, handlers, device, world_size: FakeSchedule(device))


class FakeStream:
    def wait_stream(self, _: Any) -> None:
        pass


class FakeSchedule(GraphedSchedule):
    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._stream = FakeStream()  # type: ignore[assignment]


def record(
    self: Any, engine: Any, leaves: list[Any], structure: Any, first: bool, return_output_label: bool
) -> graphed._Recording:
    """As the real one, but the passes run once, to have results, and again in every replay."""
    inputs = [leaf.clone() for leaf in leaves]
    parameters = list(engine.model.parameters())
    before = [None if first or parameter.grad is None else parameter.grad.clone() for parameter in parameters]
    graph = FakeGraph()

    def work() -> tuple[Any, ...]:
        with engine.pass_without_trace() as traced:
            if first:
                for parameter in parameters:
                    parameter.grad = None
            result = self._run(engine, graphed.tree_unflatten(inputs, structure), return_output_label)
        return result, traced.count, traced.loss_count

    recording = graphed._Recording(graph, inputs, *_static(work()))  # type: ignore[arg-type]

    def again() -> None:
        engine._passes -= 1  # the engine has counted the replay already
        new = work()
        engine._passes += 1
        old = recording.result, recording.count, recording.loss_count
        for to, value in zip(graphed.tree_flatten(old)[0], graphed.tree_flatten(new)[0], strict=True):
            if isinstance(to, Tensor):
                to.copy_(value)
        recording.grads[:] = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]

    graph.work = again
    for parameter, value in zip(parameters, before, strict=True):
        parameter.grad = None if first else value
    return recording


def _static(made: tuple[Any, ...]) -> tuple[Any, ...]:
    result, count, loss_count = graphed.tree_map_only(Tensor, lambda value: value.detach().clone(), made)
    return result, [], count, loss_count


@contextlib.contextmanager
def engine_of(cuda_graph: Any, dropout: float = 0.0, **config: Any) -> Iterator[tuple[Any, Any]]:
    torch.manual_seed(0)
    settings = {"clip_grad_norm": 0.5, "cuda_graph": cuda_graph, **config}
    with launch(settings, context=ParallelContext(), verbose=False, backend="gloo") as gpc:
        model = GPT(VOCABULARY, LENGTH, 32, 4, 2, dropout=dropout, context=gpc)
        # Adam would make steps of full size of gradients that are zero but for rounding (of the bias on keys).
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
        engine, _, _, scheduler = initialize(model, optimizer, model.criterion(), lr_scheduler=scheduler, context=gpc)
        torch.manual_seed(1)
        yield engine, scheduler
        engine.close()


def batch(at: int, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(VOCABULARY, (rows, LENGTH + 1), generator=torch.Generator().manual_seed(at))
    labels = tokens[:, 1:].clone()
    labels[0, : at % 5] = -100  # passes of different counts
    return tokens[:, :-1], labels


def trained(cuda_graph: Any, **config: Any) -> tuple[list[float], list[float], list[Tensor]]:
    """Losses, norms and weights; with a learning-rate schedule, an evaluation on the way, and a skipped step."""
    accumulation = config.get("gradient_accumulation", 1)
    losses: list[Tensor] = []
    norms: list[Tensor] = []
    with engine_of(cuda_graph, **config) as (engine, scheduler):
        for step in range(STEPS):
            engine.zero_grad()
            for micro in range(accumulation):
                losses.append(engine.execute_schedule(iter([batch(10 * step + micro)]))[2])
                engine.step()
            norms.append(engine.grad_norm)
            scheduler.step()
            if step == WARM_UP + 1:
                engine.eval()
                engine.execute_schedule(iter([batch(999, rows=2)]), forward_only=True)
                engine.train()
            if step == WARM_UP + 2:
                with torch.no_grad():
                    next(engine.model.parameters()).fill_(math.nan)
                engine.zero_grad()
                for _ in range(accumulation):
                    engine.execute_schedule(iter([batch(5)]))
                    engine.step()
                assert engine.last_step_skipped
                with torch.no_grad():
                    next(engine.model.parameters()).fill_(0.01)
        assert engine.skipped_steps == 1
        weights = [parameter.detach().clone() for parameter in engine.model.parameters()]
    return [float(loss) for loss in losses], [float(norm) for norm in norms], weights


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"gradient_accumulation": 3},
    "bf16": {"bf16": True},
    "fp16": {"fp16": {"init_scale": 256.0}},
    "dropout": {"dropout": 0.1},
    "zclip": {"clip_grad_norm": {"method": {"type": "zclip", "warmup": 3}}},
    "compiled": {"compile": True, "bf16": True},
}


@needs_gpu
@pytest.mark.parametrize("name", CASES)
def test_replayed_steps_are_the_steps(name: str) -> None:
    """The same kernels on the same values; those of attention add in any order."""
    half = any(key in CASES[name] for key in ("bf16", "fp16"))
    compare(trained(False, **CASES[name]), trained(True, **CASES[name]), 1e-2 if half else 1e-4)


def test_the_host_counts_replayed_passes_as_others(on_cpu: None) -> None:
    for name in ("plain", "accumulated", "zclip"):
        compare(trained(False, **CASES[name]), trained(True, **CASES[name]))


def compare(eager: Any, replayed: Any, tolerance: float = 1e-6) -> None:
    for one, other in zip(eager[:2], replayed[:2], strict=True):
        assert one == pytest.approx(other, rel=tolerance, nan_ok=True)
    for one, other in zip(eager[2], replayed[2], strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance / 10)


def test_later_passes_are_recorded_after_the_first(on_cpu: None) -> None:
    """They add to the gradients of the first one, which get their place when it is recorded."""
    with engine_of(True, gradient_accumulation=3) as (engine, _):
        seen = set()
        for step in range(STEPS):
            engine.zero_grad()
            for micro in range(3):
                engine.execute_schedule(iter([batch(10 * step + micro)]))
                engine.step()
                seen.add(tuple(engine.schedule._recordings))
    assert seen == {(), (True,), (True, False)}


def test_results_are_copies_and_another_form_of_batch_is_an_error(on_cpu: None) -> None:
    with engine_of(True) as (engine, _):
        kept = []
        for step in range(STEPS):
            engine.zero_grad()
            output, label, loss = engine.execute_schedule(iter([batch(step)]))
            kept.append((output, output.clone(), loss, loss.clone()))
            assert torch.equal(label, batch(step)[1])
            engine.step()
        for output, then, loss, loss_then in kept:
            assert torch.equal(output, then)
            assert torch.equal(loss, loss_then)
        engine.zero_grad()
        with pytest.raises(GradientError, match=r"recorded batch has int64\[4, 16\], this one has int64\[2, 16\]"):
            engine.execute_schedule(iter([batch(0, rows=2)]))
        with pytest.raises(GradientError, match=r"(?s)recorded batch has .*tuple.*, this one has .*dict"):
            engine.execute_schedule(iter([{"tokens": batch(0)[0], "labels": batch(0)[1]}]))


def test_what_the_replay_would_not_do_is_an_error(on_cpu: None) -> None:
    with engine_of(True) as (engine, _):
        x, y = batch(0)
        with pytest.raises(GradientError, match=r"records the passes of engine\.execute_schedule"):
            engine.backward(engine.criterion(engine(x), y))
        for step in range(STEPS):
            engine.zero_grad()
            engine.execute_schedule(iter([batch(step)]))
            engine.step()
        with pytest.raises(GradientError, match=r"call engine\.zero_grad\(\) before the first batch"):
            engine.execute_schedule(iter([batch(0)]))
        engine.zero_grad()
        engine.observers.append(Observer())
        with pytest.raises(GradientError, match="Observer observes the loss of every pass"):
            engine.execute_schedule(iter([batch(0)]))


def test_passes_are_recorded_again_when_parameters_are_frozen(on_cpu: None) -> None:
    with engine_of(True) as (engine, _):
        first = next(engine.model.parameters())
        for step in range(3 * STEPS):
            if step == STEPS:
                first.requires_grad_(False)
            engine.zero_grad()
            engine.execute_schedule(iter([batch(step)]))
            engine.step()
            assert bool(engine.schedule._recordings) == (
                step % STEPS > WARM_UP or step >= 2 * STEPS or step == STEPS - 1
            )


@needs_gpu
def test_a_value_read_on_the_host_is_named() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x).square().mean()
            return y * (1.0 if y.item() > 0 else 2.0)

    with launch({"cuda_graph": True}, context=ParallelContext(), verbose=False, backend="gloo") as gpc:
        model = Reads()
        engine = initialize(model, torch.optim.AdamW(model.parameters()), lambda out: out, context=gpc)[0]
        for _ in range(WARM_UP + 1):  # the first step moves parameters to flat memory
            engine.zero_grad()
            engine.execute_schedule(iter([torch.ones(2, 4)]))
            engine.step()
        engine.zero_grad()
        with pytest.raises(GradientError, match=r"(?s)cannot be recorded as a CUDA graph: .*\.item\(\)"):
            engine.execute_schedule(iter([torch.ones(2, 4)]))
        torch.rand(4, device="cuda")  # the failed recording does not keep the generator
