"""What a pipeline schedule decides before anything runs: micro-batches, arguments, tables, virtual ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from colonnade.engine.schedule import schedules, transfer
from colonnade.engine.schedule.schedules import PipelineSchedule, TableSchedule
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


def test_a_stage_in_the_middle_keeps_its_loader_in_step():
    schedule: Any = PipelineSchedule(2)
    schedule.uses_batch = False
    batches = iter([(torch.arange(4), torch.ones(4))] * 2)
    schedule._micro_batches(batches, fill=False)
    assert len(list(batches)) == 1


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
