"""Both ends of a link in one process: memory is filled only when it is waited for, and a wait that would not end is an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from colonnade.engine.schedule import transfer
from colonnade.engine.schedule.transfer import Link
from colonnade.errors import ScheduleError

CPU = torch.device("cpu")


def ends(monkeypatch: pytest.MonkeyPatch, group: Any = None, down: Any = None) -> list[Link]:
    made = []
    for rank in (0, 1):
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        made.append(Link(group, 1 - rank, CPU, down))
    return made


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
