"""Transfers between the ranks of a pipeline: values of any form and shape, in order, with errors passed on.

Every message is a description (what comes) and then the bytes of its tensors. A description that was sent before
on the same link is sent again as a number, in a header of two integers. Over gloo a steady pipeline sends one frame
per message, header and tensors together, for which the receiver has memory ready: as much as the largest message of
the last step took. What is larger, or goes over another backend (NCCL), follows its header tensor by tensor.
Descriptions travel on the CPU, and no GPU is waited for to read one.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from colonnade.engine.schedule.actions import Action
from colonnade.engine.schedule.transfer.values import (
    Meta,
    empty_frame,
    header_of,
    metas,
    pack,
    payload_bytes,
    rebuild,
    unpack,
)
from colonnade.errors import ScheduleError, listed
from colonnade.parallel.collectives.wire import backends_of

_NEW, _FAILED = -1, -2
"""What the first number of a header says besides "description n": a new one follows; the sender failed."""
_APART, _INSIDE = 0, 1
"""What the second number says beside a known description: where the tensors are, after the frame or in it."""
_TENSOR, _FRAME, _TEXT = 0, 1, 2
"""The tags of what a message is made of."""
_DESCRIPTIONS_KEPT = 4096
_SENDS_KEPT = 4
"""How many sends that must be over by now are still not waited for: slack for ranks slower than planned."""
_FAILURE_TIMEOUT = timedelta(seconds=2)
"""How long a failing rank tries to tell the others."""


Pending: TypeAlias = "list[tuple[dist.Work, Tensor]]"
"""Work that is under way, each with the memory that it needs."""


class PeerFailed(ScheduleError):
    """Another rank of the pipeline failed, and this one cannot go on."""

    def __init__(self, peer: int, text: str) -> None:
        super().__init__(f"the pipeline stopped because rank {peer} failed: {text}")
        self.peer = peer


class Wire:
    """One process group as a way for one kind of memory to one peer: of each tag, first sent, first received."""

    def __init__(self, group: dist.ProcessGroup | None, peer: int, device: torch.device) -> None:
        backends = backends_of(group)
        # Gloo moves CPU memory only; what else there is (NCCL) moves the device's.
        self.device = device if backends.get(device.type, "gloo") != "gloo" else torch.device("cpu")
        if self.device.type not in backends:
            raise ScheduleError(
                f"the process group for transfers moves {listed(backends)} memory, but {self.device.type} must "
                f"be moved too. Create it with backend='{with_cpu(group)}'."
            )
        self.one_queue = backends[self.device.type] != "gloo"
        self._group = group
        self._peer = peer

    def send(self, tensor: Tensor, tag: int) -> Pending:
        """Start to send; the result is to be kept until its work is over."""
        if tensor.numel() == 0:
            return []
        plain = tensor.detach().resolve_conj().resolve_neg().to(self.device).contiguous()
        data = plain.view(-1).view(torch.uint8)
        return [(_started(dist.isend(data, dst=self._peer, group=self._group, tag=tag)), data)]

    def receive(self, meta: Meta, tag: int) -> tuple[Tensor, Pending]:
        """Start to receive; the tensor may be used once the work is over."""
        tensor = torch.empty(meta.shape, dtype=meta.dtype, device=self.device)
        return tensor, self.fill(tensor.view(-1).view(torch.uint8), tag) if tensor.numel() else []

    def fill(self, memory: Tensor, tag: int) -> Pending:
        """Start to receive bytes into `memory`; gloo may fill only a part of it."""
        return [(_started(dist.irecv(memory, src=self._peer, group=self._group, tag=tag)), memory)]


def with_cpu(group: dist.ProcessGroup | None) -> str:
    """The backends of the group and, if it has none for CPU memory, gloo: what transfers need."""
    return ",".join(f"{kind}:{backend}" for kind, backend in ({"cpu": "gloo"} | backends_of(group)).items())


def _wait(pending: Pending) -> None:
    for work, _ in pending:
        work.wait()


def _started(work: dist.Work | None) -> dist.Work:
    if work is None:
        raise ScheduleError("this rank is not in the pipeline's process group; pass the group that it is in")
    return work


@dataclass
class Incoming:
    """A value from another stage in memory of its own, with those of its tensors that need a gradient."""

    value: Any
    need_grad: list[Tensor]


@dataclass
class _Arriving:
    description: str
    tensors: list[Tensor]
    pending: Pending


class _FrameSize:
    """How many bytes of tensors a frame of one direction may hold in this step. Both ends count alike."""

    def __init__(self) -> None:
        self.bytes = 0
        self._largest = 0

    def fits(self, payload: int) -> bool:
        """Count a message; whether it fits into a frame."""
        self._largest = max(self._largest, payload)
        return payload <= self.bytes

    def next_step(self) -> None:
        """From now on a frame holds the largest message of the step that ends."""
        # A step without a message in this direction (an evaluation) says nothing about the next.
        self.bytes, self._largest = self._largest or self.bytes, 0


class Link:
    """The channel to one other rank. Both sides must send and expect in the order of one program."""

    def __init__(self, group: dist.ProcessGroup | None, peer: int, device: torch.device) -> None:
        self._peer, self._device = peer, device
        self._wire = Wire(group, peer, device)
        self._cpu_wire = Wire(group, peer, torch.device("cpu"))
        self._sent_numbers: dict[str, int] = {}
        self._received_descriptions: list[str] = []
        self._sent_frames, self._received_frames = _FrameSize(), _FrameSize()
        self._expected: deque[tuple[Action, Tensor, Pending]] = deque()
        self._arriving: dict[Action, _Arriving] = {}
        self._sends: dict[Action, Pending] = {}
        self._over: deque[Action] = deque()

    @property
    def one_queue(self) -> bool:
        """Whether tensors of both directions share one queue, so that both sides must keep one order."""
        return self._wire.one_queue

    def send(self, key: Action, description: str, tensors: list[Tensor]) -> None:
        """Start to send a value, given by its description and its tensors; does not wait for the receiver."""
        if self.one_queue:
            self._start_expected()
        fits = self._sent_frames.fits(payload_bytes(tensors)) and not self.one_queue
        number = self._sent_numbers.get(description)
        if number is None:
            self._sends[key] = self._send_description(description)
        else:
            header = (number, _INSIDE if fits else _APART)
            self._sends[key] = self._cpu_wire.send(pack(header, tensors if fits else ()), _FRAME)
        for tensor in tensors if number is None or not fits else ():
            self._sends[key] += self._wire.send(tensor, _TENSOR)

    def sent(self, key: Action) -> None:
        """The receiver has used what was sent as `key`, if ranks keep to the plan: let go of it, or soon."""
        self._over.append(key)
        while len(self._over) > _SENDS_KEPT:
            self._wait_sent(self._over.popleft())

    def expect(self, key: Action) -> None:
        """The next thing to come from the peer, after those expected before, is `key`."""
        # It may come while this rank still computes; only tensors that are apart wait until its description is read.
        frame = empty_frame(0 if self.one_queue else self._received_frames.bytes)
        self._expected.append((key, frame, self._cpu_wire.fill(frame, _FRAME)))

    def take(self, key: Action) -> Incoming:
        """Wait for `key`, which was expected, and return it."""
        with self._named_in_errors(key):
            self._start_expected(key)
            arriving = self._arriving.pop(key)
            _wait(arriving.pending)
        tensors = [tensor.to(self._device) for tensor in arriving.tensors]
        return Incoming(*rebuild(arriving.description, tensors))

    def finish(self) -> None:
        """The end of a step: wait until everything sent has been received."""
        for key in list(self._sends):
            self._wait_sent(key)
        self._over.clear()
        self._sent_frames.next_step()
        self._received_frames.next_step()

    def fail(self, text: str) -> Callable[[], None]:
        """Start to tell the peer, as the last thing it hears, that this rank has failed.

        Call the result to wait for it; a peer that does not listen is given up.
        """
        sends: Pending = []
        with contextlib.suppress(RuntimeError):
            sends = self._send_bytes(_FAILED, text.encode()[:2000])

        def end() -> None:
            with contextlib.suppress(RuntimeError):
                for work, _ in sends:
                    work.wait(_FAILURE_TIMEOUT)

        return end

    def _send_description(self, description: str) -> Pending:
        if len(self._sent_numbers) == _DESCRIPTIONS_KEPT:
            self._sent_numbers.clear()
        self._sent_numbers[description] = len(self._sent_numbers)
        return self._send_bytes(_NEW, description.encode())

    def _send_bytes(self, number: int, data: bytes) -> Pending:
        header = self._cpu_wire.send(pack((number, len(data))), _FRAME)
        return header + self._cpu_wire.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), _TEXT)

    def _read_description(self, number: int, size: int) -> str:
        if number >= 0:
            return self._received_descriptions[number]
        data, pending = self._cpu_wire.receive(Meta(torch.uint8, (size,), False), _TEXT)
        _wait(pending)
        text = bytes(data.tolist()).decode(errors="replace")
        if number == _FAILED:
            raise PeerFailed(self._peer, text)
        if len(self._received_descriptions) == _DESCRIPTIONS_KEPT:
            self._received_descriptions.clear()
        self._received_descriptions.append(text)
        return text

    def _start_expected(self, until: Action | None = None) -> None:
        """Read the descriptions of what is expected, in order, and start to receive the tensors."""
        while self._expected and until not in self._arriving:
            key, frame, pending = self._expected.popleft()
            _wait(pending)
            number, second = header_of(frame)
            description = self._read_description(number, second)
            expected = metas(description)
            self._received_frames.fits(payload_bytes(expected))
            if number >= 0 and second == _INSIDE:
                self._arriving[key] = _Arriving(description, unpack(frame, expected), [])
                continue
            arriving = self._arriving[key] = _Arriving(description, [], [])
            for meta in expected:
                tensor, pending = self._wire.receive(meta, _TENSOR)
                arriving.tensors.append(tensor)
                arriving.pending += pending

    def _wait_sent(self, key: Action) -> None:
        with self._named_in_errors(key):
            _wait(self._sends.pop(key, []))

    @contextlib.contextmanager
    def _named_in_errors(self, key: Action) -> Iterator[None]:
        """Name the transfer in the error, where the backend only says that something went wrong."""
        try:
            yield
        except RuntimeError as error:
            raise ScheduleError(f"the transfer {key} with rank {self._peer} did not end: {error}") from error
