"""Who speaks for whom, and which group and memory numbers take: without ranks."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from colonnade.comm.messages import is_alone
from colonnade.engine.schedule.transfer import Meta
from colonnade.trainer import records
from colonnade.trainer.records import Exchange, speaks
from tests.trainer.test_data import world


@pytest.mark.parametrize(
    ("context", "stage", "all_stages"),
    [
        (world(2), [0, 1], [0, 1]),
        (world(4, tensor=2), [0, 2], [0, 2]),
        (world(4, pipeline=2), [0, 1, 2, 3], [0, 2]),
        (world(4, pipeline=2, tensor=2), [0, 2], [0]),
        (world(8, pipeline=2, tensor=2), [0, 2, 4, 6], [0, 4]),
    ],
)
def test_the_first_rank_of_those_that_see_the_same_data_speaks(context, stage, all_stages):
    def speakers(pipeline: bool) -> list[int]:
        found = []
        for rank in range(context.world_size):
            here: Any = SimpleNamespace(layout=context.layout, get_global_rank=lambda rank=rank: rank)
            assert speaks(here) == speaks(here, pipeline=False)
            found += [rank] if speaks(here, pipeline) else []
        return found

    assert (speakers(False), speakers(True)) == (stage, all_stages)


@pytest.mark.parametrize(("launched", "size", "alone"), [(False, 4, True), (True, 1, True), (True, 2, False)])
def test_who_has_nobody_to_talk_to(launched, size, alone):
    assert is_alone(SimpleNamespace(is_launched=launched, world_size=size)) is alone  # type: ignore[arg-type]


def context(size: int) -> Any:
    waits = SimpleNamespace(during=lambda what: nullcontext())
    return SimpleNamespace(
        is_launched=True,
        world_size=size,
        waits=waits,
        get_group=lambda mode: "world",
        get_second_group=lambda mode, backend: f"{backend} group",
        device=torch.device("meta"),
    )


@pytest.mark.parametrize(("backend", "group"), [("gloo", "world"), ("nccl", "gloo group")])
def test_sums_are_made_on_the_host_and_read_when_they_are_there(monkeypatch, backend, group):
    begun: list[Any] = []

    def all_reduce(values: torch.Tensor, group: Any, async_op: bool) -> Any:
        begun.append((group, async_op, values.dtype))
        return SimpleNamespace(wait=lambda: values.mul_(2))

    monkeypatch.setattr(dist, "get_backend", lambda group: backend)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    told = Exchange(context(2))
    sums = told.start([1.0, 2.5])
    assert begun == [(group, True, torch.float64)]
    assert sums() == [2.0, 5.0]
    assert told.sum([3.0]) == [6.0]
    assert Exchange(context(1)).sum([3.0, 4.0]) == [3.0, 4.0]
    assert len(begun) == 2


class Sent(Exception):
    """What is broadcast, by which rank."""


@pytest.mark.parametrize(("backend", "device"), [("gloo", "cpu"), ("nccl", "meta")])
@pytest.mark.parametrize("is_mine", [True, False])
def test_values_travel_as_bytes_of_the_memory_that_the_backend_moves(monkeypatch, backend, device, is_mine):
    def broadcast(value: torch.Tensor, rank: int, group: Any) -> None:
        raise Sent(value.device.type, value.dtype, value.shape, rank, group)

    monkeypatch.setattr(dist, "get_backend", lambda group: backend)
    monkeypatch.setattr(dist, "broadcast", broadcast)
    mine = iter([torch.ones(2, 3)]) if is_mine else None
    with pytest.raises(Sent) as sent:
        records._shared(5, mine, context(2), Meta(torch.float32, (2, 3), False))
    assert sent.value.args == (device, torch.uint8, (24,), 5, "world")
    if device == "cpu":  # nothing is sent of a tensor without elements
        assert records._shared(5, None, context(2), Meta(torch.float32, (0, 3), False)).shape == (0, 3)


def test_sums_of_a_device_are_those_of_all_ranks(monkeypatch):
    monkeypatch.setattr(dist, "all_reduce", lambda values, group: values.mul_(10 if group == "world" else 0))
    assert records.sum_over_world(torch.ones(2), context(1)).tolist() == [1, 1]
    assert records.sum_over_world(torch.ones(2), context(2)).tolist() == [10, 10]


def test_values_of_the_ranks_that_have_one_are_gathered_in_their_order(monkeypatch):
    value = {"a": torch.ones(2), "b": 3}
    assert records.gather_values(value, True, context(1)) == [value]
    assert records.gather_values(value, False, context(1)) == []
    note = '{"dict":[["a",{"tensor":["float32",[2],false]}],["b",3]]}'
    told: list[str] = []

    def gather(mine: str, context: Any) -> list[str]:
        told.append(mine)
        return [note, "", mine]

    def shared(rank: int, mine: Any, context: Any, meta: Meta) -> Any:
        return rank, None if mine is None else next(mine), meta.shape

    monkeypatch.setattr(records, "gather_from_all", gather)
    monkeypatch.setattr(records, "_shared", shared)
    here = SimpleNamespace(**vars(context(3)), get_global_rank=lambda: 2)
    first = {"a": (0, None, (2,)), "b": 3}
    assert records.gather_values(value, True, here) == [first, {"a": (2, value["a"], (2,)), "b": 3}]  # type: ignore[arg-type]
    assert records.gather_values(value, False, here) == [first]  # type: ignore[arg-type]
    assert told == [note, ""]
