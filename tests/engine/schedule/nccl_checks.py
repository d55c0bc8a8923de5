"""Pipelines over NCCL: messages that change their form between steps and micro-batches, and a stage that fails."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from colonnade._launch import launch
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.engine.schedule.executor import Executor
from colonnade.engine.schedule.micro_batch import split_into_micro_batches
from colonnade.engine.schedule.orders import chunks_of, make_table
from colonnade.engine.schedule.replay import check
from colonnade.engine.schedule.schedules import _transfer_groups
from tests.device.check import Check
from tests.engine.schedule import models
from tests.engine.schedule.executor.test_executor import Broken, grads_of, loss_of

ROWS = [9, 9, 9, 9, 13, 13, 13, 8, 9, 9]


def checks() -> Iterator[Check]:
    for ranks in (2, 4):
        for order in ("1f1b", "interleaved_1f1b", "zb_v"):
            yield Check("transfers", order, ranks, changing, (models.Simple, order, ROWS), places_itself=True)
        for kind in (models.Varying, models.Rich, models.SideOutput):
            yield Check("transfers", kind.__name__, ranks, changing, (kind, "1f1b", ROWS), places_itself=True)
        for order in ("1f1b", "gpipe", "interleaved_1f1b"):
            yield Check("transfers", f"a stage that fails, {order}", ranks, failing, (order,), places_itself=True)
        yield Check("transfers", "no batch", ranks, lacking, places_itself=True)


def changing(kind: models.Kind, order: str, rows: Sequence[int]) -> None:
    """Steps and evaluations of batches of so many rows, one after another: each has the gradients of one process."""
    with launch({"parallel": {"pipeline": dist.get_world_size()}}, context=ParallelContext(), verbose=False) as gpc:
        executor = make_executor(kind, order, gpc)
        expected = {count: models.truth(kind, executor.facts.num_stages, count) for count in set(rows)}
        for count in rows:
            for stage in executor.modules.values():
                stage.zero_grad()
            ran = executor.run(batch(kind, count, gpc))
            _, loss, grads = expected[count]
            found = {name: None if grad is None else grad.cpu() for name, grad in grads_of(executor.modules).items()}
            torch.testing.assert_close(found, {name: grads[name] for name in found}, rtol=0, atol=1e-10)
            if ran.loss is not None:
                torch.testing.assert_close(ran.loss.cpu(), loss, rtol=0, atol=1e-10)
            executor.run(batch(kind, count, gpc), forward_only=True)


def failing(order: str) -> None:
    """All ranks hear within seconds that the second stage fails in its third step, and their groups can go."""
    with launch({"parallel": {"pipeline": dist.get_world_size()}}, context=ParallelContext(), verbose=False) as gpc:
        executor = make_executor(Broken, order, gpc)
        for stage in executor.modules.values():
            stage.calls = -16  # type: ignore[assignment]  # two steps of eight micro-batches go well
        begin, heard = time.monotonic(), ""
        try:
            for _ in range(3):
                executor.run(batch(models.Simple, 9, gpc))
        except Exception as error:
            heard = str(error)
        assert "a bug of the user" in heard, heard
    assert time.monotonic() - begin < 30


def lacking() -> None:
    """Steps for which no rank has a batch, between others: the pipeline goes on. Then one has none, and all stop."""
    with launch({"parallel": {"pipeline": dist.get_world_size()}}, context=ParallelContext(), verbose=False) as gpc:
        executor = make_executor(models.Simple, "1f1b", gpc)
        ended = StopIteration()
        for step in range(6):
            if step % 2:
                assert executor.refuse(ended, forward_only=step == 3, confirm=True) is ended
            else:
                executor.run(batch(models.Simple, 9, gpc))
        heard: Exception | None = None
        if dist.get_rank() == 1:
            heard = executor.refuse(ended, forward_only=False, confirm=True)
        else:
            try:
                executor.run(batch(models.Simple, 9, gpc))
            except Exception as error:
                heard = error
        assert "the data iterator has ended on this rank, but not on all ranks" in str(heard), heard


def make_executor(kind: models.Kind, order: str, gpc: ParallelContext) -> Executor:
    """The executor of this rank, with its stages on its device."""
    ranks = dist.get_world_size()
    table = make_table(order, ranks, 8, chunks_of(order) or 2)
    facts = check(table)
    mine = [
        stage for at, stage in enumerate(models.build(kind, facts.num_stages)) if at in facts.stages_of(dist.get_rank())
    ]
    transfer_group, down_group = _transfer_groups(gpc)
    return Executor(
        [stage.to(gpc.device) for stage in mine],
        table,
        rank=dist.get_rank(),
        ranks=range(ranks),
        group=gpc.get_group(ParallelMode.PIPELINE),
        transfer_group=transfer_group,
        down_group=down_group,
        device=gpc.device,
        loss_fn=loss_of,
    )


def batch(kind: models.Kind, rows: int, gpc: ParallelContext) -> list:  # type: ignore[type-arg]
    data, label = tree_map_only(torch.Tensor, lambda tensor: tensor.to(gpc.device), models.batch_for(kind, rows))
    return split_into_micro_batches(data, label, 8)
