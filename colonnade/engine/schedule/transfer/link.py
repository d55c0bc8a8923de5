"""Transfers between the ranks of a pipeline: values of any form and shape, in order, with errors passed on.

Every message is a description (what comes) and then the bytes of its tensors. A description that was sent before
on the same link is sent again as a number, in a header of two integers. Over gloo a steady pipeline sends one frame
per message, header and tensors together, for which the receiver has memory ready: as much as the largest message of
the last step took. What is larger follows its header tensor by tensor.

Over another backend (NCCL) headers travel on the CPU, so that no GPU is waited for to read one, and tensors beside them,
those of a message in one piece, by a group for each direction, so that both directions move at once. Where a message
had tensors of the same dtypes and shapes in the last two steps, the receiver counts on a third: it begins to receive
them before their header is there. A sender knows what the receiver counts on. If its tensors are others after all, it
fills what the receiver has begun with anything, and sends them by the CPU. So both sides begin the same in the same
order, whatever the forms are.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from colonnade.engine.schedule.actions import Action
from colonnade.engine.schedule.transfer.values import (
    Meta,
    empty_frame,
    header_of,
    layout_of,
    metas,
    pack,
    payload_bytes,
    rebuild,
    unpack,
)
from colonnade.engine.schedule.transfer.wire import Pending, Wire, wait
from colonnade.errors import ScheduleError

_SKIPPED, _NO_BATCH, _FAILED, _NEW = range(-4, 0)
"""What the first number of a header says besides "description n": after a failure, nothing comes; the sender has no batch,
or failed; a new one follows."""
_APART, _INSIDE = range(2)
"""What the second number says beside a known description: where the tensors are, after the frame or in it."""
_TENSOR, _FRAME, _TEXT, _BY_CPU = range(4)
"""The tags of what a message is made of."""
_DESCRIPTIONS_KEPT = 4096
SENDS_KEPT = 4
"""How many sends that must be over by now are still not waited for: slack for ranks slower than planned."""
_FAILURE_TIMEOUT = timedelta(seconds=10)
"""How long a failing rank waits for each sign of another one."""
_TEXT_SENT = 2000
"""How many bytes of its reason a failing rank tells."""
_ANY = Action.parse("0SENT_F0")
"""What is expected where a rank only listens whether the other one has failed."""


class PeerFailed(ScheduleError):
    """Another rank of the pipeline failed, and this one cannot go on; `no_batch` where it had none for the step."""

    no_batch = False

    def __init__(self, peer: int, text: str, no_batch: bool) -> None:
        super().__init__(f"the pipeline stopped because rank {peer} failed: {text}", ranks=(peer,))
        self.no_batch = no_batch
        self.text = text


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


class _Layouts:
    """The dtypes and shapes of the last messages of one direction. Both ends count alike."""

    def __init__(self) -> None:
        self._last: dict[Action, tuple[Meta, ...]] = {}
        self._sure: dict[Action, tuple[Meta, ...]] = {}

    def sure(self, key: Action) -> tuple[Meta, ...]:
        """What the message has if it is as its last two; empty where they differed."""
        return self._sure.get(key, ())

    def note(self, key: Action, layout: tuple[Meta, ...]) -> None:
        """This is what the message had."""
        self._sure[key] = layout if self._last.get(key) == layout else ()
        self._last[key] = layout


@dataclass
class _Expected:
    """A message that is to come: memory for its header, and its tensors if they are counted on."""

    key: Action
    frame: Tensor
    header: Pending
    layout: tuple[Meta, ...] = ()
    tensors: list[Tensor] = field(default_factory=list)
    pending: Pending = field(default_factory=list)


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
    """The channel to one other rank. Both sides must send and expect in the order of one program.

    `down`: a group for the tensors that go to the lower of the two ranks; without it, `group`.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        peer: int,
        device: torch.device,
        down: dist.ProcessGroup | None = None,
    ) -> None:
        self._peer, self._device = peer, device
        ways = (group, down or group) if peer > dist.get_rank() else (down or group, group)
        self._wire, self._wire_back = (Wire(way, peer, device) for way in ways)
        self._cpu_wire = Wire(group, peer, torch.device("cpu"))
        self._sent_numbers: dict[str, int] = {}
        self._received_descriptions: list[str] = []
        self._sent_frames, self._received_frames = _FrameSize(), _FrameSize()
        self._sent_layouts, self._received_layouts = _Layouts(), _Layouts()
        self._expected: deque[_Expected] = deque()
        self._arriving: dict[Action, _Arriving] = {}
        self._sends: dict[Action, Pending] = {}
        self._over: deque[Action] = deque()
        self._failure: Pending = []
        self._heard = self._skips = False  # that the peer has failed; whether it is told in place of a message
        self._patience: timedelta | None = None

    @property
    def one_queue(self) -> bool:
        """Whether tensors wait in queues, one for a direction, so that both sides must keep one order."""
        return self._wire.one_queue

    def send(self, key: Action, description: str, tensors: list[Tensor]) -> None:
        """Start to send a value, given by its description and its tensors; does not wait for the receiver."""
        fits = self._sent_frames.fits(payload_bytes(tensors)) and not self.one_queue
        number = self._sent_numbers.get(description)
        if number is None:
            self._sends[key] = self._send_description(description)
        else:
            header = (number, _INSIDE if fits else _APART)
            self._sends[key] = self._cpu_wire.send(pack(header, tensors if fits else ()), _FRAME)
        if number is None or not fits:
            self._sends[key] += self._send_tensors(key, tensors)

    def _send_tensors(self, key: Action, tensors: list[Tensor]) -> Pending:
        counted_on = self._counted_on(self._sent_layouts, key)
        layout = layout_of(tensors)
        self._sent_layouts.note(key, layout)
        if counted_on in ((), layout):
            return self._send_apart(tensors)
        filled = self._send_apart([self._wire.empty(meta) for meta in counted_on])
        return filled + [each for tensor in tensors for each in self._cpu_wire.send(tensor, _BY_CPU)]

    def _send_apart(self, tensors: list[Tensor]) -> Pending:
        if len(tensors) > 1 and self.one_queue:  # in one piece, since each send is a kernel
            tensors = [pack(None, tensors, self._wire.device)]
        return [each for tensor in tensors for each in self._wire.send(tensor, _TENSOR)]

    def _receive_apart(self, layout: tuple[Meta, ...]) -> tuple[list[Tensor], Pending]:
        if len(layout) > 1 and self.one_queue:
            frame = empty_frame(payload_bytes(layout), self._wire_back.device)
            return unpack(frame, layout), self._wire_back.fill(frame, _TENSOR)
        return _receive(self._wire_back, layout, _TENSOR)

    def sent(self, key: Action) -> None:
        """The receiver has used what was sent as `key`, if ranks keep to the plan: let go of it, or soon."""
        self._over.append(key)
        while len(self._over) > SENDS_KEPT:
            self._wait_sent(self._over.popleft())

    def expect(self, key: Action) -> None:
        """The next thing to come from the peer, after those expected before, is `key`."""
        with self._named_in_errors(key):
            self._expect(key)

    def _expect(self, key: Action) -> None:
        # It may come while this rank still computes; only tensors that are apart wait until its description is read.
        frame = empty_frame(0 if self.one_queue else self._received_frames.bytes)
        expected = _Expected(key, frame, self._cpu_wire.fill(frame, _FRAME))
        self._expected.append(expected)
        if not self.one_queue:
            return
        # Begun at this place of the program, before anything else: what a rank does on the device may wait for all that
        # it has sent, and so for the peer, which may wait for a third rank. Around a ring that would never end.
        expected.layout = self._counted_on(self._received_layouts, key)
        if expected.layout:
            expected.tensors, expected.pending = self._receive_apart(expected.layout)
        else:
            self._start_expected(key)

    def _counted_on(self, layouts: _Layouts, key: Action) -> tuple[Meta, ...]:
        return layouts.sure(key) if self.one_queue else ()

    def take(self, key: Action) -> Incoming:
        """Wait for `key`, which was expected, and return it."""
        with self._named_in_errors(key):
            self._start_expected(key)
            arriving = self._arriving.pop(key)
            wait(arriving.pending)
        tensors = [tensor.to(self._device) for tensor in arriving.tensors]
        return Incoming(*rebuild(arriving.description, tensors))

    def finish(self) -> None:
        """The end of a step: wait until everything sent has been received."""
        for key in list(self._sends):
            self._wait_sent(key)
        self._over.clear()
        self._sent_frames.next_step()
        self._received_frames.next_step()

    def fail(self, text: str, no_batch: bool, rank: int | None = None) -> None:
        """Start to tell the peer, in place of the next message, that this rank has failed, or has heard that `rank` has.

        Then this rank goes through the rest of its program with `skip_send` and `skip_receive`, and so does the peer once it
        has heard; `hear_out` takes the message that is one too many.
        """
        self._patience = None if no_batch else _FAILURE_TIMEOUT  # every rank comes to a step, sooner or later
        with contextlib.suppress(RuntimeError):
            told = f"{'' if rank is None else rank}\n{text}".encode()[:_TEXT_SENT]
            self._failure = self._send_bytes(_NO_BATCH if no_batch else _FAILED, told)

    def skip_send(self, key: Action) -> None:
        """Send nothing as `key`, and anything where the peer has begun to receive tensors."""
        self._skips = True
        self._failure += self._cpu_wire.send(pack((_SKIPPED, _APART)), _FRAME)
        self._send_apart([self._wire.empty(meta) for meta in self._counted_on(self._sent_layouts, key)])

    def skip_receive(self, key: Action) -> None:
        """Receive what the peer still sends as `key`, for nobody."""
        with contextlib.suppress(PeerFailed):
            self._expect(key)
        self._read_all()

    def hear_out(self) -> bool:
        """Whether the peer hears of the failure in this step; then wait until it has said so, and nothing comes any more."""
        self._read_all()
        if self._skips or self._heard:
            self.skip_receive(_ANY)
        return self._skips or self._heard

    def end_failure(self) -> None:
        """After `hear_out` on all links: wait until the peer has heard this rank too."""
        wait(self._failure, self._patience)
        self._failure, self._heard, self._skips, self._patience = [], False, False, None

    def _read_all(self) -> None:
        for expected in tuple(self._expected):
            with contextlib.suppress(PeerFailed):
                self._start_expected(expected.key)
        self._discard()

    def _discard(self) -> None:
        """Let go of what came and is not used; torch keeps memory that NCCL still fills."""
        for arriving in self._arriving.values():
            wait(arriving.pending if not self.one_queue else [], self._patience)
        self._arriving.clear()

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
        data = torch.empty(size, dtype=torch.uint8, device="cpu")
        wait(self._cpu_wire.fill(data, _TEXT), self._patience)
        text = bytes(data.tolist()).decode(errors="replace")
        if number in (_FAILED, _NO_BATCH):
            self._heard = True
            rank, _, reason = text.partition("\n")
            raise PeerFailed(int(rank) if rank else self._peer, reason, number == _NO_BATCH)
        if len(self._received_descriptions) == _DESCRIPTIONS_KEPT:
            self._received_descriptions.clear()
        self._received_descriptions.append(text)
        return text

    def _start_expected(self, until: Action) -> None:
        """Read the descriptions of what is expected, in order up to `until`, and start to receive the tensors."""
        while until not in self._arriving:
            expected = self._expected.popleft()
            wait(expected.header, self._patience)
            number, second = header_of(expected.frame)
            if number == _SKIPPED:
                self._arriving[expected.key] = _Arriving("null", [], [])
                continue
            description = self._read_description(number, second)
            found = metas(description)
            self._received_frames.fits(payload_bytes(found))
            if number >= 0 and second == _INSIDE:
                self._arriving[expected.key] = _Arriving(description, unpack(expected.frame, found), [])
                continue
            layout = layout_of(found)
            self._received_layouts.note(expected.key, layout)
            tensors, pending = expected.tensors, expected.pending
            if layout != expected.layout:
                apart = _receive(self._cpu_wire, layout, _BY_CPU) if expected.layout else self._receive_apart(layout)
                tensors, others = apart
                pending = pending + others
            self._arriving[expected.key] = _Arriving(description, tensors, pending)

    def _wait_sent(self, key: Action) -> None:
        with self._named_in_errors(key):
            wait(self._sends.pop(key, []))

    @contextlib.contextmanager
    def _named_in_errors(self, key: Action) -> Iterator[None]:
        """Name the transfer in the error, where the backend only says that something went wrong."""
        try:
            yield
        except RuntimeError as error:
            raise ScheduleError(
                f"the transfer {key} with rank {self._peer} did not end: {error}", code="C043"
            ) from error


def _receive(wire: Wire, layout: tuple[Meta, ...], tag: int) -> tuple[list[Tensor], Pending]:
    received = [wire.receive(meta, tag) for meta in layout]
    return [tensor for tensor, _ in received], [each for _, pending in received for each in pending]
