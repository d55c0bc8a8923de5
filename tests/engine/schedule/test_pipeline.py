"""Pipeline schedules on an engine, in worlds with real groups: every registered name, tables, losses, errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from colonnade import launch
from colonnade.context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.engine.schedule import schedules
from colonnade.engine.schedule.replay import check
from colonnade.engine.schedule.schedules import GPipe, PipelineSchedule, TableSchedule
from colonnade.engine.schedule.split_backward import run_backward
from colonnade.errors import ScheduleError
from colonnade.testing import run_world
from tests.engine.schedule import models


class Engine:
    """What a schedule needs of an engine, and no more."""

    def __init__(self, context: ParallelContext, model: nn.Module, criterion: Any = models.criterion) -> None:
        self.context, self.model, self.criterion = context, model, criterion
        self.loss_scale: float | Tensor = 1.0
        self.sum_scale: float | Tensor = 1.0
        self.backward_micro_batch = run_backward
        self.noted: list[tuple[Any, bool]] = []

    def note_loss(self, count: Any, here: bool, *, trains: bool) -> None:
        if trains:
            self.noted.append((count, here))


def join_world(pipeline: int, data: int = 1, timeout: float | None = None) -> ParallelContext:
    """A world on the CPU, wherever the tests run."""
    config = {"parallel": {"pipeline": {"size": pipeline}, "data": {"size": data}}}
    context = launch(config, backend="gloo", verbose=False, context=ParallelContext(), timeout=timeout)
    context.device = torch.device("cpu")
    return context


def engine_for(
    context: ParallelContext,
    schedule: PipelineSchedule,
    kind: models.Kind = models.Simple,
    criterion: Any = models.criterion,
) -> tuple[Engine, dict[int, nn.Module]]:
    """An engine with this rank's stages, on which the schedule has been prepared."""
    size, rank = context.get_world_size(ParallelMode.PIPELINE), context.get_local_rank(ParallelMode.PIPELINE)
    facts = check(schedule.table(size))
    stages = models.build(kind, facts.num_stages)
    mine = {stage: stages[stage] for stage, home in enumerate(facts.stage_ranks) if home == rank}
    several = len(mine) > 1
    engine = Engine(context, nn.ModuleList(mine.values()) if several else next(iter(mine.values())), criterion)
    schedule.pre_processing(engine)
    return engine, mine


def batches(*items: Any) -> Iterator[Any]:
    return iter(items)


def grads_of(stages: dict[int, nn.Module]) -> dict[str, Tensor | None]:
    return {f"{index}.{name}": p.grad for index, stage in stages.items() for name, p in stage.named_parameters()}


def attempt(schedule: PipelineSchedule, engine: Engine, loader: Iterator[Any], **options: Any) -> str:
    try:
        schedule.forward_back_step(engine, loader, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "done"


ALONE: list[tuple[str, int, int, bool]] = [
    ("1f1b", 0, 0, False),
    ("1f1b", 1, 2, False),
    ("1f1b", 2, 0, True),
    ("1f1b", 2, 2, True),
    ("gpipe", 2, 2, False),
    ("interleaved_1f1b", 1, 0, False),
    ("interleaved_1f1b", 1, 0, True),
]
"""An order, a rank, of how many rows its batch is (0: there is none), and whether it is an evaluation."""


def run_without_batches() -> tuple[list[str], dict[str, Tensor | None], list[list[str]]]:
    """Steps for which no rank has a batch, a step for which all have one, then steps for which one rank has none."""
    good, small = models.batch_for(models.Simple, 9), models.batch_for(models.Simple, 2)
    with join_world(pipeline=3) as context:
        schedule = PipelineSchedule(6)
        engine, stages = engine_for(context, schedule)
        nowhere = [
            attempt(schedule, engine, batches(*given), forward_only=forward_only)
            for given in ([], [small])
            for forward_only in (False, True)
        ]
        nowhere.append(attempt(schedule, engine, batches(good)))
        alone = []
        for order, who, rows, forward_only in ALONE:
            schedule = PipelineSchedule(6, order)
            other, _ = engine_for(context, schedule)
            missing = [models.batch_for(models.Simple, rows)] * bool(rows)
            loader = batches(*(missing if context.get_global_rank() == who else [good]))
            first = attempt(schedule, other, loader, forward_only=forward_only)
            alone.append([first, attempt(schedule, other, batches(good))])
        return nowhere, grads_of(stages), alone


def test_a_batch_that_one_rank_lacks_is_an_error_on_all_by_name_and_one_that_all_lack_harms_nothing() -> None:
    world = run_world(3, run_without_batches, backend=None, timeout=60).values
    few = "a batch of 2 rows cannot be split into 6 micro-batches"
    ended = "the data iterator has ended on this rank, but not on all ranks of the pipeline"
    _, _, expected = models.truth(models.Simple, 3, 9)
    torch.testing.assert_close(
        {key: grad for _, grads, _ in world for key, grad in grads.items()}, expected, rtol=0, atol=1e-10
    )
    for rank, (nowhere, _, alone) in enumerate(world):
        assert nowhere[:2] == ["StopIteration: "] * 2
        assert nowhere[2].startswith(f"ScheduleError: {few}")
        assert nowhere[3:] == ["done", "done"]  # an evaluation of two rows fills up its micro-batches
        for (_, who, rows, forward_only), (first, then) in zip(ALONE, alone, strict=True):
            where = "" if rank == who else f"on rank {who} (this rank is {rank}): "
            told = few if rows else ended
            if rows and forward_only:
                assert "micro-batch 0 has 2 rows on the first stage of the pipeline and 1 on the last" in first
            else:
                assert first.startswith(f"ScheduleError: {where}{told}"), first
            assert "stopped in an earlier step" in then


def run_with_timeout() -> float:
    with join_world(pipeline=2, timeout=37) as context:
        group, down = schedules._transfer_groups(context)
        assert schedules._transfer_groups(context) == (group, down), "those for all schedules"
        assert down is None, "gloo moves both directions at once"
        return group._get_backend(context.device).options._timeout.total_seconds()


def test_transfers_wait_as_long_as_the_world_was_launched_to_wait() -> None:
    assert run_world(2, run_with_timeout, backend=None).values == [37, 37]


def run_middle_without_data() -> tuple[Any, Any, Tensor | None]:
    with join_world(pipeline=3) as context:
        schedule = GPipe(2, loss_everywhere=False)
        engine, _ = engine_for(context, schedule)
        middle = context.get_local_rank(ParallelMode.PIPELINE) == 1
        loader = None if middle else batches(models.batch_for(models.Simple, 4))
        return schedule.forward_back_step(engine, loader, return_output_label=False)


def test_a_rank_in_the_middle_needs_no_data_and_the_loss_may_stay_where_it_is() -> None:
    first, middle, last = run_world(3, run_middle_without_data, backend=None).values
    assert first == middle == (None, None, None)
    assert last[:2] == (None, None)
    torch.testing.assert_close(last[2], models.truth(models.Simple, 3, 4)[1], rtol=0, atol=1e-10)


def unpack_batch(stage_output: Any, micro_batch: Any) -> tuple[Any, Any]:
    """Each stage sees the micro-batch: the last one takes the label and data again."""
    data, label = micro_batch
    return (data if stage_output is None else stage_output + data), label * 2


def run_data_process_func() -> tuple[dict[str, Tensor | None], Any, tuple[list[int | None], int | None]]:
    with join_world(pipeline=2) as context:
        schedule = PipelineSchedule(2, "interleaved_1f1b", num_chunks=2, data_process_func=unpack_batch)
        seen: list[int | None] = []

        def criterion(output: Tensor, target: Tensor) -> Tensor:
            seen.append(context.virtual_pipeline_parallel_rank)
            return models.criterion(output, target)

        engine, stages = engine_for(context, schedule, criterion=criterion)
        result = schedule.forward_back_step(engine, batches(models.batch_for(models.Simple, 3)))
        return grads_of(stages), result, (seen, context.virtual_pipeline_parallel_size)


def test_a_function_of_stage_output_and_micro_batch() -> None:
    world = run_world(2, run_data_process_func, backend=None).values
    stages = models.build(models.Simple, 4)
    data, label = models.batch_for(models.Simple, 3)
    hidden = data
    for index, stage in enumerate(stages):
        hidden = stage(hidden if index == 0 else hidden + data)
    loss = models.criterion(hidden, label * 2)
    loss.backward()
    found = {key: grad for grads, _, _ in world for key, grad in grads.items()}
    torch.testing.assert_close(found, grads_of(dict(enumerate(stages))), rtol=0, atol=1e-10)
    torch.testing.assert_close(world[1][1][1], label * 2)
    assert world[1][2] == ([1, 1], 2), "the context knew which chunk ran"


def one_rank_engine(schedule: PipelineSchedule, criterion: Any) -> Engine:
    (stage,) = models.build(models.Simple, 1)
    engine = Engine(ParallelContext(), stage, criterion)
    schedule.pre_processing(engine)
    return engine


@pytest.mark.parametrize(
    ("criterion", "options"), [(nn.MSELoss(reduction="sum"), {"loss_reduction": "sum"}), (nn.MSELoss(), {})]
)
def test_losses_add_up_to_the_loss_of_the_batch(criterion: Any, options: dict[str, Any]) -> None:
    schedule = GPipe(4, **options)
    engine = one_rank_engine(schedule, criterion)
    engine.loss_scale = 4.0
    data, label = models.batch_for(models.Simple, 11)
    _, _, loss = schedule.forward_back_step(engine, batches((data, label)))
    (stage,) = models.build(models.Simple, 1)
    expected = criterion(stage(data), label)
    (expected * 4).backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=0, atol=1e-10)
    torch.testing.assert_close(grads_of({0: engine.model}), grads_of({0: stage}), rtol=0, atol=1e-10)


def test_a_step_prepares_itself_and_returns_what_was_asked_for() -> None:
    schedule = GPipe(2)
    (stage,) = models.build(models.Simple, 1)
    engine = Engine(ParallelContext(), stage)
    batch = models.batch_for(models.Simple, 2)
    output, label, loss = schedule.forward_back_step(engine, batches(batch), forward_only=True, return_loss=False)
    assert loss is None
    assert output.shape == label.shape
    output, label, loss = schedule.forward_back_step(engine, batches(batch), return_output_label=False)
    assert (output, label) == (None, None)
    assert loss is not None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_microbatches": 2, "order": "gpip"}, "Did you mean 'gpipe'"),
        ({"num_microbatches": 2, "order": 3}, "no pipeline order 3; known: 1f1b"),
        ({"num_microbatches": 2, "num_chunks": 2}, "has 1 chunk"),
        ({"num_microbatches": 2, "loss_reduction": "max"}, "'mean' or 'sum', not 'max'"),
        ({"num_microbatches": None, "table": ["0F0 0Q0"]}, "'0Q0' is not an action"),
        ({"num_microbatches": None, "table": "nowhere.csv"}, "cannot be read"),
        ({"num_microbatches": 2, "table": []}, "one row for each pipeline rank"),
        ({"num_microbatches": None, "table": ["0B0 0F0"]}, "0B0 is before 0F0"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused_when_it_is_made(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ScheduleError, match=said):
        PipelineSchedule(**options)


def test_a_schedule_that_does_not_fit_is_refused_before_the_first_step() -> None:
    with pytest.raises(ScheduleError, match="for 2 pipeline ranks, and the pipeline has 1"):
        one_rank_engine(TableSchedule(["0F0 0B0", "1F0 1B0"]), models.criterion)
    with pytest.raises(ScheduleError, match="0F1 is missing"):
        one_rank_engine(TableSchedule(["0F0 0B0"], num_microbatches=2), models.criterion)
    with pytest.raises(ScheduleError, match=r"the stages 0, 1, but rank \d has 1 stage module"):
        one_rank_engine(PipelineSchedule(4, "zb_v", num_chunks=2), models.criterion)


def test_a_batch_that_cannot_be_used_is_told() -> None:
    schedule = GPipe(4)
    engine = one_rank_engine(schedule, models.criterion)
    with pytest.raises(ScheduleError, match="a batch of 3 rows cannot be split into 4 micro-batches"):
        schedule.forward_back_step(engine, batches(models.batch_for(models.Simple, 3)))
    with pytest.raises(ScheduleError, match="needs a data iterator on this rank"):
        schedule.forward_back_step(engine, None)
    bare = one_rank_engine(GPipe(2), None)
    with pytest.raises(ScheduleError, match="no criterion"):
        GPipe(2).forward_back_step(bare, batches(models.batch_for(models.Simple, 3)))
