"""Ranks that must be given the same, and are not: said by name, on every rank, before the weights are touched."""

from __future__ import annotations

import time
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from colonnade._launch import launch
from colonnade.comm import waits
from colonnade.context.layout import Layout, world_axes
from colonnade.context.layout_builder import run_initializers
from colonnade.context.parallel_context import ParallelContext
from colonnade.engine.build import initialize
from colonnade.engine.checks import SameBatch, _BatchNote, _digest
from colonnade.errors import ColonnadeError
from colonnade.parallel.split import split
from colonnade.testing import run_world
from colonnade.trainer import Trainer
from colonnade.utils import get_dataloader


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(32, 4, generator=generator, dtype=torch.float64)
    return TensorDataset(x, x.sum(-1, keepdim=True))


def start(gpc: ParallelContext, model: Any = None) -> Any:
    return initialize(model or net(), lambda p: torch.optim.SGD(p, lr=0.1), nn.MSELoss(), context=gpc)[0]


def world(**config: Any) -> Any:
    return launch(config, context=ParallelContext(), verbose=False)


def refused(run: Any) -> str:
    with pytest.raises(ColonnadeError) as caught:
        run()
    return str(caught.value)


def _loop(engine: Any, loader: Any) -> None:
    for x, y in loader:
        engine.zero_grad()
        engine.backward(engine.criterion(engine(x), y))
        engine.step()


def _schedule(engine: Any, loader: Any) -> None:
    batches = iter(loader)
    for _ in range(len(loader)):
        engine.zero_grad()
        engine.execute_schedule(batches)
        engine.step()


def _fit(engine: Any, loader: Any) -> None:
    Trainer(engine).fit(loader, epochs=1)


PIPELINE = {"parallel": {"pipeline": 2}, "schedule": {"type": "GPipe", "num_microbatches": 2}}


def _samplers() -> dict[str, str]:
    """DDP's habit: a DistributedSampler over the whole world."""
    said = {}
    for run in (_loop, _schedule, _fit):
        with world(parallel={"tensor": 2}) as gpc:
            engine, before = start(gpc), [parameter.clone() for parameter in net().parameters()]
            habit = DataLoader(dataset(), 4, sampler=DistributedSampler(dataset(), shuffle=False))
            said[run.__name__] = refused(lambda run=run, engine=engine, habit=habit: run(engine, habit))
            torch.testing.assert_close(list(engine.model.parameters()), before)
            engine.close()
            engine = start(gpc)
            run(engine, get_dataloader(dataset(), batch_size=4, context=gpc))
            engine.close()
    with world(**PIPELINE) as gpc:
        engine = start(gpc, split(net(), num_stages=2))
        habit = DataLoader(dataset(), 4, sampler=DistributedSampler(dataset(), shuffle=False))
        said["pipeline"] = refused(lambda: _schedule(engine, habit))
        engine.close()
    with world(**PIPELINE) as gpc:
        engine = start(gpc, split(net(), num_stages=2))
        _schedule(engine, DataLoader(dataset(), 8))
        rows = 8 - 2 * gpc.get_global_rank()  # at a step that is not compared
        said["rows"] = refused(lambda: _schedule(engine, DataLoader(dataset(), rows)))
        engine.close()
    return said


def test_ranks_that_see_the_same_data_and_are_given_other_batches_are_named():
    first, second = run_world(2, _samplers).values
    for said in (first, second):
        for run in ("_loop", "_schedule", "_fit"):
            assert (
                "step 0: ranks 0 and 1 must get the same data, because they differ only on the axis 'tensor'"
                in said[run]
            ), said[run]
            assert "get_dataloader, or shard by gpc.get_local_rank(ParallelMode.DATA)" in said[run]
        assert (
            "ranks 0 and 1 must get the same data, because they differ only on the axis 'pipeline'" in said["pipeline"]
        )
        assert "micro-batch 0 has 4 rows on the first stage of the pipeline and 3 on the last" in said["rows"]


def _legitimate() -> None:
    """Data and sequence ranks have batches of their own; an evaluation is not compared; a key turns it off."""
    for parallel, config in (({"data": 2}, {}), ({"sequence": 2}, {}), ({"tensor": 2}, {"compare_batches": False})):
        with world(parallel=parallel, **config) as gpc:
            engine, own = start(gpc), dataset()[gpc.get_global_rank() :: 2]
            engine.eval()
            engine(own[0])
            engine.train()
            _loop(engine, [own])
            engine.close()


def _forms() -> str:
    with world() as gpc:
        engine = start(gpc)
        loss = F.mse_loss(engine(dataset()[:4][0]), dataset()[:4][1], reduction="sum")
        engine.backward((loss, 4) if gpc.get_global_rank() else loss / 4)
        said = refused(engine.step)
        engine.close()
        return said


def _a_step_fewer() -> None:
    """Rank 1 comes late to the third step, and stays alive."""
    waits.PUBLISH_AFTER = 0.4
    with world() as gpc:
        engine = start(gpc)
        for step in range(3):
            if step == 2 and gpc.get_global_rank() == 1:
                time.sleep(2)
            _loop(engine, [dataset()[:4]])
        engine.close()


def _both() -> str:
    _legitimate()
    _a_step_fewer()
    return _forms()


@pytest.mark.slow
def test_batches_of_ones_own_are_fine_and_ranks_that_do_not_do_the_same_are_named():
    result = run_world(2, _both)
    assert (
        "it is summing the gradients of step 2. Where others are: rank 1: outside the engine after 2 steps"
        in (result.stderr[0])
    )
    assert "has waited" not in result.stderr[1]
    for said in result.values:
        assert (
            "the loss does not have the same form on all ranks. It is a mean on ranks 0; (sum, count) on ranks 1"
            in said
        )


def test_a_digest_tells_batches_apart():
    x = torch.randint(0, 9, (3, 5))
    others = [x.flip(0), x.float(), x.view(5, 3), x + 1, torch.stack([x[0], x[0], x[2]]), (x, x), {"a": x, "b": x[:0]}]
    digests = [found for value in [x, *others] if (found := _digest(value)) is not None]
    assert len(set(digests)) == len(digests) == 1 + len(others)
    assert _digest([x.clone()]) == digests[0]
    assert _digest(torch.tensor([0, 2, 0])) != _digest(torch.tensor([1, 0, 1]))
    sparse = torch.eye(2).to_sparse()
    assert _digest(["text", torch.nested.nested_tensor([x[0], x[0]]), x.to("meta"), sparse]) is None


def test_every_element_of_a_small_tensor_counts_and_some_of_a_large_one(monkeypatch):
    zeros = torch.zeros(5, dtype=torch.int8)
    digests = {_digest(zeros), *(_digest(zeros.scatter(0, torch.tensor(at), 1)) for at in range(5))}
    assert len(digests) == 6
    monkeypatch.setattr("colonnade.engine.checks._SAMPLED", 2)
    sampled = [_digest(zeros.scatter(0, torch.tensor(at), 1)) for at in range(5)]
    assert [digest != _digest(zeros) for digest in sampled] == [True, False, False, True, False]


@pytest.mark.parametrize(("parallel", "looks"), [({}, False), ({"tensor": 2}, True), ({"pipeline": 2}, True)])
def test_only_where_ranks_see_the_same_data_is_anything_looked_at(parallel, looks):
    config = {"parallel": parallel}
    layout = Layout(world_axes(config, 4), run_initializers(config, 4, 0).groups)
    for extra in ({}, {"compare_batches": True}, {"compare_batches": False}):
        context = SimpleNamespace(world_size=4, layout=layout, config=extra)
        assert SameBatch(context)._looks == (looks and extra != {"compare_batches": False})


def test_a_steady_step_looks_at_nothing(monkeypatch):
    looked: list[int] = []
    monkeypatch.setattr("colonnade.engine.checks._digest", looked.append)
    watch = SameBatch(ParallelContext())
    watch._looks = True
    for step in range(300):
        watch.see(step)
        with torch.no_grad():
            watch.see(-1)
        watch.end_step(None, complete=True)
    assert [step for step in looked if step is not None] == [0, 1, 64, 128, 256]
    idle = SameBatch(ParallelContext())
    idle.see(-2)  # nobody sees the same data
    idle._looks, idle.training = True, False
    idle.see(-3)
    assert looked[-1] is None


def rank(form: int = 0, inputs: tuple[int, int] = (0, 0), labels: tuple[int, int] = (0, 0)) -> _BatchNote:
    """What it says: form, (digest, rows) of both."""
    (one, rows), (other, more) = inputs, labels
    return _BatchNote(form, one, other, rows, more)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ([rank(1, (7, 4), (8, 4))] * 4, None),
        ([rank(2, (7, 4), (8, 4))] * 4, None),
        ([rank()] * 4, None),
        ([rank(1, (7, 4)), rank(), rank(1, (9, 5)), rank()], None),  # another data rank has other rows
        ([rank(1, (7, 4)), rank(2, (7, 4)), rank(), rank()], "a mean on ranks 0; .* on ranks 1;"),
        (
            [rank(1, (7, 4)), rank(1, (6, 4)), rank(), rank()],
            "ranks 0 and 1 must get the same data, because they differ only on the axis 'tensor'.* different inputs: 4 rows .* different content",
        ),
        (
            [rank(), rank(), rank(1, (7, 4)), rank(1, (6, 5))],
            "ranks 2 and 3 .* inputs: 4 rows on rank 2, 5 rows on rank 3",
        ),
        ([rank(1, (7, 0)), rank(1, (6, 0)), rank(), rank()], "different inputs: 0 rows .* other content"),  # scalars
        ([rank(1, (0, 4)), rank(1, (0, 3)), rank(), rank()], None),  # nothing was looked at
        (
            [rank(1, (7, 4), (8, 4)), rank(1, (7, 4), (8, 3)), rank(), rank()],
            "different labels: 4 rows on rank 0, 3 rows on rank 1",
        ),
    ],
)
def test_what_ranks_say_is_compared_among_those_that_see_the_same_data(said, told):
    config = {"parallel": {"tensor": 2}}
    layout = Layout(world_axes(config, 4), run_initializers(config, 4, 0).groups)
    watch = SameBatch(SimpleNamespace(world_size=4, layout=layout, config={}))
    with nullcontext() if told is None else pytest.raises(ColonnadeError, match=told):
        watch._check(said)
