"""The executor in one process: all stages here, against the whole model."""

from __future__ import annotations

import copy
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from colonnade.comm.waits import WaitWatch
from colonnade.engine.schedule import executor as module
from colonnade.engine.schedule.actions import Action, only_forward, parse_table
from colonnade.engine.schedule.executor import Executor
from colonnade.engine.schedule.micro_batch import split_into_micro_batches
from colonnade.engine.schedule.orders import make_table
from colonnade.engine.schedule.replay import add_transfers, confirmation, receive_early
from colonnade.engine.schedule.transfer import PeerFailed
from colonnade.errors import GradientError, ScheduleError

X = torch.randn(7, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = torch.randn(7, 2, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def stages() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(3, 4), nn.Tanh()).double(), nn.Linear(4, 2).double()]


def executor(chunks: list[nn.Module], micro_batches: int = 3, **options: object) -> Executor:
    table = make_table(
        "gpipe" if len(chunks) == 1 else "interleaved_1f1b", 1, micro_batches, len(chunks) if len(chunks) > 1 else None
    )
    return Executor(chunks, table, **{"loss_fn": F.mse_loss, **options})


@pytest.mark.parametrize("chunks", [1, 2])
def test_losses_gradients_and_outputs_are_those_of_the_whole_model(chunks):
    parts = stages()
    whole = copy.deepcopy(nn.Sequential(*parts))
    loss = F.mse_loss(whole(X), Y)
    loss.backward()
    made = executor(parts if chunks == 2 else [nn.Sequential(*parts)])
    assert made.has_first_stage
    assert made.has_last_stage
    ran = made.run(split_into_micro_batches(X, Y, 3), keep_outputs=True)
    torch.testing.assert_close(ran.loss, loss.detach())
    torch.testing.assert_close(torch.cat(ran.outputs), whole(X).detach())
    assert [len(output) for output in ran.outputs] == [3, 2, 2]
    expected = [F.mse_loss(whole(x), y).detach() for x, y in zip(X.split([3, 2, 2]), Y.split([3, 2, 2]), strict=True)]
    torch.testing.assert_close(torch.stack(ran.losses), torch.stack(expected))
    for found, truth in zip(nn.Sequential(*parts).parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(found.grad, truth.grad)
    assert ran.count is None
    # On top of the gradients that are there; the loss is not scaled.
    again = made.run(split_into_micro_batches(X, Y, 3), backward_scale=torch.tensor(2.0))
    torch.testing.assert_close(again.loss, ran.loss)
    for found, truth in zip(nn.Sequential(*parts).parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(found.grad, 3 * truth.grad)


def test_evaluation_makes_no_gradient_and_losses_and_outputs_only_where_asked():
    parts = stages()
    made = executor(parts)
    ran = made.run(split_into_micro_batches(X, Y, 3), forward_only=True)
    assert len(ran.losses) == 3
    assert ran.outputs == []
    made = executor(parts, loss_fn=None)  # not needed then
    without = made.run(split_into_micro_batches(X, Y, 3), forward_only=True, with_loss=False, keep_outputs=True)
    assert without.losses == []
    assert without.loss is None
    assert len(without.outputs) == 3
    assert not any(output.requires_grad for output in without.outputs)
    assert all(parameter.grad is None for part in parts for parameter in part.parameters())


def test_sums_and_counts_make_the_mean_of_the_batch():
    parts = stages()
    made = executor(parts, loss_fn=lambda output, y: (F.mse_loss(output, y, reduction="sum"), y.numel()))
    ran = made.run(split_into_micro_batches(X, Y, 3), sum_scale=0.5)
    whole = copy.deepcopy(nn.Sequential(*parts))
    whole.zero_grad()
    loss = F.mse_loss(whole(X), Y, reduction="sum")
    torch.testing.assert_close(ran.loss, loss.detach() / Y.numel())
    assert ran.count == Y.numel()
    (loss / 2).backward()
    for found, truth in zip(nn.Sequential(*parts).parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(found.grad, truth.grad)
    mean, count = made.share_loss(ran.loss, ran.count)
    torch.testing.assert_close(mean, ran.loss)
    assert count == Y.numel()


@pytest.mark.parametrize(("backend", "device"), [("gloo", "cpu"), ("nccl", "meta")])
def test_a_loss_is_shared_where_the_backend_can_take_it(monkeypatch, backend, device):
    made = executor(stages())
    made.device = torch.device("meta")
    made.form.keep(False)
    lay: list[str] = []
    full = torch.full
    monkeypatch.setattr(
        torch, "full", lambda *args, **options: lay.append(str(options["device"])) or full(*args, **options)
    )
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda group: backend)
    assert made.share_loss(torch.tensor(1.0))[0].device.type == "meta"
    assert lay == [device]


def test_the_loss_of_the_last_stage_keeps_its_form_on_ranks_without_it():
    loss, count = torch.tensor(2.0), torch.tensor(3.0)
    for given in (None, count):
        made = executor(stages())
        assert made.form.counted is None
        mean, counted = made.share_loss(loss, given)
        assert (mean.item(), None if counted is None else counted.item()) == (2.0, None if given is None else 3.0)
        assert made.form.counted is (given is not None)
        with pytest.raises(GradientError, match="the loss was"):
            made.form.keep(given is None)


def test_losses_of_training_and_of_evaluation_may_have_two_forms():
    made = executor(stages())
    assert made.form is made._forms[True]
    made.share_loss(torch.tensor(2.0), torch.tensor(3.0))
    with pytest.raises(GradientError, match="the loss was"):
        made.run(split_into_micro_batches(X, Y, 3))
    ran = made.run(split_into_micro_batches(X, Y, 3), forward_only=True)
    assert (made.form, made.form.counted, ran.count) == (made._forms[False], False, None)


def test_the_ends_of_a_pipeline_are_on_the_ranks_of_the_table():
    for rank in range(3):
        made, _ = middle()
        made.facts, made.rank = SimpleNamespace(stage_ranks=(2, 0, 1, 0)), rank
        assert (made.has_first_stage, made.has_last_stage) == (rank == 2, rank == 0)


# -- what goes wrong, with links that write down ----------------------------------------------------------


class Written:
    """A link that writes down what it is told."""

    def __init__(self, told: list[Any], peer: int, hears: bool = True, is_gone: bool = False) -> None:
        self.told, self.peer, self.hears, self.is_gone = told, peer, hears, is_gone

    def fail(self, text: str, no_batch: bool, rank: int | None = None) -> None:
        self.told.append(("fail", self.peer, text, no_batch, *([rank] if rank is not None else [])))

    def skip_send(self, action: Action) -> None:
        if self.is_gone:
            raise RuntimeError("gone")
        self.told.append(("skip_send", str(action)))

    def skip_receive(self, action: Action) -> None:
        self.told.append(("skip_receive", str(action)))

    def wait_for_peer(self) -> bool:
        self.told.append(("wait_for_peer", self.peer))
        return self.hears

    def end_failure(self) -> None:
        self.told.append(("end_failure", self.peer))


def middle(**options: Any) -> tuple[Any, list[Any]]:
    """The executor of the middle rank of three, and what its links are told."""
    told: list[Any] = []
    made: Any = object.__new__(Executor)
    made.ranks, made.rank, made._peers, made._failure = (4, 5, 6), 1, [0, 2], ""
    made._number, made._refusals, made.waits = 7, itertools.count(), WaitWatch()
    made.facts = SimpleNamespace(stage_ranks=(0, 1, 2), num_microbatches=1)
    made._links = {peer: Written(told, peer, **options) for peer in made._peers}
    return made, told


REST = parse_table(["1F0 1SEND_F0 1SENT_F0 1RECV_B0 1RECV_F1 1B0 1SEND_B0"])[0]
SKIPPED = [
    ("skip_send", "1SEND_F0"),
    ("skip_receive", "1RECV_B0"),
    ("skip_receive", "1RECV_F1"),
    ("skip_send", "1SEND_B0"),
]


@pytest.mark.parametrize("no_batch", [True, False])
def test_a_rank_that_fails_tells_both_sides_and_goes_through_the_rest(no_batch):
    made, told = middle()
    assert made._stop(ValueError("a bug"), REST, True, no_batch) is True
    begun = [("fail", peer, "ValueError: a bug", no_batch) for peer in (0, 2)]
    heard = [("wait_for_peer", 0), ("wait_for_peer", 2), ("end_failure", 0), ("end_failure", 2)]
    assert told == [*begun, *SKIPPED, *heard]
    assert made._failure == "ValueError: a bug"
    made, told = middle()
    assert made._stop(ValueError("a bug"), REST, False, no_batch) is False  # nobody waits to be heard
    assert told == [*begun, *SKIPPED]
    made, told = middle(hears=False)
    assert made._stop(ValueError("a bug"), REST, True, no_batch) is False
    assert told == [*begun, *SKIPPED, ("wait_for_peer", 0), ("wait_for_peer", 2)]
    made, told = middle(is_gone=True)
    assert made._stop(ValueError("a bug"), REST, True, no_batch) is False
    assert told == begun
    made._peers = []
    assert made._stop(ValueError("a bug"), [], True, no_batch) is True
    assert made._failure == ""  # alone, the next step may run


def test_a_rank_that_heard_of_a_failure_passes_on_the_rank_that_failed_and_its_reason():
    made, told = middle()
    made._stop(PeerFailed(6, "ValueError: a bug", no_batch=False), [], False, False)
    assert told == [("fail", peer, "ValueError: a bug", False, 6) for peer in (0, 2)]
    assert made._failure == "the pipeline stopped because rank 6 failed: ValueError: a bug"


EVERY_STEP = pytest.mark.parametrize(
    ("forward_only", "confirm", "program", "confirms"),
    [
        (False, True, ["train"], True),
        (False, False, ["train"], True),
        (True, True, ["evaluate", "confirm"], True),
        (True, False, ["evaluate"], False),
    ],
)
"""The flags of a step, the parts of its program, and whether all ranks confirm its end."""


@EVERY_STEP
def test_a_rank_without_a_batch_stops_in_place_of_the_step_and_agrees_where_all_confirm(
    monkeypatch, forward_only, confirm, program, confirms
):
    made, _ = middle()
    made._program, made._forward_program, made._confirmation = ["train"], ["evaluate"], ["confirm"]
    stopped: list[Any] = []
    monkeypatch.setattr(made, "_stop", lambda *args, **named: stopped.append((*args, named)) or "clean")
    monkeypatch.setattr(made, "_agree_on_batch", lambda *args: args)
    mine = StopIteration()
    found = made.refuse(mine, forward_only=forward_only, confirm=confirm)
    assert stopped == [(mine, program, confirms, {"no_batch": True})]
    assert found == ((mine, mine, "clean") if confirms else mine)
    made._failure = "an earlier one"
    assert made.refuse(mine, forward_only=forward_only, confirm=confirm) is mine
    made._failure, made._peers = "", []
    assert made.refuse(mine, forward_only=forward_only, confirm=confirm) is mine
    assert len(stopped) == 1


ENDED = "the data iterator has ended on this rank but not on all ranks of the pipeline"


@pytest.mark.parametrize(
    ("mine", "others", "clean", "expected"),
    [
        (StopIteration(), ["ended", "ended"], True, StopIteration),
        (StopIteration(), ["ended", "ended"], False, ENDED),
        (StopIteration(), ["", "ended"], True, ENDED),
        (ScheduleError("too few rows"), ["few", "few"], True, "too few rows"),
        (ScheduleError("too few rows"), ["", ""], True, "too few rows"),
        (None, ["", "ended"], False, "of rank 6"),
        (None, ["first", "second"], False, "of rank 4"),
    ],
)
def test_what_ranks_raise_where_some_have_no_batch(monkeypatch, mine, others, clean, expected):
    keys: list[str] = []

    def share(key: str, text: str, ranks: Any) -> dict[int, str]:
        keys.append(key)
        assert bool(text) is (mine is not None)
        return dict(zip(ranks, [others[0], text, others[1]], strict=True))

    made, _ = middle()
    made._failure = "begun"
    monkeypatch.setattr(module, "share_texts", share)
    monkeypatch.setattr(module, "note_of", str)
    names = {"first": "of rank 4", "ended": "of rank 6"}
    monkeypatch.setattr(module, "error_of", lambda note, ranks, rank: ScheduleError(f"{names[note]} {ranks} {rank}"))
    monkeypatch.setattr(dist, "get_rank", lambda: 5)
    found = made._agree_on_batch(mine, ValueError("heard"), clean)
    if expected is StopIteration:
        assert found is mine
        assert made._failure == ""
    else:
        assert str(found).startswith(expected)
        assert made._failure == "begun" or (clean and all(others))
    assert found is not mine or made._failure == "" or not isinstance(mine, StopIteration)
    made._agree_on_batch(mine, ValueError("heard"), clean)
    assert keys == ["no batch/4-5-6/7/0", "no batch/4-5-6/7/1"]

    def gone(*args: Any) -> Any:
        raise RuntimeError("gone")

    monkeypatch.setattr(module, "share_texts", gone)
    heard = ValueError("heard")
    assert made._agree_on_batch(mine, heard, clean) is heard


@pytest.mark.parametrize(("at", "rest"), [(0, 1), (1, 1), (3, 4), (6, 6)])
@pytest.mark.parametrize("kind", ["own", "peer", "no batch"])
def test_a_failing_step_goes_on_at_the_action_after_it_or_at_the_send_itself(monkeypatch, at, rest, kind):
    error: Exception = ValueError("a bug") if kind == "own" else PeerFailed(4, "a bug", no_batch=kind == "no batch")
    made, _ = middle()
    made._program, made._forms, made.loss_fn = REST, {True: None}, None
    stopped: list[Any] = []

    def act(action: Action, *value: Any) -> None:
        if action == REST[at]:
            raise error

    def compute(step: Any, action: Action) -> None:
        step.outbox.update((send, ("null", [])) for send in REST if "SEND" in send.kind)
        act(action)

    for name in ("_forward", "_backward"):
        monkeypatch.setattr(made, name, compute)
    for link in made._links.values():
        link.send, link.expect, link.sent = act, act, lambda action: None
    monkeypatch.setattr(made, "_stop", lambda *args: stopped.append(args))
    agreed = ScheduleError("agreed")
    monkeypatch.setattr(made, "_agree_on_batch", lambda mine, error, clean: agreed)
    with pytest.raises(type(agreed if kind == "no batch" else error)) as caught:
        made.run([None])
    assert caught.value is (agreed if kind == "no batch" else error)
    assert stopped == [(error, REST[rest:], True, kind == "no batch")]


TABLE = make_table("gpipe", 2, 4)


def second(monkeypatch: pytest.MonkeyPatch, one_queue: bool = False, **options: Any) -> tuple[Executor, list[Any]]:
    """The executor of the second rank of two, and what its links were made of."""
    made: list[Any] = []
    monkeypatch.setattr(module, "gather_json", lambda mine, device, group: [mine, mine])
    monkeypatch.setattr(module, "Link", lambda *given: made.append(given) or SimpleNamespace(one_queue=one_queue))
    given = {"rank": 1, "ranks": (4, 5), "group": "all", "loss_fn": F.mse_loss, **options}
    return Executor([nn.Linear(1, 1)], TABLE, **given), made


@pytest.mark.parametrize("one_queue", [True, False])
def test_receives_begin_early_where_they_hold_up_nothing(monkeypatch, one_queue):
    found, _ = second(monkeypatch, one_queue)
    for program, table in ((found._program, TABLE), (found._forward_program, only_forward(TABLE))):
        plain = add_transfers(table)[1]
        assert program == (plain if one_queue else receive_early(plain))
        assert plain != receive_early(plain)
    assert found._peers == [0]
    assert found._confirmation == confirmation(TABLE)[1]


def test_transfers_have_a_group_of_their_own_where_one_is_given(monkeypatch):
    assert second(monkeypatch)[1] == [("all", 4, torch.device("cpu"), None)]
    given = {"transfer_group": "transfers", "down_group": "down"}
    assert second(monkeypatch, **given)[1] == [("transfers", 4, torch.device("cpu"), "down")]


@EVERY_STEP
def test_a_step_runs_its_program_and_ends_on_all_links(monkeypatch, forward_only, confirm, program, confirms):
    made, _ = middle()
    ran: list[str] = []
    names = {"train": "1RECV_F0", "evaluate": "1RECV_F1", "confirm": "1RECV_B0"}
    actions = {name: Action.parse(text) for name, text in names.items()}
    for link in made._links.values():
        link.expect = ran.append
    made._program, made._forward_program, made._confirmation = ([actions[name]] for name in names)
    made._forms, made.loss_fn = {True: "of training", False: "of evaluation"}, None
    ended: list[int] = []
    for peer, link in made._links.items():
        link.finish = lambda peer=peer: ended.append(peer)
    made.run([None], forward_only=forward_only, with_loss=False, confirm=confirm)
    assert ran == [actions[name] for name in program]
    assert ended == [0, 2]
    assert made.form == ("of evaluation" if forward_only else "of training")
    stopped: list[Any] = []
    made._program = made._forward_program = [Action.parse("1F0")]
    made._confirmation = []
    monkeypatch.setattr(made, "_forward", lambda step, action: 1 / 0)
    monkeypatch.setattr(made, "_stop", lambda *given: stopped.append(given[1:]))
    with pytest.raises(ZeroDivisionError):
        made.run([None], forward_only=forward_only, confirm=confirm)
    assert stopped == [([], confirms, False)]


def test_only_the_rank_of_the_last_stage_needs_a_loss_function():
    made, _ = middle()
    made._program, made._links, made._forms, made.loss_fn = [], {}, {True: None}, None
    made.run([None])
    made.rank = 2
    with pytest.raises(ScheduleError, match="training needs a loss function on the rank of the last stage"):
        made.run([None])
