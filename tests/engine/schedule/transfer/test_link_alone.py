"""Both ends of a link in one process: memory is filled only when it is waited for, and a wait that would not end is an error."""

from __future__ import annotations

from collections import defaultdict
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from colonnade.engine.schedule import transfer
from colonnade.engine.schedule import transfer as link_module
from colonnade.engine.schedule.actions import Action
from colonnade.engine.schedule.transfer import SENDS_KEPT, Link, PeerFailed, describe
from colonnade.errors import ScheduleError

CPU = torch.device("cpu")


class Mail:
    """What two ends have sent each other, by sender, group and tag; who waits gets it, in the order of sends."""

    def __init__(self) -> None:
        self.sent: dict[Any, list[Tensor]] = defaultdict(list)
        self.asked: dict[Any, int] = defaultdict(int)
        self.waits: list[tuple[str, Any, tuple[Any, ...]]] = []

    def isend(self, data: Tensor, dst: int, group: Any, tag: int) -> Any:
        self.sent[1 - dst, group, tag].append(data.clone())
        return Work(lambda limit: self.waits.append(("send", tag, limit)))

    def irecv(self, memory: Tensor, src: int, group: Any, tag: int) -> Any:
        way = src, group, tag
        place = self.asked[way]
        self.asked[way] += 1

        def fill(limit: tuple[Any, ...]) -> None:
            self.waits.append(("receive", tag, limit))
            if len(self.sent[way]) <= place:
                raise RuntimeError("nothing has come")
            data = self.sent[way][place]
            memory[: data.numel()].copy_(data)

        return Work(fill)

    def assert_empty(self) -> None:
        """Every send has met its receive."""
        counts = {way: len(data) for way, data in self.sent.items() if data}
        assert counts == {way: count for way, count in self.asked.items() if count}


class Work:
    def __init__(self, end: Any) -> None:
        self._end = end

    def wait(self, *limit: Any) -> None:
        self._end(limit)


@pytest.fixture
def mail(monkeypatch: pytest.MonkeyPatch) -> Mail:
    mail = Mail()
    monkeypatch.setattr(dist, "isend", mail.isend)
    monkeypatch.setattr(dist, "irecv", mail.irecv)
    monkeypatch.setattr(transfer, "backends_of", lambda group: {"cpu": "gloo"})
    return mail


@pytest.fixture
def queued(mail: Mail, monkeypatch: pytest.MonkeyPatch) -> Mail:
    """Wires that share one queue, as over NCCL."""
    monkeypatch.setattr(transfer, "backends_of", lambda group: {"cpu": "nccl"})
    return mail


def ends(monkeypatch: pytest.MonkeyPatch, group: Any = None, down: Any = None) -> list[Link]:
    made = []
    for rank in (0, 1):
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        made.append(Link(group, 1 - rank, CPU, down))
    return made


def key(index: int) -> Action:
    return Action.parse(f"0SEND_F{index}")


def numbers(*sizes: int) -> Any:
    return [torch.arange(float(size)) for size in sizes]


def sent(link: Link, index: int, value: Any) -> None:
    link.send(key(index), *describe(value, "value"))


def test_each_direction_has_its_group(mail, monkeypatch):
    for down, expected in (("down", [("all", "down"), ("down", "all")]), (None, [("all", "all")] * 2)):
        found = [(link._wire._group, link._wire_back._group) for link in ends(monkeypatch, "all", down)]
        assert found == expected
    assert {link._cpu_wire._group for link in ends(monkeypatch, "all", "down")} == {"all"}


STEPS = [
    [numbers(3), numbers(2, 5), None],
    [numbers(3), numbers(2, 5), None],
    [numbers(3), numbers(2, 5), None],
    [numbers(4), numbers(2), numbers(1)],
    [numbers(40, 7), numbers(5, 2), {"text": numbers(1, 1)}],
    [numbers(40, 7), numbers(5, 2), {"text": numbers(1, 1)}],
    [],
    [numbers(40, 7), numbers(2, 5), {"text": numbers(1, 1)}],
]
"""The values of each step: as before, in another form, larger, none."""


@pytest.mark.parametrize("kind", ["one queue", "gloo", "gloo, received early"])
def test_values_of_any_form_arrive_in_both_directions(mail, monkeypatch, kind):
    if kind == "one queue":
        monkeypatch.setattr(transfer, "backends_of", lambda group: {"cpu": "nccl"})
    both = ends(monkeypatch)
    assert [link.one_queue for link in both] == [kind == "one queue"] * 2
    for step in STEPS:
        for one, other in (both, both[::-1]):
            for index in range(len(step)) if kind == "gloo, received early" else ():
                other.expect(key(index))
            for index, value in enumerate(step):
                sent(one, index, value)
                one.sent(key(index))
            for index in range(len(step)) if kind != "gloo, received early" else ():
                other.expect(key(index))
            for index, value in reversed([*enumerate(step)]):
                torch.testing.assert_close([other.take(key(index)).value], [value], rtol=0, atol=0)
        sends = sum(map(len, mail.sent.values()))
        for link in both:
            link.finish()
            assert (link._sends, [*link._sends_to_end], [*link._expected], link._arriving) == ({}, [], [], {})
        assert sum(what == "send" for what, _, _ in mail.waits) == sends
    mail.assert_empty()


def test_what_is_told_of_a_third_rank_names_that_rank(mail, monkeypatch):
    one, other = ends(monkeypatch)
    one.fail("a reason", False, 7)
    other.expect(key(0))
    with pytest.raises(PeerFailed, match=r"^the pipeline stopped because rank 7 failed: a reason$") as caught:
        other.take(key(0))
    assert caught.value.ranks == (7,)


def test_sends_are_let_go_when_enough_others_are_over(mail, monkeypatch):
    one, _ = ends(monkeypatch)
    for index in range(SENDS_KEPT + 2):
        sent(one, index, None)
        one.sent(key(index))
        assert len(one._sends) == min(index + 1, SENDS_KEPT)
    assert [*one._sends] == [key(index) for index in range(2, SENDS_KEPT + 2)]
    assert [*one._sends_to_end] == [*one._sends]
    waited = [tag for what, tag, _ in mail.waits if what == "send"]
    assert waited == [link_module._FRAME, link_module._TEXT, link_module._FRAME]  # of the first two


def test_what_does_not_come_is_named(mail, monkeypatch):
    _, other = ends(monkeypatch)
    other.expect(key(3))
    with pytest.raises(ScheduleError, match=r"^the transfer 0SEND_F3 with rank 0 did not complete: nothing has come"):
        other.take(key(3))


def fail(link: Link, no_batch: bool) -> None:
    """What a rank does that fails, before it comes to three messages it should have sent."""
    link.fail("a reason", no_batch)
    for index in (1, 2, 3):
        link.skip_send(key(index))


def expect_and_take(link: Link) -> None:
    for index in (1, 2, 3):
        link.expect(key(index))
    link.take(key(1))


@pytest.mark.parametrize("no_batch", [True, False])
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("is_queued", [True, False])
def test_a_failure_is_heard_and_leaves_nothing_under_way(mail, monkeypatch, is_queued, steps, no_batch):
    if is_queued:
        monkeypatch.setattr(transfer, "backends_of", lambda group: {"cpu": "nccl"})
    one, other = both = ends(monkeypatch)
    for _ in range(steps):  # after two alike, messages are counted on over a queue
        for index in range(4):
            sent(one, index, numbers(4, 2))
        for index in range(4):
            other.expect(key(index))
            other.take(key(index))
        for link in both:
            link.finish()
    sent(one, 0, numbers(4, 2))
    fail(one, no_batch)
    mail.waits.clear()
    other.expect(key(0))
    assert other.take(key(0)).value[0].tolist() == [0, 1, 2, 3]
    with pytest.raises(PeerFailed, match=r"^the pipeline stopped because rank 0 failed: a reason") as caught:
        expect_and_take(other)
    assert caught.value.no_batch is no_batch
    other.fail("heard", no_batch)
    mail.waits.clear()
    for index in (2, 3) if is_queued and not steps else ():  # those it had not come to
        other.skip_receive(key(index))
    assert [link.wait_for_peer() for link in (other, one)] == [True, True]
    for link in both:
        link.end_failure()
        assert (link._failure, link._peer_failed, link._skipped, link._patience) == ([], False, False, None)
        assert ([*link._expected], link._arriving) == ([], {})
    assert sum(what == "send" for what, _, _ in mail.waits) == 2 + 3 + 2  # of both reasons, and what is skipped
    limits = {limit for _, _, limit in mail.waits}
    assert limits == ({()} if no_batch else {(timedelta(seconds=10),)})
    one.finish()
    other.finish()
    sent(one, 4, numbers(3))
    other.expect(key(4))
    assert other.take(key(4)).value[0].tolist() == [0, 1, 2]
    mail.assert_empty()


def test_a_rank_that_failed_itself_hears_of_the_other_in_what_it_expected(mail, monkeypatch):
    one, other = ends(monkeypatch)
    other.fail("theirs", no_batch=False)
    other.skip_send(key(1))
    one.expect(key(1))
    one.fail("mine", no_batch=False)
    assert one.wait_for_peer()
    assert other.wait_for_peer()
    mail.assert_empty()


@pytest.mark.parametrize("is_queued", [True, False])
def test_what_came_and_is_not_used_is_waited_for_where_its_memory_is_still_filled(mail, monkeypatch, is_queued):
    if is_queued:
        monkeypatch.setattr(transfer, "backends_of", lambda group: {"cpu": "nccl"})
    one, other = ends(monkeypatch)
    for index in (0, 1):
        sent(one, index, numbers(2))
        other.expect(key(index))
    other.take(key(1))
    assert [*other._arriving] == [key(0)]
    mail.waits.clear()
    assert not other.wait_for_peer()
    assert mail.waits == ([] if is_queued else [("receive", link_module._TENSOR, ())])
    assert other._arriving == {}


def test_nobody_hears_of_a_failure_where_nothing_is_left_to_send(mail, monkeypatch):
    one, other = ends(monkeypatch)
    sent(one, 0, numbers(2))
    one.fail("late", no_batch=False)
    assert not one.wait_for_peer()
    other.expect(key(0))
    other.take(key(0))
    assert not other.wait_for_peer()


@pytest.mark.parametrize(
    ("backends", "named"),
    [
        ({"cpu": "gloo"}, "gloo"),
        ({"cpu": "gloo", "cuda": "gloo"}, "gloo"),
        ({"cuda": "gloo"}, "gloo"),
        ({"cuda": "nccl"}, "cpu:gloo,cuda:nccl"),
        ({"cpu": "gloo", "cuda": "nccl"}, "cpu:gloo,cuda:nccl"),
        ({"cpu": "mpi"}, "mpi"),
    ],
)
def test_a_group_for_transfers_has_a_backend_for_the_host(monkeypatch, backends, named):
    monkeypatch.setattr(transfer, "backends_of", lambda group: backends)
    assert transfer.with_cpu(None) == named


@pytest.mark.parametrize(
    ("backends", "device", "moved", "one_queue"),
    [
        ({"cpu": "gloo"}, "cpu", "cpu", False),
        ({"cpu": "gloo", "cuda": "gloo"}, "cuda", "cpu", False),
        ({"cpu": "gloo", "cuda": "nccl"}, "cuda", "cuda", True),
        ({"cpu": "gloo", "cuda": "nccl"}, "cpu", "cpu", False),
        ({"cpu": "gloo"}, "cuda", "cpu", False),
        ({"cuda": "nccl"}, "cpu", None, None),
    ],
)
def test_a_wire_moves_the_memory_that_its_backend_can(monkeypatch, backends, device, moved, one_queue):
    monkeypatch.setattr(transfer, "backends_of", lambda group: backends)
    if moved is None:
        with pytest.raises(
            ScheduleError, match=r"moves cuda memory, but it must move cpu memory, too.*cpu:gloo,cuda:nccl"
        ):
            transfer.Wire(None, 1, torch.device(device))
    else:
        made = transfer.Wire(None, 1, torch.device(device))
        assert (made.device.type, made.one_queue) == (moved, one_queue)


def test_a_rank_that_is_not_in_the_group_is_told(mail, monkeypatch):
    monkeypatch.setattr(dist, "isend", lambda *args, **named: None)
    with pytest.raises(ScheduleError, match="this rank is not in the pipeline's process group"):
        transfer.Wire(None, 1, CPU).send(torch.ones(1), 0)
    assert transfer.Wire(None, 1, CPU).send(torch.ones(0), 0) == []
