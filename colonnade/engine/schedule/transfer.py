"""Sends and receives between pipeline ranks: nested values of any shape, in order, with errors relayed to the peer.

Three layers, each with a section here:

1. `describe` converts a value to a description (JSON: structure, dtypes, shapes) and the list of its tensors.
2. A `Wire` sends and receives the memory of one kind of device to one peer, in one process group.
3. A `Link` is the channel to one peer: `send` on one side, `expect` and `take` on the other, both in the order of one program
   (`replay.add_transfers`). From `fail` to `end_failure` it ends a step on both sides with no message in flight.

A message is a header of two integers, followed by the data that the header announces. The integers are:

    number >= 0, APART     a known description; its tensors follow, one send each
    number >= 0, INSIDE    a known description; its tensors are in the same frame as the header
    NEW, bytes             a new description: its text follows, then its tensors. Both sides number descriptions alike
    FAILED, bytes          the sender has failed: the reason follows
    NO_BATCH, bytes        the sender has no batch for this step: the reason follows
    SKIPPED                nothing: the sender has failed earlier in this step

Over gloo a steady pipeline sends one frame per message, header and tensors together. The receiver has memory for it posted in
advance: enough for the largest message of the previous step. A larger message follows its header, tensor by tensor.

Over a backend with a queue (NCCL) headers travel on the CPU, because reading one from the GPU would make the host wait. The
tensors of a message travel on the device in one piece, in one group per direction, so that both directions move at once. If a
message had tensors of the same dtypes and shapes in the last two steps, the receiver predicts the same for this step, and posts the
receive before the header has arrived. The sender makes the same prediction. If its tensors differ from the prediction, the sender
sends arbitrary data into the posted receive, and the actual tensors over the CPU. So in every case both sides start the same NCCL
operations in the same order.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import lru_cache
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from colonnade.engine.schedule.actions import Action
from colonnade.errors import ScheduleError, listed
from colonnade.parallel.wire import backends_of

# --- Values between stages, as a description and a frame ---
#
# A description is JSON: comparable, cacheable, and read without running code. It has dtype, shape and requires_grad of
# each tensor. A frame is one piece of memory with a header of two integers and then the tensors, each
# aligned to 64 bytes, so that the receiver can use them in place.

_CPU = torch.device("cpu")
_PLAIN = (type(None), bool, int, float, str)
_TENSORS = (Tensor, nn.Parameter, nn.Buffer)


@dataclass(frozen=True)
class Meta:
    """The description of one tensor (dtype, shape, requires_grad), by which memory is allocated before its bytes arrive."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    requires_grad: bool


def layout_of(tensors: Iterable[Tensor | Meta]) -> tuple[Meta, ...]:
    """The dtypes and shapes of tensors, without `requires_grad`, which does not change the number of bytes."""
    return tuple(Meta(item.dtype, tuple(item.shape), False) for item in tensors)


def describe(value: Any, name: str) -> tuple[str, list[Tensor]]:
    """Convert a nested value to (its description as text, its tensors in the order of the description). `build` is the inverse.

    Args:
        value: Tensors, None, bool, int, float, str, and tuples, lists and dicts of them.
        name: The name of the value in an error message.

    Raises:
        ScheduleError: If the value contains anything else.
    """
    tensors: list[Tensor] = []
    return json.dumps(_encode(value, name, tensors), separators=(",", ":")), tensors


def build(description: str, make: Callable[[Meta], Any]) -> Any:
    """Build a nested value from its description; each tensor is the result of `make(meta)`, called in the order of the
    description."""
    return _decode(_parsed(description), make)


@lru_cache
def metas(description: str) -> tuple[Meta, ...]:
    """The `Meta` of every tensor in a description, in order."""
    found: list[Meta] = []
    build(description, found.append)
    return tuple(found)


def rebuild(description: str, tensors: Sequence[Tensor]) -> tuple[Any, list[Tensor]]:
    """Build a nested value from its description and its tensors. Returns the value, and the tensors that need a gradient."""
    source = iter(tensors)
    value = build(description, lambda _: next(source))
    return value, [tensor for tensor, meta in zip(tensors, metas(description), strict=True) if meta.requires_grad]


def differentiable(tensors: list[Tensor]) -> list[Tensor]:
    """The tensors that need a gradient, in order. The next stage sends back one gradient for each of these tensors."""
    return [tensor for tensor in tensors if tensor.requires_grad]


@lru_cache
def _parsed(description: str) -> Any:
    """The description as Python objects. They are cached: do not change them."""
    return json.loads(description)


def _encode(value: Any, name: str, tensors: list[Tensor]) -> Any:
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Tensor):
        if type(value) not in _TENSORS or value.layout != torch.strided or value.is_quantized:
            raise ScheduleError(
                f"{name} is a {type(value).__name__} with layout {value.layout}. Only plain dense tensors can be "
                "sent to another stage. Convert it in the stage; for a DTensor, call to_local().",
                code="C053",
            )
        tensors.append(value)
        return {"tensor": [str(value.dtype).removeprefix("torch."), list(value.shape), value.requires_grad]}
    if type(value) is list:
        return [_encode(item, f"{name}[{index}]", tensors) for index, item in enumerate(value)]
    if type(value) in (tuple, torch.Size):
        return {"tuple": [_encode(item, f"{name}[{index}]", tensors) for index, item in enumerate(value)]}
    if type(value) in (dict, OrderedDict):
        for key in value:
            if type(key) not in _PLAIN:
                raise ScheduleError(
                    f"{name} has the key {key!r} of type {type(key).__name__}. A dict that is sent to another stage "
                    "needs strings or numbers as keys.",
                    code="C053",
                )
        # Pairs, not a JSON object, whose keys could only be strings.
        return {"dict": [[key, _encode(item, f"{name}[{key!r}]", tensors)] for key, item in value.items()]}
    raise ScheduleError(
        f"{name} is a {type(value).__name__}, which cannot be sent to another stage. Use tensors, numbers, "
        "strings, None, and plain tuples, lists and dicts of them.",
        code="C053",
    )


def _decode(tree: Any, make: Callable[[Meta], Any]) -> Any:
    if isinstance(tree, list):
        return [_decode(item, make) for item in tree]
    if not isinstance(tree, dict):
        return tree
    ((kind, content),) = tree.items()
    if kind == "tensor":
        dtype, shape, requires_grad = content
        return make(Meta(getattr(torch, dtype), tuple(shape), requires_grad))
    if kind == "tuple":
        return tuple(_decode(item, make) for item in content)
    return {key: _decode(item, make) for key, item in content}


HEADER_BYTES = 64


def payload_bytes(tensors: Iterable[Tensor | Meta]) -> int:
    """The number of bytes that these tensors take in a frame; sender and receiver compute the same number."""
    return sum(_padded(math.prod(item.shape) * item.dtype.itemsize) for item in tensors)


def empty_frame(payload: int, device: torch.device = _CPU) -> Tensor:
    """Allocate memory for a frame with up to `payload` bytes of tensors."""
    return torch.empty(HEADER_BYTES + payload, dtype=torch.uint8, device=device)


def pack(header: tuple[int, int] | None, tensors: Sequence[Tensor] = (), device: torch.device = _CPU) -> Tensor:
    """Make a frame: the header and a copy of the tensors, from any device. `header` is None if the header is sent separately."""
    frame = empty_frame(payload_bytes(tensors), device)
    if header is not None:
        frame[:16].view(torch.int64).copy_(torch.tensor(header, device="cpu"))
    for place, tensor in zip(_places(frame, tensors), tensors, strict=True):
        place.copy_(tensor.detach())
    return frame


def header_of(frame: Tensor) -> tuple[int, int]:
    """The two integers of a received frame."""
    first, second = frame[:16].view(torch.int64).tolist()
    return first, second


def unpack(frame: Tensor, metas: Sequence[Meta]) -> list[Tensor]:
    """The tensors in a frame, as views of its memory."""
    # .data: each gets its own version counter. Sharing one, an in-place change of one tensor would make autograd reject the others.
    return [place.data for place in _places(frame, metas)]


def _places(frame: Tensor, tensors: Sequence[Tensor | Meta]) -> list[Tensor]:
    """Views into the frame, one for each tensor."""
    places, start = [], HEADER_BYTES
    for item in tensors:
        size = math.prod(item.shape) * item.dtype.itemsize
        places.append(frame[start : start + size].view(item.dtype).view(item.shape))
        start += _padded(size)
    return places


def _padded(size: int) -> int:
    return -(-size // 64) * 64


# --- Wires ---

Pending: TypeAlias = "list[tuple[dist.Work, Tensor]]"
"""Sends or receives that have started, each with its memory, which must stay alive until they end."""


class Wire:
    """Sends tensors of one device type to a peer, and receives them. Messages with the same tag arrive in order."""

    def __init__(self, group: dist.ProcessGroup | None, peer: int, device: torch.device) -> None:
        backends = backends_of(group)
        # Gloo moves CPU memory only; any other backend (NCCL) moves the device's.
        self.device = device if backends.get(device.type, "gloo") != "gloo" else torch.device("cpu")
        if self.device.type not in backends:
            raise ScheduleError(
                f"the process group for transfers supports {listed(backends)} memory, but transfers also need "
                f"{self.device.type} memory. Create the group with backend='{with_cpu(group)}'.",
                code="C051",
            )
        self.one_queue = backends[self.device.type] != "gloo"
        """Whether all sends and receives share one queue, in which each waits for those before it (NCCL)."""
        self._group = group
        self._peer = peer

    def send(self, tensor: Tensor, tag: int) -> Pending:
        """Start to send `tensor`.

        The caller must keep the result until its `Work` has ended, because the result keeps the memory alive.
        """
        if tensor.numel() == 0:
            return []
        plain = tensor.detach().resolve_conj().resolve_neg().to(self.device).contiguous()
        # view(-1) would keep the strides of a one-element tensor, which counts as contiguous with any, and view(uint8) then fails.
        data = plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)
        return [(_started(dist.isend(data, dst=self._peer, group=self._group, tag=tag)), data)]

    def empty(self, meta: Meta) -> Tensor:
        """Uninitialized memory for a tensor, on the device of the wire."""
        return torch.empty(meta.shape, dtype=meta.dtype, device=self.device)

    def receive(self, meta: Meta, tag: int) -> tuple[Tensor, Pending]:
        """Start to receive a tensor. Returns (tensor, pending): the tensor is valid when the `Work` in `pending` has ended."""
        tensor = self.empty(meta)
        return tensor, self.fill(tensor.view(-1).view(torch.uint8), tag) if tensor.numel() else []

    def fill(self, memory: Tensor, tag: int) -> Pending:
        """Start to receive into `memory`. Over gloo the message may be shorter than the memory."""
        return [(_started(dist.irecv(memory, src=self._peer, group=self._group, tag=tag)), memory)]


def with_cpu(group: dist.ProcessGroup | None) -> str:
    """The backend string of a transfer group: the backends of `group`, and gloo if these do not include a backend for CPU memory.

    A backend used for all devices is returned by its plain name: from "cpu:gloo,cuda:gloo" torch makes a group without a
    default backend if a plugin is registered (its own fake one is), and that group warns when it is destroyed.
    """
    backends = {"cpu": "gloo"} | backends_of(group)
    if len(set(backends.values())) == 1:
        return backends["cpu"]
    return ",".join(f"{kind}:{backend}" for kind, backend in backends.items())


def wait(pending: Pending, at_most: timedelta | None = None) -> None:
    """Wait for the sends or receives in `pending`.

    Over NCCL only the device waits, not the host; `at_most` applies to CPU memory.
    """
    for work, _ in pending:
        work.wait(*filter(None, [at_most]))


def _started(work: dist.Work | None) -> dist.Work:
    if work is None:
        raise ScheduleError(
            "this rank is not in the given process group. Pass the pipeline group of this rank.", code="C051"
        )
    return work


# --- Links ---

# The header of a message (see the table at the top) and the tags of its parts.
_SKIPPED, _NO_BATCH, _FAILED, _NEW = range(-4, 0)
_APART, _INSIDE = range(2)
_TENSOR, _FRAME, _TEXT, _BY_CPU = range(4)
_DESCRIPTIONS_KEPT = 4096
SENDS_KEPT = 4
"""Sends that should have ended by now and are still not waited for: slack for ranks slower than planned."""
_FAILURE_TIMEOUT = timedelta(seconds=10)
"""How long a failing rank waits for each message of a peer."""
_TEXT_SENT = 2000
"""Bytes of its reason that a failing rank sends."""
_ANY = Action.parse("0SENT_F0")
"""The key of the extra message by which a peer acknowledges a failure; no transfer has this key."""


class PeerFailed(ScheduleError):
    """Raised if another rank of the pipeline failed in this step.

    `no_batch`: the other rank failed only because it had no batch.
    """

    no_batch = False

    def __init__(self, peer: int, text: str, no_batch: bool) -> None:
        super().__init__(f"the pipeline stopped because rank {peer} failed: {text}", ranks=(peer,))
        self.no_batch = no_batch
        self.text = text


@dataclass
class Incoming:
    """A value received from another stage, in separate memory, and its tensors that need a gradient."""

    value: Any
    need_grad: list[Tensor]


@dataclass
class _Arriving:
    """A message whose header was read and whose tensors are being received."""

    description: str
    tensors: list[Tensor]
    pending: Pending


class _Layouts:
    """Dtypes and shapes of the last messages in one direction. Both sides record the same, and so predict the same."""

    def __init__(self) -> None:
        self._last: dict[Action, tuple[Meta, ...]] = {}
        self._predicted: dict[Action, tuple[Meta, ...]] = {}

    def predicted(self, key: Action) -> tuple[Meta, ...]:
        """The expected layout of the message: the layout of the last two messages with the same key; empty if these two
        differed.
        """
        return self._predicted.get(key, ())

    def note(self, key: Action, layout: tuple[Meta, ...]) -> None:
        """Record the layout that the message had."""
        self._predicted[key] = layout if self._last.get(key) == layout else ()
        self._last[key] = layout


@dataclass
class _Expected:
    """A message to be received: the memory for its header or frame and, if predicted, for its tensors."""

    key: Action
    frame: Tensor
    header: Pending
    layout: tuple[Meta, ...] = ()
    tensors: list[Tensor] = field(default_factory=list)
    pending: Pending = field(default_factory=list)


class _FrameSize:
    """The room for tensors in a frame of one direction, in this step. Both sides count the same messages."""

    def __init__(self) -> None:
        self.bytes = 0
        self._largest = 0

    def count(self, payload: int) -> bool:
        """Count a message; returns whether its tensors fit into a frame."""
        self._largest = max(self._largest, payload)
        return payload <= self.bytes

    def next_step(self) -> None:
        """End the step: in the next step, a frame has room for the largest message of this step."""
        # An evaluation may send nothing in this direction; the room then stays as it is.
        self.bytes, self._largest = self._largest or self.bytes, 0


class Link:
    """The channel to one peer. Both sides must call `send` and `expect` in the order of the same program.

    Args:
        group: The process group of headers, and of tensors unless `down` is given.
        peer: The global rank of the peer.
        device: The device of received tensors.
        down: A group for tensors that are sent to the lower of the two ranks.
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
        self._sends_to_end: deque[Action] = deque()
        # Of the failure protocol: the sends of this rank's reason, whether the peer has sent one, whether this rank has
        # skipped a send since its reason (so that the peer must read it), and the limit of each wait.
        self._failure: Pending = []
        self._peer_failed = self._skipped = False
        self._patience: timedelta | None = None

    @property
    def one_queue(self) -> bool:
        """Whether the backend has a queue per direction (NCCL), so that both sides must start transfers in the same order."""
        return self._wire.one_queue

    # --- Sending ---

    def send(self, key: Action, description: str, tensors: list[Tensor]) -> None:
        """Start to send a value (see `describe`); does not wait for the receiver."""
        # The header: the description's number, or its text if the peer does not know it yet.
        fits = self._sent_frames.count(payload_bytes(tensors)) and not self.one_queue
        number = self._sent_numbers.get(description)
        if number is None:
            # The peer numbers descriptions in the order of their arrival, and forgets all of them at the same one.
            if len(self._sent_numbers) == _DESCRIPTIONS_KEPT:
                self._sent_numbers.clear()
            self._sent_numbers[description] = len(self._sent_numbers)
            self._sends[key] = self._send_bytes(_NEW, description.encode())
        else:
            header = (number, _INSIDE if fits else _APART)
            self._sends[key] = self._cpu_wire.send(pack(header, tensors if fits else ()), _FRAME)
            if fits:
                return
        # The tensors, unless they were in the frame.
        predicted, layout = self._predicted(self._sent_layouts, key), layout_of(tensors)
        self._sent_layouts.note(key, layout)
        if predicted in ((), layout):
            self._sends[key] += self._send_apart(tensors)
            return
        # The peer has posted a receive for other tensors: it gets arbitrary data, and the actual tensors over the CPU.
        self._sends[key] += self._send_apart([self._wire.empty(meta) for meta in predicted])
        self._sends[key] += [work for tensor in tensors for work in self._cpu_wire.send(tensor, _BY_CPU)]

    def _send_apart(self, tensors: list[Tensor]) -> Pending:
        if len(tensors) > 1 and self.one_queue:  # in one piece: over NCCL each send is a kernel
            tensors = [pack(None, tensors, self._wire.device)]
        return [work for tensor in tensors for work in self._wire.send(tensor, _TENSOR)]

    def _send_bytes(self, number: int, data: bytes) -> Pending:
        header = self._cpu_wire.send(pack((number, len(data))), _FRAME)
        return header + self._cpu_wire.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), _TEXT)

    def sent(self, key: Action) -> None:
        """Record that the value `key` was sent. Its memory is released now or a few sends later.

        Called at the place of the program where the peer has used the value.
        """
        self._sends_to_end.append(key)
        while len(self._sends_to_end) > SENDS_KEPT:
            self._wait_sent(self._sends_to_end.popleft())

    def _wait_sent(self, key: Action) -> None:
        with self._named_in_errors(key):
            wait(self._sends.pop(key, []))

    def finish(self) -> None:
        """End a step: wait until the peer has received all values."""
        for key in list(self._sends):
            self._wait_sent(key)
        self._sends_to_end.clear()
        self._sent_frames.next_step()
        self._received_frames.next_step()

    # --- Receiving ---

    def expect(self, key: Action) -> None:
        """Declare that `key` is the next message from the peer, after the messages that are already expected."""
        with self._named_in_errors(key):
            self._expect(key)

    def _expect(self, key: Action) -> None:
        # The header, and over gloo a frame, can arrive while this rank computes.
        frame = empty_frame(0 if self.one_queue else self._received_frames.bytes)
        expected = _Expected(key, frame, self._cpu_wire.fill(frame, _FRAME))
        self._expected.append(expected)
        if not self.one_queue:
            return
        # Over a queue the tensors must be posted here, at this place of the program, before anything else. Later device
        # work of this rank may wait for everything it has sent, and so for the peer, which may wait for a third rank;
        # around a ring that is a deadlock.
        expected.layout = self._predicted(self._received_layouts, key)
        if expected.layout:
            expected.tensors, expected.pending = self._receive_apart(expected.layout)
        else:
            self._read_messages(key)

    def take(self, key: Action) -> Incoming:
        """Wait for the expected message `key` and return its value."""
        with self._named_in_errors(key):
            self._read_messages(key)
            arriving = self._arriving.pop(key)
            wait(arriving.pending)
        tensors = [tensor.to(self._device) for tensor in arriving.tensors]
        return Incoming(*rebuild(arriving.description, tensors))

    def _read_messages(self, until: Action) -> None:
        """Read the headers of expected messages, in order up to `until`, and start to receive their tensors."""
        while until not in self._arriving:
            expected = self._expected.popleft()
            wait(expected.header, self._patience)
            number, second = header_of(expected.frame)
            if number == _SKIPPED:
                self._arriving[expected.key] = _Arriving("null", [], [])
                continue
            description = self._received_descriptions[number] if number >= 0 else self._read_text(number, second)
            found = metas(description)
            self._received_frames.count(payload_bytes(found))
            if number >= 0 and second == _INSIDE:
                self._arriving[expected.key] = _Arriving(description, unpack(expected.frame, found), [])
                continue
            layout = layout_of(found)
            self._received_layouts.note(expected.key, layout)
            tensors, pending = expected.tensors, expected.pending
            if layout != expected.layout:
                # Wrong prediction: the posted receive gets arbitrary data, and its memory must live until that has arrived.
                apart = _receive(self._cpu_wire, layout, _BY_CPU) if expected.layout else self._receive_apart(layout)
                tensors, others = apart
                pending = pending + others
            self._arriving[expected.key] = _Arriving(description, tensors, pending)

    def _read_text(self, number: int, size: int) -> str:
        """Receive the text after a header.

        It is a new description, which is returned, or the reason of a failure, which is raised.
        """
        data = torch.empty(size, dtype=torch.uint8, device="cpu")
        wait(self._cpu_wire.fill(data, _TEXT), self._patience)
        text = bytes(data.tolist()).decode(errors="replace")
        if number in (_FAILED, _NO_BATCH):
            self._peer_failed = True
            rank, _, reason = text.partition("\n")
            raise PeerFailed(int(rank) if rank else self._peer, reason, number == _NO_BATCH)
        if len(self._received_descriptions) == _DESCRIPTIONS_KEPT:
            self._received_descriptions.clear()
        self._received_descriptions.append(text)
        return text

    def _receive_apart(self, layout: tuple[Meta, ...]) -> tuple[list[Tensor], Pending]:
        if len(layout) > 1 and self.one_queue:
            frame = empty_frame(payload_bytes(layout), self._wire_back.device)
            return unpack(frame, layout), self._wire_back.fill(frame, _TENSOR)
        return _receive(self._wire_back, layout, _TENSOR)

    def _predicted(self, layouts: _Layouts, key: Action) -> tuple[Meta, ...]:
        return layouts.predicted(key) if self.one_queue else ()

    @contextlib.contextmanager
    def _named_in_errors(self, key: Action) -> Iterator[None]:
        """Add transfer and peer to an error of the backend, which names neither."""
        try:
            yield
        except RuntimeError as error:
            raise ScheduleError(
                f"the transfer {key} with rank {self._peer} did not complete: {error}", code="C043"
            ) from error

    # --- The failure protocol ---
    #
    # A failing rank calls `fail`, which sends its reason in place of its next message; then `skip_send` and `skip_receive`
    # for the rest of its program, `wait_for_peer`, and `end_failure`. The peer raises PeerFailed where it reads the reason,
    # and does the same. Since the reason is one message more than the program has, each side must read one more, too:
    # `wait_for_peer` does.

    def fail(self, text: str, no_batch: bool, rank: int | None = None) -> None:
        """Start to send the reason of a failure. `rank`: the rank that failed first; None for this rank."""
        # Without a batch there is no limit: the peers may still be busy before this step, but all of them will come to it.
        self._patience = None if no_batch else _FAILURE_TIMEOUT
        with contextlib.suppress(RuntimeError):
            data = f"{'' if rank is None else rank}\n{text}".encode()[:_TEXT_SENT]
            self._failure = self._send_bytes(_NO_BATCH if no_batch else _FAILED, data)

    def skip_send(self, key: Action) -> None:
        """Send an empty message as `key`, and arbitrary data if the peer has posted a receive for its tensors."""
        self._skipped = True
        self._failure += self._cpu_wire.send(pack((_SKIPPED, _APART)), _FRAME)
        self._send_apart([self._wire.empty(meta) for meta in self._predicted(self._sent_layouts, key)])

    def skip_receive(self, key: Action) -> None:
        """Receive the peer's message `key` and drop it."""
        with contextlib.suppress(PeerFailed):
            self._expect(key)
        self._drop_expected()

    def wait_for_peer(self) -> bool:
        """Receive all messages that the peer still sends. Returns whether the peer is informed of the failure in this step.

        Afterwards no message from the peer is in flight. The peer is informed in this step if this rank still had a message that
        it could replace by its reason, or if the peer has failed, too; in both cases the peer also sends a reason.
        """
        self._drop_expected()
        if self._skipped or self._peer_failed:
            self.skip_receive(_ANY)
        return self._skipped or self._peer_failed

    def end_failure(self) -> None:
        """Wait until the peer has received this rank's failure reason. Call it after `wait_for_peer` on all links."""
        wait(self._failure, self._patience)
        self._failure, self._peer_failed, self._skipped, self._patience = [], False, False, None

    def _drop_expected(self) -> None:
        for expected in tuple(self._expected):
            with contextlib.suppress(PeerFailed):
                self._read_messages(expected.key)
        # Gloo writes into the memory until the work has ended; memory of an unfinished NCCL receive is kept by torch.
        for arriving in self._arriving.values():
            wait(arriving.pending if not self.one_queue else [], self._patience)
        self._arriving.clear()


def _receive(wire: Wire, layout: tuple[Meta, ...], tag: int) -> tuple[list[Tensor], Pending]:
    received = [wire.receive(meta, tag) for meta in layout]
    return [tensor for tensor, _ in received], [work for _, pending in received for work in pending]
