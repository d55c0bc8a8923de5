"""One step of one rank: phases, rows, shapes and what is done where a stage cannot be split."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from colonnade.engine.schedule import executor as step_module
from colonnade.engine.schedule.actions import Action, Kind, parse_table
from colonnade.engine.schedule.executor import Executor, MicroBatch, PipelineStep, cut_batch
from colonnade.errors import ScheduleError
from tests.engine.schedule import models
from tests.engine.schedule.executor.test_executor import loss_of


class Clock:
    """Which phases were entered, one after another."""

    def __init__(self) -> None:
        self.told = ["before"]

    def enter(self, phase: str) -> str:
        self.told.append(phase)
        return self.told[-2]


def step(executor: Any = None, **options: Any) -> PipelineStep:
    given = {"micro_batches": [], "train": True, "with_loss": True, "keep_outputs": False, "mean_scale": 1.0}
    return PipelineStep(executor, **{**given, "sum_scale": 1.0, **options})


def test_the_time_of_an_action_counts_in_its_phase():
    clock: Any = Clock()
    executor = Executor(
        models.build(models.Simple, 2), parse_table(["0F0 1F0 1I0 1W0 0B0"]), loss_fn=loss_of, waits=clock
    )
    executor.run(cut_batch(*models.batch_for(models.Simple, 2), 1))
    assert clock.told == ["before", "forward", "forward", "backward", "backward", "backward"]


def test_waiting_for_another_rank_is_communication_and_then_the_phase_goes_on():
    clock = Clock()
    link = SimpleNamespace(take=lambda key: f"taken {key}")
    executor = SimpleNamespace(waits=clock, link_over=lambda key: link)
    assert step(executor)._take(Action.parse("1F0"), Kind.RECEIVE_FORWARD) == "taken 1RECV_F0"  # type: ignore[comparison-overlap]
    assert clock.told == ["before", "communication", "before"]


def test_transfers_go_over_their_links_and_a_confirmation_is_taken_at_once():
    told: list[Any] = []
    link = SimpleNamespace(
        send=lambda *given: told.append(("send", *given)),
        expect=lambda key: told.append(("expect", key)),
        take=lambda key: told.append(("take", key)),
        sent=lambda key: told.append(("sent", key)),
    )
    one = step(SimpleNamespace(link_over=lambda key: link))
    forward, confirms = Action.parse("0SEND_F0"), Action(1, Kind.SEND_BACKWARD, -1)
    one._outbox[forward] = ("text", [])
    one._send(forward)
    one._send(confirms)
    received = [Action.parse("1RECV_F0"), Action(0, Kind.RECEIVE_BACKWARD, -1)]
    for action in received:
        one._receive(action)
    for text in ("0SENT_F2", "1SENT_B3"):
        one._sent(Action.parse(text))
    assert told == [
        ("send", forward, "text", []),
        ("send", confirms, "null", []),
        ("expect", received[0]),
        ("expect", received[1]),
        ("take", received[1]),
        ("sent", Action.parse("0SEND_F2")),
        ("sent", Action.parse("1SEND_B3")),
    ]
    assert one._outbox == {}


@pytest.mark.parametrize(
    ("fed", "here", "is_refused"), [(3, 3, False), (3, 2, True), (None, 2, False), (3, None, False)]
)
def test_labels_belong_to_the_rows_that_the_first_stage_was_given(fed, here, is_refused):
    one = step()
    one._rows[4] = fed
    if is_refused:
        with pytest.raises(
            ScheduleError, match=r"^micro-batch 4 has 3 rows on the first stage of the pipeline and 2 on"
        ):
            one._check_rows(MicroBatch(4, rows=here))
    else:
        one._check_rows(MicroBatch(4, rows=here))


@pytest.mark.parametrize(
    ("promised", "output", "gave"),
    [
        (None, torch.ones(2, 3), None),
        (None, "text", None),
        ([2, 3], torch.ones(2, 3), None),
        ([2, 4], torch.ones(2, 3), r"gave \(2, 3\)"),
        ([2, 3], (torch.ones(2, 3),), "gave tuple"),
    ],
)
def test_a_promised_shape_is_held(promised, output, gave):
    one = step(SimpleNamespace(tensor_shape=promised))
    if gave is None:
        one._check_shape(0, output)
    else:
        with pytest.raises(ScheduleError, match=gave):
            one._check_shape(0, output)


def test_a_stage_that_cannot_be_split_is_tried_once(monkeypatch):
    said: list[str] = []
    tried: list[int] = []
    split = step_module.backward_input

    def watched(roots: Any, grads: Any, inputs: Any) -> Any:
        tried.append(1)
        return split(roots, grads, inputs)

    monkeypatch.setattr(step_module, "get_dist_logger", lambda: SimpleNamespace(warning=said.append))
    monkeypatch.setattr(step_module, "backward_input", watched)
    stages = models.build(models.Unsplittable, 2)
    executor = Executor(stages, parse_table(["0F0 1F0 1I0 0I0 0F1 1F1 1I1 0I1 0W0 1W0 0W1 1W1"]), loss_fn=loss_of)
    executor.run(cut_batch(*models.batch_for(models.Unsplittable, 4), 2))
    _, _, expected = models.truth(models.Unsplittable, 2, 4)
    found = {f"{at}.{name}": p.grad for at, stage in enumerate(stages) for name, p in stage.named_parameters()}
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    assert len(said) == len(tried) == 1
    assert executor.unsplittable == {1}


def test_a_stage_that_computes_again_is_not_split(monkeypatch):
    """Nor one of FSDP2; a stage with either is enough."""

    class Sharded(models.Simple):
        def _get_fsdp_state(self) -> None: ...

    stages: list[nn.Module] = [models.Simple(0, 2), nn.Sequential(models.Simple(1, 2), Sharded(1, 2))]
    executor = Executor(stages, parse_table(["0F0 1F0 1B0 0B0"]), loss_fn=loss_of)
    assert executor.unsplittable == {1}
    from colonnade.engine.schedule import executor as module

    monkeypatch.setattr(module, "recomputes", lambda stage: stage is stages[0])
    executor = Executor(stages, parse_table(["0F0 1F0 1B0 0B0"]), loss_fn=loss_of)
    assert executor.unsplittable == {0, 1}
