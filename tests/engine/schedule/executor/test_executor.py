"""Every order on real ranks against one process: loss, outputs, gradients, and the order that ran."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from datetime import timedelta
from functools import cache
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from colonnade.engine.schedule.actions import Kind, Table, parse_table
from colonnade.engine.schedule.executor import ExecutedStep, Executor
from colonnade.engine.schedule.loss import call_criterion
from colonnade.engine.schedule.micro_batch import MicroBatch, join, split_into_micro_batches
from colonnade.engine.schedule.orders import chunks_of, make_table
from colonnade.engine.schedule.replay import check, simulate
from colonnade.engine.schedule.split_backward import Root, run_backward
from colonnade.errors import GradientError, ScheduleError
from colonnade.registry import ORDERS
from colonnade.testing import run_world
from tests.engine.schedule import models
from tests.engine.schedule.tables import random_table
from tests.ranks import on_ranks


def loss_of(output: Any, label: Any) -> Tensor:
    return call_criterion(models.criterion, output, label)


@cache
def transfer_group(size: int) -> dist.ProcessGroup:
    return dist.new_group(list(range(size)))


def make_executor(kind: models.Kind, table: Table, **options: Any) -> tuple[Executor, dict[int, nn.Module]]:
    """The executor of this rank, with the stages that the table gives it."""
    size, rank = dist.get_world_size(), dist.get_rank()
    facts = check(table)
    stages = models.build(kind, facts.num_stages)
    mine = {stage: stages[stage] for stage, home in enumerate(facts.stage_ranks) if home == rank}
    group = transfer_group(size) if "transfer_group" not in options else None
    options = {"loss_fn": loss_of, "transfer_group": group, **options}
    executor = Executor(list(mine.values()), table, rank=rank, ranks=range(size), **options)
    return executor, mine


def grads_of(stages: dict[int, nn.Module]) -> dict[str, Tensor | None]:
    return {f"{index}.{name}": p.grad for index, stage in stages.items() for name, p in stage.named_parameters()}


def train(kind: models.Kind, tables: Sequence[Table], rows: int, calls: int) -> list[dict[str, Any]]:
    """Each table on fresh stages, `calls` training steps without clearing gradients and one evaluation."""
    results = []
    for table in tables:
        executor, stages = make_executor(kind, table)
        data, label = models.batch_for(kind, rows)
        count = executor.facts.num_microbatches
        for _ in range(calls):
            ran = executor.run(split_into_micro_batches(data, label, count), keep_outputs=True)
        evaluated = executor.run(split_into_micro_batches(data, label, count), forward_only=True, keep_outputs=True)
        results.append(
            {
                "grads": grads_of(stages),
                "loss": executor.share_loss(ran.loss)[0],
                "loss_here": ran.loss,
                "evaluation_loss": evaluated.loss,
                "output": join(ran.outputs) if ran.outputs else None,
                "evaluation": join(evaluated.outputs) if evaluated.outputs else None,
                "order": ran.order,
                "evaluation_order": evaluated.order,
            }
        )
    return results


def compare(kind: models.Kind, table: Table, rows: int, calls: int, ranks: Sequence[dict[str, Any]]) -> None:
    """What the ranks got against one process, and the order that ran against the simulated one."""
    facts = check(table)
    output, loss, expected = models.truth(kind, facts.num_stages, rows, calls)
    found = {name: grad for rank in ranks for name, grad in rank["grads"].items()}
    assert found.keys() == expected.keys()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    simulated = simulate(table).rows
    for index, rank in enumerate(ranks):
        torch.testing.assert_close(rank["loss"], loss, rtol=0, atol=1e-10)
        assert rank["order"] == [timed.action for timed in simulated[index]]
        assert rank["evaluation_order"] == [a for a in rank["order"] if a.kind is Kind.FORWARD]
        has_last = facts.stage_ranks[-1] == index
        for name in ("output", "evaluation", "loss_here", "evaluation_loss"):
            assert (rank[name] is not None) == has_last
    last = ranks[facts.stage_ranks[-1]]
    for name, value in (("output", output), ("evaluation", output), ("evaluation_loss", loss)):
        torch.testing.assert_close(last[name], value, rtol=0, atol=1e-10)


def run_and_compare(num_ranks: int, kind: models.Kind, tables: Sequence[Table], rows: int, calls: int = 1) -> None:
    world = run_world(num_ranks, train, kind, tables, rows, calls, timeout=90)
    for index, table in enumerate(tables):
        compare(kind, table, rows, calls, [rank[index] for rank in world.values])


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_every_order_equals_one_process(num_ranks: int) -> None:
    """Two calls add up, and the last micro-batches are smaller."""
    tables = [make_table(name, num_ranks, 8, chunks_of(name) or 2) for name in ORDERS]
    run_and_compare(num_ranks, models.Simple, tables, rows=13, calls=2)


def sizes_change(rows: Sequence[int]) -> list[tuple[Any, Any]]:
    """A training step and an evaluation for each number of rows, on one executor."""
    executor, stages = make_executor(models.Simple, make_table("1f1b", 2, 4))
    results = []
    for count in rows:
        for stage in stages.values():
            stage.zero_grad()
        batch = models.batch_for(models.Simple, count)
        ran = executor.run(split_into_micro_batches(*batch, 4))
        executor.run(split_into_micro_batches(*models.batch_for(models.Simple, 3 * count), 4), forward_only=True)
        results.append((executor.share_loss(ran.loss)[0], copy.deepcopy(grads_of(stages))))
    return results


def test_batches_may_grow_and_shrink_from_step_to_step() -> None:
    """Whether a message finds room ready at the receiver or not."""
    rows = [6, 6, 21, 5, 64, 64, 7]
    ranks = run_world(2, sizes_change, rows).values
    for count, step in zip(rows, zip(*ranks, strict=True), strict=True):
        _, loss, expected = models.truth(models.Simple, 2, count, 1)
        torch.testing.assert_close({**step[0][1], **step[1][1]}, expected, rtol=0, atol=1e-10)
        torch.testing.assert_close([step[0][0], step[1][0]], [loss, loss], rtol=0, atol=1e-10)


FORMS = [models.Rich, models.SideOutput, models.Varying, models.Unsplittable, models.FrozenStart]
"""Dicts, integers, flags and text; unused outputs; shapes that vary; stages that resist; frozen stages."""


@pytest.mark.parametrize("kind", FORMS)
def test_values_of_every_form(kind: models.Kind) -> None:
    run_and_compare(2, kind, [make_table("1f1b", 2, 5), make_table("zb_v", 2, 5, 2)], rows=7)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "kind"),
    [
        *((2, kind) for kind in FORMS),
        *((4, kind) for kind in (models.Rich, models.Varying)),
        *(pytest.param(4, kind, marks=pytest.mark.long) for kind in FORMS if kind not in (models.Rich, models.Varying)),
    ],
)
def test_values_of_every_form_under_every_order(num_ranks: int, kind: models.Kind) -> None:
    tables = [make_table(name, num_ranks, 8, chunks_of(name) or 2) for name in ORDERS]
    run_and_compare(num_ranks, kind, tables, rows=9)


@pytest.mark.parametrize(("seed", "count"), [(0, 4), pytest.param(1, 30, marks=pytest.mark.slow)])
def test_any_valid_table_runs(seed: int, count: int) -> None:
    """Stages anywhere on the ranks, actions in any order that is possible at all."""
    random = Random(seed)
    run_and_compare(3, models.Simple, [random_table(random, 3, 5, 3) for _ in range(count)], rows=4)


@pytest.mark.parametrize("kind", [models.Simple, models.Saturating, models.SideOutput])
@pytest.mark.parametrize("name", ["1f1b", "interleaved_1f1b", "zb_v"])
def test_a_pipeline_of_one_rank_needs_no_process_group(name: str, kind: models.Kind) -> None:
    table = make_table(name, 1, 3, chunks_of(name) or 3)
    stages = models.build(kind, check(table).num_stages)
    executor = Executor(stages, table, loss_fn=loss_of)
    data, label = models.batch_for(kind, 5)
    ran = executor.run(split_into_micro_batches(data, label, 3))
    _, loss, expected = models.truth(kind, len(stages), 5)
    torch.testing.assert_close(grads_of(dict(enumerate(stages))), expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(executor.share_loss(ran.loss)[0], loss, rtol=0, atol=1e-10)
    assert ran.order == table[0]


# -- what the engine hears --------------------------------------------------------------------------------


class Recorder:
    """A backward hook that notes, for every call, which parameters it touched and whether it was the last."""

    def __init__(self) -> None:
        self.touched: list[set[str]] = []
        self.last: list[bool] = []

    def watch(self, stages: dict[int, nn.Module]) -> None:
        for index, stage in stages.items():
            for name, parameter in stage.named_parameters():
                note = f"{index}.{name}"
                parameter.register_post_accumulate_grad_hook(lambda _, note=note: self.touched[-1].add(note))

    def __call__(
        self, tensors: Sequence[Root], grads: Sequence[Tensor], *, inputs: Sequence[Tensor] | None, last: bool
    ) -> None:
        self.touched.append(set())
        self.last.append(last)
        run_backward(tensors, grads, inputs=inputs, last=last)


@on_ranks(2)
def test_last_is_said_with_the_last_pass_of_a_rank_with_one_chunk_and_never_with_several():
    found = {}
    for name in ORDERS:
        for kind in (models.Simple, models.Unsplittable):
            recorder = Recorder()
            table = make_table(name, dist.get_world_size(), 4, chunks_of(name) or 2)
            executor, stages = make_executor(kind, table, backward=recorder)
            recorder.watch(stages)
            executor.run(split_into_micro_batches(*models.batch_for(kind, 4), 4))
            found[name, kind.__name__] = (recorder.touched, recorder.last)
    for run, (touched, last) in found.items():
        names = set[str]().union(*touched)
        chunks = {name.partition(".")[0] for name in names}
        assert last == [False] * (len(last) - 1) + [len(chunks) == 1], run
        for name in names:
            assert sum(name in touch for touch in touched) == 4, "one hook call per micro-batch"


# -- what goes wrong --------------------------------------------------------------------------------------


class Broken(models.Simple):
    """Fails in the second stage, at the second call: in it, or in the backward pass of its output."""

    fails_in = "forward"

    def __init__(self, index: int, count: int) -> None:
        super().__init__(index, count)
        self.index, self.calls = index, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        output = super().forward(x)
        if self.index == 1 and self.calls == 2:
            if Broken.fails_in == "forward":
                fail(output)
            output.register_hook(fail)
        return output


def fail(tensor: Tensor) -> None:
    raise ZeroDivisionError("a bug of the user")


Fault = tuple[str, str, bool]
"""An order, in which pass a stage fails, and whether in an evaluation."""


def run_broken(faults: Sequence[Fault]) -> list[tuple[str, float]]:
    """One failure after another over the same group: what each leaves behind would disturb the next."""
    found = []
    for name, Broken.fails_in, forward_only in faults:
        executor, _ = make_executor(Broken, make_table(name, dist.get_world_size(), 4, chunks_of(name) or 2))
        micro_batches = split_into_micro_batches(*models.batch_for(models.Simple, 4), 4)
        start, message = time.monotonic(), ""
        try:
            executor.run(micro_batches, forward_only=forward_only)
        except (ScheduleError, ZeroDivisionError) as error:
            message = f"{type(error).__name__}: {error}"
            with pytest.raises(
                ScheduleError, match=r"stopped in an earlier step .*a bug of the user.* cannot continue"
            ):
                executor.run(micro_batches, forward_only=forward_only)
        found.append((message, time.monotonic() - start))
    return found


@pytest.mark.parametrize(
    "faults",
    [
        [("1f1b", "forward", False), ("1f1b", "forward", True), ("interleaved_1f1b", "forward", False)],
        [("1f1b", "backward", False)],
        [("zb_v", "backward", False)],
    ],
)
def test_a_failing_stage_stops_all_ranks_at_once_with_its_reason(faults: Sequence[Fault]) -> None:
    for rank, found in enumerate(run_world(4, run_broken, faults).values):
        for fault, (message, seconds) in zip(faults, found, strict=True):
            if rank == 1:
                assert message == "ZeroDivisionError: a bug of the user", fault
            elif (
                rank == 0 or fault[1] == "forward" or message
            ):  # later stages may be through with their backward passes
                told = "PeerFailed: the pipeline stopped because rank 1 failed: ZeroDivisionError: a bug of the user"
                assert message.startswith(told), fault
            assert seconds < 15, fault


def run_with_tables(tables: Sequence[Sequence[str]], num_chunks: Sequence[int]) -> str:
    rank = dist.get_rank()
    chunks = models.build(models.Simple, num_chunks[rank])
    try:
        Executor(chunks, parse_table(list(tables[rank])), rank=rank, ranks=range(dist.get_world_size()))
    except ScheduleError as error:
        return str(error)
    return "nothing"


def test_a_fault_of_one_rank_is_an_error_on_all_before_the_first_step() -> None:
    good, other = ["0F0 0B0", "1F0 1B0"], ["0F0 0I0 0W0", "1F0 1B0"]
    differing = run_world(2, run_with_tables, [good, other], [1, 1]).values
    assert all("have different tables of actions" in message for message in differing)
    wrong_chunks = run_world(2, run_with_tables, [good, good], [1, 2]).values
    assert "rank 1 cannot run this table: this table gives pipeline rank 1 the stages 1" in wrong_chunks[0]
    assert wrong_chunks[1].startswith("this table gives pipeline rank 1 the stages 1, but rank 1 has 2 stage module(s)")
    small = run_world(2, run_with_tables, [["0F0 0B0"]] * 2, [1, 1]).values
    assert all("for 1 ranks cannot run on a pipeline of 2" in message for message in small)
    stuck = ["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"]
    assert all("deadlock" in message for message in run_world(2, run_with_tables, [stuck] * 2, [1, 1]).values)
    # A table that cannot run is named before tables that differ, and on its own rank without a rank.
    first, second = run_world(2, run_with_tables, [good, stuck], [1, 1]).values
    assert first.startswith("rank 1 cannot run this table: this table of actions cannot run: deadlock")
    assert second.startswith("this table of actions cannot run: deadlock")


def small_executor(**options: Any) -> Executor:
    return Executor(models.build(models.Simple, 2), parse_table(["0F0 1F0 1B0 0B0"]), **options)


def run_small(executor: Executor, **options: Any) -> ExecutedStep:
    return executor.run(split_into_micro_batches(*models.batch_for(models.Simple, 2), 1), **options)


def test_a_step_that_cannot_run_says_what_to_do() -> None:
    with pytest.raises(ScheduleError, match="for 1 micro-batches, but 2 were given"):
        small_executor(loss_fn=loss_of).run([MicroBatch(0), MicroBatch(1)])
    with pytest.raises(ScheduleError, match="needs a loss function"):
        run_small(small_executor())
    with pytest.raises(
        GradientError,
        match=r"one number, but the loss is a tensor of shape \(2,\)\. Return the mean of the loss, or \(sum, count",
    ):
        run_small(small_executor(loss_fn=lambda output, label: output.sum(1)))
    with pytest.raises(ScheduleError, match=r"tensor_shape=\(1, 6\) is set.*stage 0 returned \(2, 6\)"):
        run_small(small_executor(loss_fn=loss_of, tensor_shape=[1, 6]))
    with pytest.raises(ScheduleError, match=r"tensor_shape=\(2, 6\) is set.*stage 0 returned tuple"):
        run_small(
            small_executor(loss_fn=loss_of, tensor_shape=[2, 6], forward=lambda stage, module, x, micro_batch: (x,))
        )
    with pytest.raises(ScheduleError, match="the output of stage 0 is a set"):
        run_small(small_executor(loss_fn=loss_of, forward=lambda stage, module, inputs, micro_batch: {1}))


def silent_peer() -> str:
    impatient = dist.new_group(timeout=timedelta(seconds=1))
    executor, _ = make_executor(models.Simple, make_table("1f1b", 2, 2), transfer_group=impatient)
    if dist.get_rank() == 1:
        with pytest.raises(ScheduleError) as caught:
            executor.run(split_into_micro_batches(*models.batch_for(models.Simple, 2), 2))
        return str(caught.value)
    return ""


def test_a_rank_that_does_not_come_is_named_with_the_transfer() -> None:
    assert "the transfer 1RECV_F0 with rank 0 did not complete: " in run_world(2, silent_peer).values[1]
