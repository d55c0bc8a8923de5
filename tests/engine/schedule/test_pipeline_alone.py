"""What a pipeline schedule decides before anything runs: micro-batches, arguments, tables, virtual ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from colonnade.engine.schedule import executor as executor_module
from colonnade.engine.schedule import schedules, transfer
from colonnade.engine.schedule.schedules import PipelineSchedule, TableSchedule, _virtual_rank_switch
from colonnade.errors import ScheduleError
from colonnade.registry import SCHEDULE


@pytest.mark.parametrize("given", [0, -1, (1 << 16) + 1, True, 2.0, "4", None])
def test_what_is_no_number_of_micro_batches(given):
    with pytest.raises(ScheduleError) as error:
        PipelineSchedule(given)
    assert str(error.value).startswith(f"num_microbatches must be a whole number from 1 to 65536, not {given!r}")
    assert [PipelineSchedule(count).num_microbatches for count in (1, 1 << 16)] == [1, 1 << 16]


def test_a_table_has_its_micro_batches():
    rows = ["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"]
    schedule = TableSchedule(rows)
    assert schedule.num_microbatches == 2
    assert schedule.stage_ranks(2) == (0, 1)
    assert TableSchedule(rows, num_microbatches=2).table(2) == schedule.table(2)
    with pytest.raises(ScheduleError, match=r"^this table is for 2 pipeline ranks, and the pipeline has 3"):
        schedule.table(3)


@pytest.mark.parametrize(
    ("function", "count"), [(lambda: None, 0), (lambda a, b, c: None, 3), (lambda a, b, c, d=1: None, 3)]
)
def test_a_function_of_the_user_takes_a_batch_or_an_output_and_a_batch(function, count):
    with pytest.raises(ScheduleError) as error:
        PipelineSchedule(2, data_process_func=function)
    assert str(error.value).startswith(
        f"data_process_func must take (batch) or (stage_output, micro_batch), not {count} arguments"
    )
    one, two = (lambda batch: (batch, None)), (lambda before, batch: (batch, None))
    assert PipelineSchedule(2, data_process_func=one).data_process_func is one
    of_stage = PipelineSchedule(2, data_process_func=two)
    assert (of_stage.data_process_func, of_stage._stage_data_func) == (None, two)


@pytest.mark.parametrize(
    ("stage_ranks", "sizes", "ranks"),
    [
        ([0, 1, 0, 1, 0, 1], [3], [0, 0, 1, 1, 2, 2]),
        ([0, 1, 2], [], None),
        ([0, 1, 1, 0], [], None),  # a V does not go round
    ],
)
def test_stages_that_go_round_have_virtual_ranks(stage_ranks, sizes, ranks):
    told: dict[str, list[int]] = {"size": [], "rank": []}
    context: Any = SimpleNamespace(
        set_virtual_pipeline_parallel_size=told["size"].append,
        set_virtual_pipeline_parallel_rank=told["rank"].append,
    )
    switch = _virtual_rank_switch(context, stage_ranks)
    for stage in range(len(stage_ranks)) if switch else ():
        switch(stage)  # type: ignore[misc]
    assert told == {"size": sizes, "rank": ranks or []}
    assert (switch is None) is (ranks is None)


@pytest.mark.parametrize(
    ("name", "order"),
    [
        ("GPipe", "gpipe"),
        ("OneFOneB", "1f1b"),
        ("Interleaved1F1B", "interleaved_1f1b"),
        ("InterleavedPipelineSchedule", "interleaved_1f1b"),
        ("BreadthFirst", "breadth_first"),
        ("InterleavedZeroBubble", "interleaved_zero_bubble"),
        ("ZBV", "zb_v"),
        ("DualPipeV", "dualpipe_v"),
    ],
)
def test_every_order_has_a_class(name, order):
    made = SCHEDULE.get_module(name)(4)
    assert (type(made).__name__, made.order, made.num_microbatches) == (name, order, 4)
    assert made.last_order == []
    assert (made._loss_everywhere, made._loss_reduction) == (True, "mean")


@pytest.mark.parametrize("has_last_stage", [True, False])
@pytest.mark.parametrize("everywhere", [True, False])
@pytest.mark.parametrize("forward_only", [True, False])
@pytest.mark.parametrize("return_loss", [True, False])
def test_a_step_is_counted_where_the_last_stage_is_and_its_loss_shared(
    has_last_stage, everywhere, forward_only, return_loss
):
    step = SimpleNamespace(order=["0F0"], loss="own loss", count="own count", outputs=[1, 1])
    asked: dict[str, Any] = {}
    noted: list[Any] = []
    schedule: Any = PipelineSchedule(2, loss_everywhere=everywhere)
    schedule._executor = SimpleNamespace(
        has_last_stage=has_last_stage,
        run=lambda micro_batches, **options: asked.update(options) or step,
        share_loss=lambda loss, count: (f"shared {loss}", f"shared {count}"),
    )
    engine = SimpleNamespace(
        loss_scale=4.0, sum_scale=8.0, note_loss=lambda *given, trains: noted.append((*given, trains))
    )
    batches = iter([(torch.arange(4), torch.ones(4))])
    *_, loss = schedule.forward_back_step(engine, batches, forward_only, return_loss, return_output_label=False)
    confirm = everywhere and (return_loss or not forward_only)
    shared = "shared " if confirm else ""
    assert loss == (f"{shared}own loss" if return_loss else None)
    assert noted == [(f"{shared}own count", has_last_stage, not forward_only)]
    assert (asked["confirm"], asked["keep_outputs"]) == (confirm, False)
    assert (asked["backward_scale"], asked["sum_scale"]) == (4.0, 8.0)


def test_a_stage_in_the_middle_keeps_its_loader_in_step():
    schedule: Any = PipelineSchedule(2)
    schedule.uses_batch = False
    batches = iter([(torch.arange(4), torch.ones(4))] * 2)
    schedule._micro_batches(batches, fill=False)
    assert len(list(batches)) == 1


@pytest.mark.parametrize(
    ("ranks", "first", "last", "by_stage", "uses"),
    [
        (None, True, True, False, True),
        ([5], True, True, False, True),
        ([4, 5], False, True, False, True),
        ([5, 6], True, False, False, True),
        ([4, 5, 6], False, False, False, False),
        ([4, 5, 6], False, False, True, True),
    ],
)
def test_what_an_executor_is_made_of(monkeypatch, ranks, first, last, by_stage, uses):
    made: list[Any] = []

    def executor(chunks: Any, table: Any, **options: Any) -> Any:
        made.append((chunks, table, options))
        facts = SimpleNamespace(stage_ranks=tuple(range(len(ranks or [5]))))
        return SimpleNamespace(has_first_stage=first, has_last_stage=last, facts=facts)

    monkeypatch.setattr(executor_module, "Executor", executor)
    monkeypatch.setattr(schedules, "_transfer_groups", lambda context: ("both", "down"))
    context = SimpleNamespace(
        device=torch.device("cpu"),
        waits="waits",
        is_initialized=lambda mode: ranks is not None,
        get_ranks_in_group=lambda mode: ranks,
        get_global_rank=lambda: 5,
        get_group=lambda mode: "own",
    )
    engine = SimpleNamespace(context=context, model=nn.Linear(1, 1), criterion=None, backward_micro_batch="backward")
    function = (lambda before, batch: batch) if by_stage else None
    schedule = PipelineSchedule(2, data_process_func=function, loss_reduction="sum" if by_stage else "mean")
    schedule.pre_processing(engine)
    ((chunks, table, options),) = made
    several = len(ranks or []) > 1
    assert chunks == [engine.model]
    assert len(table) == len(ranks or [5])
    assert (options["ranks"], options["rank"]) == (ranks or [5], (ranks or [5]).index(5))
    groups = (options["group"], options["transfer_group"], options["down_group"])
    assert groups == (("own", "both", "down") if several else (None, None, None))
    assert (options["waits"], options["backward"]) == ("waits", "backward")
    assert options["loss_form"].args == (True, not by_stage)
    assert (schedule.uses_batch, schedule.device) == (uses, context.device)
    engine.model = nn.ModuleList([engine.model])
    schedule.pre_processing(engine)
    assert made[1][0] == [*engine.model]


def test_groups_for_transfers_are_opened_where_there_is_a_pipeline(monkeypatch):
    opened: list[Any] = []
    monkeypatch.setattr(schedules, "_transfer_groups", opened.append)
    for size in (1, 2, 3):
        context: Any = SimpleNamespace(pipeline_parallel_size=size)
        PipelineSchedule(2).open_groups(context)
        assert opened == ([context] if size > 1 else [])
        opened.clear()


@pytest.mark.parametrize(
    ("backends", "groups"),
    [({"cpu": "gloo"}, ("both", None)), ({"cpu": "gloo", "cuda": "nccl"}, ("both", "cuda:nccl"))],
)
def test_a_group_for_each_direction_is_opened_over_backends_with_a_queue(monkeypatch, backends, groups):
    monkeypatch.setattr(schedules, "backends_of", lambda group: backends)
    monkeypatch.setattr(transfer, "with_cpu", lambda group: "both")
    context: Any = SimpleNamespace(get_group=lambda mode: "own", get_second_group=lambda mode, backend: backend)
    assert schedules._transfer_groups(context) == groups


def test_an_order_is_checked_when_it_is_named_and_a_table_has_its_own():
    assert PipelineSchedule(2).num_chunks == 1
    assert PipelineSchedule(2, "zb_v").num_chunks == 2
    assert TableSchedule(["0F0 0B0"]).num_chunks is None
