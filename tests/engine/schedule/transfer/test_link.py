"""Links between real ranks: every kind of value, notes sent once, one order on both sides of a pair."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from colonnade.engine.schedule import transfer as link_module
from colonnade.engine.schedule.actions import Action
from colonnade.engine.schedule.micro_batch import split_into_micro_batches
from colonnade.engine.schedule.orders import chunks_of, make_table
from colonnade.engine.schedule.transfer import (
    SENDS_KEPT,
    Link,
    PeerFailed,
    Wire,
    _FrameSize,
    backends_of,
    describe,
    wait,
    with_cpu,
)
from colonnade.errors import ScheduleError
from colonnade.registry import ORDERS
from colonnade.testing import run_world
from tests.engine.schedule import models
from tests.engine.schedule.executor.test_executor import Broken, grads_of, make_executor

CPU = torch.device("cpu")


def values() -> list[Any]:
    """What goes over, one after another; the third has the form of the first."""
    torch.manual_seed(0)
    kinds = [torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.int8, torch.bool]
    return [
        (torch.randn(3, 2), {"n": 1}),
        [torch.randn(4).to(kind) for kind in kinds] + [torch.empty(0, 3), torch.tensor(7)],
        (torch.randn(3, 2), {"n": 1}),
        torch.randn(4, 3).T,
        torch.randn(3, dtype=torch.complex64).conj(),
        [torch.randn(3, 4)[:1, :1].T, torch.ones(()).expand(1, 1)],  # of one element: contiguous by any stride
        "only words",
        None,
    ]


def key(index: int) -> Action:
    return Action.parse(f"0SEND_F{index}")


def send_or_take() -> list[int]:
    rank = dist.get_rank()
    link = Link(None, 1 - rank, CPU)
    if rank == 0:
        sent = []
        for index, value in enumerate(values()):
            before = len(link._sent_numbers)
            link.send(key(index), *describe(value, "value"))
            sent.append(len(link._sent_numbers) - before)
            link.sent(key(index))
        link.finish()
        return sent
    expected = values()
    for index in range(len(expected)):
        link.expect(key(index))
    for index in [len(expected) - 1, *range(len(expected) - 1)]:
        got, value = link.take(key(index)).value, expected[index]
        if isinstance(value, (Tensor, tuple, list)):
            torch.testing.assert_close(got, value, rtol=0, atol=0)
        else:
            assert got == value
    return []


def test_every_kind_of_value_arrives_and_a_form_is_described_once() -> None:
    """They are taken in another order than they were sent in."""
    assert run_world(2, send_or_take).values == [[1, 1, 0, 1, 1, 1, 1, 1], []]


def send_or_take_often() -> int:
    """Over wires with a queue, until messages are counted on; then each has the form of another."""
    link_module.Wire = Diary  # type: ignore[misc]
    rank = dist.get_rank()
    link = Link(None, 1 - rank, CPU)
    for sent in (*[values()] * 3, values()[::-1]):
        if rank == 1:
            for index in range(len(sent)):
                link.expect(key(index))
        for index, value in enumerate(sent):
            if rank == 0:
                link.send(key(index), *describe(value, "value"))
            else:
                got = link.take(key(index)).value
                torch.testing.assert_close([got], [value], rtol=0, atol=0) if not isinstance(value, str) else None
        link.finish()
    return len(Diary.pages[1 - rank])


def test_every_kind_of_value_arrives_over_a_queue_each_message_in_one_piece() -> None:
    """Six of the eight values have tensors; in the last step the two places that had none have some too."""
    assert run_world(2, send_or_take_often).values == [4 * 6 + 2] * 2


def count_sends(steps: list[list[int]]) -> list[list[int]]:
    """Steps of messages of so many numbers; how many sends each message took."""
    counts: list[int] = []
    plain = dist.isend

    def counted(*arguments: Any, **options: Any) -> Any:
        counts[-1] += 1
        return plain(*arguments, **options)

    dist.isend = counted
    rank = dist.get_rank()
    link = Link(None, 1 - rank, CPU)
    result = []
    for sizes in steps:
        if rank == 1:
            for index in range(len(sizes)):
                link.expect(key(index))
        for index, size in enumerate(sizes):
            if rank == 0:
                counts.append(0)
                link.send(key(index), *describe(torch.full((size,), float(size)), "value"))
            else:
                assert link.take(key(index)).value.tolist() == [float(size)] * size
        link.finish()
        result.append(counts.copy())
        counts.clear()
    return result


def test_a_steady_message_is_one_send_and_any_other_arrives_too() -> None:
    """A new form takes a header, a text and its tensor; a known one that is larger than all of the step before, a
    header and its tensor; a step with no message leaves the room as it was."""
    steps = [[100, 50, 100], [100, 50, 50], [], [50], [100, 50], [100], [300, 100], [300, 100, 0]]
    assert run_world(2, count_sends, steps).values[0] == [[3, 3, 2], [1, 1, 1], [], [1], [2, 1], [1], [3, 1], [1, 1, 2]]


def begin_counted_on(steps: list[list[int]]) -> list[list[str]]:
    """Steps of messages of so many numbers over wires with a queue; how each came, as the receiver saw it."""
    link_module.Wire = Diary  # type: ignore[misc]
    rank = dist.get_rank()
    link = Link(None, 1 - rank, CPU)
    result = []
    for sizes in steps:
        if rank == 0:
            for index, size in enumerate(sizes):
                link.send(key(index), *describe((torch.full((size,), float(size)), size), "value"))
        else:
            begun = []
            for index in range(len(sizes)):
                begun.append(bool(link._predicted(link._received_layouts, key(index))))
                link.expect(key(index))
            result.append([])
            for early, (index, size) in zip(begun, enumerate(sizes), strict=True):
                came = link.take(key(index)).value
                assert came[0].tolist() == [float(size)] * size
                assert came[1] == size
                result[-1].append("early" if early else "then")
        link.finish()
    sent = [size for way, size in Diary.pages[1 - rank] if way == "0>1"]
    return [*result, sent]  # type: ignore[list-item]


def test_what_a_message_had_twice_is_received_before_its_header_and_any_other_form_arrives_too() -> None:
    """Between steps and between messages."""
    steps = [[4, 2], [4, 2], [4, 2], [4, 3], [5, 3], [5, 3, 6], [5, 3, 6]]
    sent, received = run_world(2, begin_counted_on, steps).values
    assert received[:-1] == [
        ["then", "then"],
        ["then", "then"],
        ["early", "early"],
        ["early", "early"],  # the second is another
        ["early", "then"],  # the first is another
        ["then", "early", "then"],
        ["early", "early", "then"],
    ]
    assert sent == [received[-1]]
    assert received[-1] == [4 * size for size in (4, 2, 4, 2, 4, 2, 4, 2, 4, 3, 5, 3, 6, 5, 3, 6)]


def many_forms(kept: int) -> bool:
    link_module._DESCRIPTIONS_KEPT = kept
    rank = dist.get_rank()
    link = Link(None, 1 - rank, CPU)
    sizes = [1, 2, 3, 4, 1, 5, 6, 4, 1, 2, 2]
    for index, size in enumerate(sizes):
        if rank == 0:
            link.send(key(index), *describe(torch.full((size,), float(index)), "value"))
        else:
            link.expect(key(index))
            assert link.take(key(index)).value.tolist() == [float(index)] * size
    link.finish()
    return len(link._sent_numbers) <= kept and len(link._received_descriptions) <= kept


def test_notes_are_forgotten_on_both_sides_alike() -> None:
    assert run_world(2, many_forms, 3).values == [True, True]


def many_sends() -> int:
    """The most sends that a rank keeps, of many messages that it does not wait for."""
    rank = dist.get_rank()
    link = Link(None, 1 - rank, CPU)
    most = 0
    for index in range(SENDS_KEPT + 5):
        if rank == 0:
            link.send(key(index), *describe(torch.full((2,), float(index)), "value"))
            link.sent(key(index))
            most = max(most, len(link._sends))
        else:
            link.expect(key(index))
            assert link.take(key(index)).value.tolist() == [float(index)] * 2
    link.finish()
    assert not link._sends
    return most


def test_sends_are_let_go_when_enough_others_are_over() -> None:
    assert run_world(2, many_sends).values == [SENDS_KEPT, 0]


def fail_or_take() -> str:
    rank = dist.get_rank()
    link = Link(None, 1 - rank, CPU)
    heard = ""
    if rank == 0:
        link.send(key(0), *describe(torch.ones(2), "value"))
        link.fail("a reason", no_batch=False)
        link.skip_send(key(1))
        link.skip_send(key(2))
    else:
        for index in range(3):
            link.expect(key(index))
        assert link.take(key(0)).value.tolist() == [1, 1]
        with pytest.raises(PeerFailed) as caught:
            link.take(key(1))
        link.fail("heard", no_batch=False)
        heard = str(caught.value)
    assert link.wait_for_peer()
    link.end_failure()
    if rank == 0:
        link.send(key(3), *describe(torch.ones(3), "value"))
    else:
        link.expect(key(3))
        assert link.take(key(3)).value.tolist() == [1, 1, 1]
    link.finish()
    return heard


def test_a_failure_comes_after_what_was_sent_before_it_and_leaves_nothing_behind() -> None:
    assert run_world(2, fail_or_take).values[1] == "the pipeline stopped because rank 0 failed: a reason"


def fail_when_counted_on(order: str, steps: int) -> tuple[str, Any]:
    """The second stage fails after so many steps, when the others may have begun to receive what it will not send."""
    link_module.Wire, Diary.blocks, Diary.pages = Diary, True, {}  # type: ignore[misc]
    executor, stages = make_executor(Broken, make_table(order, 4, 4, chunks_of(order) or 2))
    for stage in stages.values():
        stage.calls = -4 * steps  # type: ignore[assignment]
    for _ in range(steps):
        executor.run(split_into_micro_batches(*models.batch_for(models.Simple, 9), 4))
    with pytest.raises((ScheduleError, ZeroDivisionError)) as caught:
        executor.run(split_into_micro_batches(*models.batch_for(models.Simple, 9), 4))
    return str(caught.value), Diary.pages


def fail_in_orders() -> list[tuple[str, Any]]:
    return [fail_when_counted_on(order, steps) for order in ("1f1b", "gpipe", "interleaved_1f1b") for steps in (0, 2)]


@pytest.mark.slow
def test_a_failure_is_heard_where_messages_are_counted_on_and_both_sides_end_what_one_has_begun() -> None:
    """Over NCCL what has no other side would never end, and would hold up what follows on the device."""
    for order in zip(*run_world(4, fail_in_orders).values, strict=True):
        assert order[1][0] == "a bug of the user"
        for rank, (heard, pages) in enumerate(order):
            assert rank == 1 or "failed: ZeroDivisionError: a bug of the user" in heard
            assert all(page == order[peer][1][rank] for peer, page in pages.items())


class Diary(Wire):
    """A wire with a queue, as NCCL has, that writes down what goes through it, and may wait for the other side each time."""

    pages: dict[int, list[tuple[str, int]]] = {}
    blocks = False

    def __init__(self, group: Any, peer: int, device: torch.device) -> None:
        super().__init__(group, peer, device)
        self.one_queue = True
        self.page = self.pages.setdefault(peer, [])
        self.peer = peer

    def send(self, tensor: Tensor, tag: int) -> Any:
        self.page += [(f"{dist.get_rank()}>{self.peer}", tensor.nbytes)] if tag == 0 and tensor.numel() else []
        return self._done(super().send(tensor, tag), tag)

    def fill(self, memory: Tensor, tag: int) -> Any:
        self.page += [(f"{self.peer}>{dist.get_rank()}", memory.nbytes)] if tag == 0 else []
        return self._done(super().fill(memory, tag), tag)

    def _done(self, pending: Any, tag: int) -> Any:
        if self.blocks and tag == 0:
            wait(pending)
            return []  # gloo waits only once
        return pending


def keep_diary(rows: Sequence[int]) -> list[Any]:
    """Every order, a training step and an evaluation for each number of rows; the diary, and the gradients of training."""
    link_module.Wire, Diary.blocks = Diary, True  # type: ignore[misc]
    diaries = []
    for name in ORDERS:
        Diary.pages = {}
        executor, stages = make_executor(models.Simple, make_table(name, 4, 8, chunks_of(name) or 2))
        grads = []
        for count in rows:
            for stage in stages.values():
                stage.zero_grad()
            executor.run(split_into_micro_batches(*models.batch_for(models.Simple, count), 8))
            grads.append(copy.deepcopy(grads_of(stages)))
            executor.run(split_into_micro_batches(*models.batch_for(models.Simple, 9), 8), forward_only=True)
        diaries.append((Diary.pages, grads, executor.facts.num_stages))
    return diaries


@pytest.mark.slow
def test_both_sides_of_every_pair_keep_one_order() -> None:
    """What a backend with queues (NCCL) needs, or it locks up; also where forms change. Every transfer holds its rank up until
    the other side has come to it too, as first transfers do over NCCL, and what loads a kernel or frees memory meanwhile.
    """
    rows = [9, 9, 9, 13, 13, 13, 8, 8]
    ranks = run_world(4, keep_diary, rows, timeout=180).values
    for order in zip(*ranks, strict=True):
        pages = [pages for pages, _, _ in order]
        assert sum(map(len, pages)) > 0
        for rank, diary in enumerate(pages):
            for peer, page in diary.items():
                assert page == pages[peer][rank]
        for step, count in enumerate(rows):
            _, _, expected = models.truth(models.Simple, order[0][2], count)
            found = {name: grad for _, grads, _ in order for name, grad in grads[step].items()}
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def backends() -> tuple[dict[str, str], str, str]:
    gloo = dist.new_group()
    try:
        Wire(gloo, 0, torch.device("cpu"))
        only_cuda = dist.new_group(backend="cuda:gloo")
        Wire(only_cuda, 0, torch.device("cpu"))
    except ScheduleError as error:
        return backends_of(gloo), with_cpu(gloo), str(error)
    return backends_of(gloo), with_cpu(gloo), ""


def test_a_group_that_cannot_move_cpu_memory_is_refused_with_the_right_backend() -> None:
    found, wanted, message = run_world(1, backends).values[0]
    assert found["cpu"] == "gloo"
    assert wanted == "gloo"
    assert "supports cuda memory, but transfers also need cpu memory" in message
    assert "backend='gloo'" in message


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
    monkeypatch.setattr(link_module, "backends_of", lambda group: backends)
    assert link_module.with_cpu(None) == named


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
    monkeypatch.setattr(link_module, "backends_of", lambda group: backends)
    if moved is None:
        with pytest.raises(
            ScheduleError, match=r"supports cuda memory, but transfers also need cpu memory.*cpu:gloo,cuda:nccl"
        ):
            link_module.Wire(None, 1, torch.device(device))
    else:
        made = link_module.Wire(None, 1, torch.device(device))
        assert (made.device.type, made.one_queue) == (moved, one_queue)


def made_and_destroyed() -> None:
    import colonnade.engine.build  # noqa: F401  torch registers its fake backend then

    assert dist.Backend._plugins
    dist.destroy_process_group(dist.new_group(backend=with_cpu(dist.group.WORLD)))


def test_torch_says_nothing_when_the_group_of_transfers_is_destroyed() -> None:
    assert run_world(1, made_and_destroyed, env={"TORCH_DISTRIBUTED_DEBUG": "OFF"}).stderr == ("",)


def test_a_frame_holds_the_largest_message_of_the_step_before():
    size = _FrameSize()
    assert size.count(0)
    assert not size.count(8)
    assert not size.count(5)
    size.next_step()
    assert (size.count(8), size.count(9), size.bytes) == (True, False, 8)
    size.next_step()
    assert size.count(9)
    size.next_step()
    size.next_step()  # one without a message says nothing
    assert (size.count(9), size.count(10)) == (True, False)
    size.next_step()
    size.count(0)
    size.next_step()
    assert size.bytes == 10
