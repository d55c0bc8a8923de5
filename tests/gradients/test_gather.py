"""Gathers that run on into the next forward pass: for parameters that their own modules announce, and no others."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from colonnade._launch import launch
from colonnade.comm.rank_group import GroupMemory
from colonnade.context.parallel_context import ParallelContext
from colonnade.engine.build import initialize
from colonnade.gradients import gather as gather_module
from colonnade.gradients.bucket import GradientShard
from colonnade.gradients.gather import Gather, GatherAhead, give_back, send_slice
from colonnade.testing import run_world
from tests.gradients.test_values import group, values


class Reaches(nn.Module):
    """Calls one child, and uses the weight of the other without a call of it."""

    def __init__(self) -> None:
        super().__init__()
        self.called, self.reached = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.called(x), self.reached.weight, self.reached.bias)


def _late() -> tuple[set[str], set[str]]:
    """The parameters whose gather may be under way after the first step, and after the second."""
    config = {"zero": {"stage": 1, "gather_ahead": True, "bucket_mb": 0.0001}, "sync": {"shared_memory": False}}
    with launch(config, context=ParallelContext(), verbose=False) as gpc:
        model = Reaches()
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        engine = initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), context=gpc)[0]
        seen = []
        for _ in range(2):
            engine.zero_grad()
            engine.backward(engine(torch.ones(2, 8)).sum())
            engine.step()
            seen.append(
                {
                    names[id(parameter)]
                    for gather in engine.optimizer._gathers
                    for one in gather.values
                    if gather.is_under_way(one)
                    for parameter in one.bucket.parameters
                }
            )
        engine.optimizer.wait()
        engine.close()
        return seen[0], seen[1]


def test_only_parameters_that_their_module_announces_may_be_late():
    for first, second in run_world(2, _late).values:
        assert first == second == {"called.weight", "called.bias"}


def test_a_bucket_is_held_back_as_long_as_one_of_its_parameters_is_not_announced():
    model, x = Reaches(), torch.ones(2, 8)
    mixed, announced = (
        SimpleNamespace(bucket=SimpleNamespace(parameters=parameters))
        for parameters in ([model.called.weight, model.reached.weight], [model.called.bias])
    )
    waits: list[object] = []
    gather = SimpleNamespace(values=[mixed, announced], wait=lambda values=None: waits.append(values))
    ahead = GatherAhead(model, [gather])
    model(x)
    assert waits == [[mixed], [announced]]  # the module that is called waits for what it has
    waits.clear()
    ahead.hold_back()
    assert waits == [[mixed]]
    model.reached(x)
    waits.clear()
    ahead.hold_back()
    assert waits == [[]]
    waits.clear()
    state = model.state_dict()
    assert waits == [None]
    model.load_state_dict(state)  # else what is under way would come after it
    assert waits == [None, None]
    waits.clear()
    ahead.close()
    model(x)
    model.load_state_dict(model.state_dict())
    assert waits == []


class Pair:
    """Rank 1 of two, whose peer's memory lies beside its own."""

    size, index, alone, ranks, group = 2, 1, False, (0, 1), None

    def __init__(self) -> None:
        self.said: list[object] = []
        self.sockets = None

    def signal(self, payload: bytes) -> None:
        self.said.append(payload)

    def collect(self) -> None:
        self.said.append("collected")

    def exchange(self, payload: bytes) -> None:
        self.said.append((payload,))


def test_shared_slices_are_written_into_the_memory_of_all_and_that_is_told_once():
    some = [values([(40,)], torch.float32, 2, 1) for _ in range(2)]
    pair, others = Pair(), [torch.zeros_like(one.memory.own) for one in some]
    for one, other in zip(some, others, strict=True):
        one.memory = GroupMemory(one.memory.own, [other, one.memory.own])
    gather = Gather(pair, some)  # type: ignore[arg-type]
    gather.wait()
    assert pair.said == []
    for one in some:
        one.owned.fill_(7)
    gather.begin()
    assert pair.said == [b"p"]
    own = some[0].bucket.own
    assert others[0][own][: some[0].bucket.used].unique().tolist() == [7.0]
    assert not others[0][: own.start].any()
    gather.wait(some[:1])
    gather.wait()
    gather.wait()
    assert pair.said == [b"p", "collected"]


def test_whole_gradients_come_back_from_the_slices_of_all_ranks(monkeypatch):
    sent: list[float] = []

    def send(group: Pair, memory: GroupMemory, own: slice) -> object:
        sent.append(float(memory.own[own][0]))
        return SimpleNamespace(wait=lambda: memory.own.fill_(3)) if group.said == [] else None

    monkeypatch.setattr(gather_module, "send_slice", send)
    for wide in (False, True):
        pair, bucket = Pair(), values([(20,), (20,)], torch.bfloat16, 2, 1, wide=wide).bucket
        if not wide:
            bucket.shard = GradientShard(bucket.buffer.flat[bucket.own][: bucket.used])
        bucket.gradient.fill_(5)
        bucket.absent = frozenset({1})
        give_back(pair, [bucket])  # type: ignore[arg-type]
        assert sent.pop() == 5.0  # what this rank owns was in its place when it was sent
        first, second = bucket.parameters
        assert first.grad is bucket.grads[0]
        assert first.grad.unique().tolist() == [3.0]
        assert second.grad is None
        assert pair.said == []
        bucket.transport.shares_memory = True  # type: ignore[misc]
        give_back(pair, [bucket])  # type: ignore[arg-type]
        assert pair.said == [(b"g",)]


def test_a_slice_goes_nowhere_alone_and_by_a_collective_where_memory_is_not_shared(monkeypatch):
    calls: list[object] = []

    def gathered(*args: object, **named: object) -> str:
        calls.append((*args, *sorted(named.items())))
        return "work"

    monkeypatch.setattr(gather_module, "all_gather_flat", gathered)
    memory = GroupMemory(torch.zeros(4))
    assert send_slice(group(1, 0), memory, slice(0, 4)) is None
    assert calls == []
    assert send_slice(Pair(), memory, slice(2, 4)) == "work"  # type: ignore[arg-type]
    assert calls[0][0] is memory.own
    assert calls[0][2:] == (("async_op", True), ("group", None))


def test_a_gather_is_under_way_until_it_is_waited_for_and_then_the_parameters_are_the_new_ones():
    some = [values([(3,), (2, 2)], torch.bfloat16, 1, 0, wide=wide) for wide in (False, True)]  # with masters too
    gather = Gather(group(1, 0), some)
    for one in some:
        for part in one.parts:
            part.detach().fill_(7)
    gather.begin()
    assert all(gather.is_under_way(one) for one in some)
    gather.wait([some[0]])
    assert [gather.is_under_way(one) for one in some] == [False, True]
    gather.wait()
    assert not any(gather.is_under_way(one) for one in some)
    for one in some:
        assert all(torch.equal(p, torch.full_like(p, 7)) for p in one.bucket.parameters)
