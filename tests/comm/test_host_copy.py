"""Numbers on their way to the host: as they were, whatever becomes of them."""

from __future__ import annotations

import torch

from colonnade.comm.messages import HostCopy


def test_numbers_of_the_host_are_there_as_they_were():
    numbers = torch.tensor([1.0, 2.0], requires_grad=True)
    copy = HostCopy(numbers)
    with torch.no_grad():
        numbers.zero_()
    assert (copy.on_host, copy.ready(), copy.read()) == (True, True, [1.0, 2.0])
    assert HostCopy(torch.tensor(3)).read() == 3


class OnDevice(torch.Tensor):
    """Says that it lies on a device, and how it is copied."""

    is_cuda = True
    asked: list[object] = []

    def copy_(self, other: torch.Tensor, non_blocking: bool) -> torch.Tensor:
        self.asked.append(non_blocking)
        return super().copy_(other)


class Event:
    """Stands for an event of a device."""

    def __init__(self) -> None:
        OnDevice.asked.append(self)
        self.recorded = self.done = False

    def record(self) -> None:
        self.recorded = True

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.done = self.recorded


def test_numbers_of_a_device_are_copied_to_pinned_memory_and_read_when_they_have_come(monkeypatch):
    empty = torch.empty

    def pinned(*args: object, pin_memory: bool, **named: object) -> OnDevice:
        assert pin_memory
        return empty(*args, **named).as_subclass(OnDevice)

    monkeypatch.setattr(OnDevice, "asked", [])
    monkeypatch.setattr(torch, "empty", pinned)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    copy = HostCopy(torch.tensor([1.0, 2.0]).as_subclass(OnDevice))
    not_waited, event = OnDevice.asked
    assert not_waited is True
    assert (copy.on_host, copy.ready()) == (False, False)
    assert copy.read() == [1.0, 2.0]
    assert event.done
    assert copy.ready()
