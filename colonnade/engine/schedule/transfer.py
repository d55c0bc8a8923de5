"""Transfers between the ranks of a pipeline: values of any form and shape, in order, with errors passed on.

A message goes through three layers, each with a section here:

1. A value is described (`describe`): JSON that says what comes, and its tensors apart.
2. A `Wire` is one process group as a way for one kind of memory to one other rank.
3. A `Link` is the channel to one other rank: `send` on one side, `expect` and `take` on the other, in the order of one program
   (`programs.py`); and `fail` to `end_failure`, by which both sides stop with nothing under way.

Every message is a description (what comes) and then the bytes of its tensors. A description that was sent before
on the same link is sent again as a number, in a header of two integers. Over gloo a steady pipeline sends one frame
per message, header and tensors together, for which the receiver has memory ready: as much as the largest message of
the last step took. What is larger follows its header tensor by tensor.

Over another backend (NCCL) headers travel on the CPU, so that no GPU is waited for to read one, and tensors beside them,
those of a message in one piece, by a group for each direction, so that both directions move at once. Where a message
had tensors of the same dtypes and shapes in the last two steps, the receiver predicts a third: it begins to receive
them before their header is there. A sender knows what the receiver predicts. If its tensors are others after all, it
fills what the receiver has begun with anything, and sends them by the CPU. So both sides begin the same in the same
order, whatever the forms are.
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
# A description is JSON: it can be read by anyone, compared, cached and sent, and reading it runs no code.
# Tensors are named in it by dtype, shape and whether they need a gradient; their bytes travel apart, or in a frame:
# one piece of memory with a header of two integers and then the tensors, each on a multiple of 64 bytes, so that it
# can be used where it lies.

_CPU = torch.device("cpu")
_PLAIN = (type(None), bool, int, float, str)
_TENSORS = (Tensor, nn.Parameter, nn.Buffer)


@dataclass(frozen=True)
class Meta:
    """What must be known of a tensor before its bytes come."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    requires_grad: bool


def layout_of(tensors: Iterable[Tensor | Meta]) -> tuple[Meta, ...]:
    """What memory tensors take, whether they need a gradient or not."""
    return tuple(Meta(item.dtype, tuple(item.shape), False) for item in tensors)


def describe(value: Any, name: str) -> tuple[str, list[Tensor]]:
    """The description of a nested value, and its tensors in the order of the description.

    Takes tensors, None, bool, int, float, str, and tuples, lists and dicts of them. `name` is what the
    value is called in the error for anything else.
    """
    tensors: list[Tensor] = []
    tree = _encode(value, name, tensors)
    return json.dumps(tree, separators=(",", ":")), tensors


def build(description: str, make: Callable[[Meta], Any]) -> Any:
    """The value of a description; `make` gives each tensor, in order."""
    return _decode(_tree(description), make)


@lru_cache
def metas(description: str) -> tuple[Meta, ...]:
    """The tensors of a description, in order."""
    found: list[Meta] = []
    build(description, found.append)
    return tuple(found)


def rebuild(description: str, tensors: Sequence[Tensor]) -> tuple[Any, list[Tensor]]:
    """The value of a description with these tensors in it, and those of them that need a gradient."""
    source = iter(tensors)
    value = build(description, lambda _: next(source))
    return value, [tensor for tensor, meta in zip(tensors, metas(description), strict=True) if meta.requires_grad]


def differentiable(tensors: list[Tensor]) -> list[Tensor]:
    """Those that need a gradient, in order: the ones a gradient is sent back for."""
    return [tensor for tensor in tensors if tensor.requires_grad]


@lru_cache
def _tree(description: str) -> Any:
    """The description as read; only looked at, so that it can be kept for the next time."""
    return json.loads(description)


def _encode(value: Any, name: str, tensors: list[Tensor]) -> Any:
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Tensor):
        _check_tensor(value, name)
        tensors.append(value)
        return {"tensor": [str(value.dtype).removeprefix("torch."), list(value.shape), value.requires_grad]}
    if type(value) is list:
        return [_encode(item, f"{name}[{index}]", tensors) for index, item in enumerate(value)]
    if type(value) in (tuple, torch.Size):
        return {"tuple": [_encode(item, f"{name}[{index}]", tensors) for index, item in enumerate(value)]}
    if type(value) in (dict, OrderedDict):
        return {"dict": [[_key(key, name), _encode(item, f"{name}[{key!r}]", tensors)] for key, item in value.items()]}
    raise ScheduleError(
        f"{name} is a {type(value).__name__}, which cannot go from stage to stage. Use tensors, numbers, "
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


def _key(key: Any, name: str) -> Any:
    if type(key) not in _PLAIN:
        raise ScheduleError(
            f"{name} has the key {key!r}, a {type(key).__name__}; use strings or numbers as keys of what "
            "goes from stage to stage",
            code="C053",
        )
    return key


def _check_tensor(tensor: Tensor, name: str) -> None:
    if type(tensor) not in _TENSORS or tensor.layout != torch.strided or tensor.is_quantized:
        raise ScheduleError(
            f"{name} is a {type(tensor).__name__} of layout {tensor.layout}; only plain dense tensors go "
            "from stage to stage. Convert it in the stage (a DTensor: to_local()).",
            code="C053",
        )


HEADER_BYTES = 64


def payload_bytes(tensors: Iterable[Tensor | Meta]) -> int:
    """The bytes that these tensors take in a frame; both ends count alike."""
    return sum(_padded(math.prod(item.shape) * item.dtype.itemsize) for item in tensors)


def empty_frame(payload: int, device: torch.device = _CPU) -> Tensor:
    """Memory for a frame with at most so many bytes of tensors."""
    return torch.empty(HEADER_BYTES + payload, dtype=torch.uint8, device=device)


def pack(header: tuple[int, int] | None, tensors: Sequence[Tensor] = (), device: torch.device = _CPU) -> Tensor:
    """A frame with a copy of the tensors, from wherever they are; without a header where that travels alone."""
    frame = empty_frame(payload_bytes(tensors), device)
    if header is not None:
        frame[:16].view(torch.int64).copy_(torch.tensor(header, device="cpu"))
    for place, tensor in zip(_places(frame, tensors), tensors, strict=True):
        place.copy_(tensor.detach())
    return frame


def header_of(frame: Tensor) -> tuple[int, int]:
    """The two integers of a frame that has come."""
    first, second = frame[:16].view(torch.int64).tolist()
    return first, second


def unpack(frame: Tensor, metas: Sequence[Meta]) -> list[Tensor]:
    """The tensors in a frame, in its memory."""
    # .data: each counts its own changes, or one changed in place would spoil the backward pass of the others.
    return [place.data for place in _places(frame, metas)]


def _places(frame: Tensor, tensors: Sequence[Tensor | Meta]) -> list[Tensor]:
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
"""Work that is under way, each with the memory that it needs."""


class Wire:
    """One process group as a way for one kind of memory to one peer: of each tag, first sent, first received."""

    def __init__(self, group: dist.ProcessGroup | None, peer: int, device: torch.device) -> None:
        backends = backends_of(group)
        # Gloo moves CPU memory only; what else there is (NCCL) moves the device's.
        self.device = device if backends.get(device.type, "gloo") != "gloo" else torch.device("cpu")
        if self.device.type not in backends:
            raise ScheduleError(
                f"the process group for transfers moves {listed(backends)} memory, but {self.device.type} must "
                f"be moved too. Create it with backend='{with_cpu(group)}'.",
                code="C051",
            )
        self.one_queue = backends[self.device.type] != "gloo"
        """Whether what is sent and received, of every tag, shares one queue."""
        self._group = group
        self._peer = peer

    def send(self, tensor: Tensor, tag: int) -> Pending:
        """Start to send; the result is to be kept until its work is over."""
        if tensor.numel() == 0:
            return []
        plain = tensor.detach().resolve_conj().resolve_neg().to(self.device).contiguous()
        # Not by view(-1): a tensor of one element is contiguous whatever its strides, and keeps them.
        data = plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)
        return [(_started(dist.isend(data, dst=self._peer, group=self._group, tag=tag)), data)]

    def empty(self, meta: Meta) -> Tensor:
        """Memory of this kind."""
        return torch.empty(meta.shape, dtype=meta.dtype, device=self.device)

    def receive(self, meta: Meta, tag: int) -> tuple[Tensor, Pending]:
        """Start to receive; the tensor may be used once the work is over."""
        tensor = self.empty(meta)
        return tensor, self.fill(tensor.view(-1).view(torch.uint8), tag) if tensor.numel() else []

    def fill(self, memory: Tensor, tag: int) -> Pending:
        """Start to receive bytes into `memory`; gloo may fill only a part of it."""
        return [(_started(dist.irecv(memory, src=self._peer, group=self._group, tag=tag)), memory)]


def with_cpu(group: dist.ProcessGroup | None) -> str:
    """The backends of the group and, if it has none for CPU memory, gloo: what transfers need.

    One that does for all devices goes by its plain name: of "cpu:gloo,cuda:gloo" torch makes a group without a default
    where a plugin is registered (its own fake one is), which warns when it is destroyed.
    """
    backends = {"cpu": "gloo"} | backends_of(group)
    if len(set(backends.values())) == 1:
        return backends["cpu"]
    return ",".join(f"{kind}:{backend}" for kind, backend in backends.items())


def wait(pending: Pending, at_most: timedelta | None = None) -> None:
    """Wait until all of it is over; over NCCL the device does, and the host goes on. `at_most`: for CPU memory."""
    for work, _ in pending:
        work.wait(*filter(None, [at_most]))


def _started(work: dist.Work | None) -> dist.Work:
    if work is None:
        raise ScheduleError(
            "this rank is not in the pipeline's process group; pass the group that it is in", code="C051"
        )
    return work


# --- Links ---

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
"""The key of a message that is expected only because the other rank says in it that it has failed."""


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
    """A message whose description was read and whose tensors are being received."""

    description: str
    tensors: list[Tensor]
    pending: Pending


class _Layouts:
    """The dtypes and shapes of the last messages of one direction. Both ends count alike, and so predict alike."""

    def __init__(self) -> None:
        self._last: dict[Action, tuple[Meta, ...]] = {}
        self._predicted: dict[Action, tuple[Meta, ...]] = {}

    def predicted(self, key: Action) -> tuple[Meta, ...]:
        """The layout of the message if it is that of its last two; empty where they differed."""
        return self._predicted.get(key, ())

    def note(self, key: Action, layout: tuple[Meta, ...]) -> None:
        """Record the layout that the message had."""
        self._predicted[key] = layout if self._last.get(key) == layout else ()
        self._last[key] = layout


@dataclass
class _Expected:
    """A message that is to come: memory for its header, and its tensors if they are predicted."""

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

    def count(self, payload: int) -> bool:
        """Count a message of the step; returns whether it fits into a frame."""
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
        self._sends_to_end: deque[Action] = deque()
        # After a failure: what tells the peer of it, whether the peer has told of one, and whether messages were skipped, in
        # place of which the peer is told; and how long each message is waited for.
        self._failure: Pending = []
        self._peer_failed = self._skipped = False
        self._patience: timedelta | None = None

    @property
    def one_queue(self) -> bool:
        """Whether tensors wait in queues, one for a direction, so that both sides must keep one order."""
        return self._wire.one_queue

    # --- Sending ---

    def send(self, key: Action, description: str, tensors: list[Tensor]) -> None:
        """Start to send a value, given by its description and its tensors; does not wait for the receiver."""
        fits = self._sent_frames.count(payload_bytes(tensors)) and not self.one_queue
        number = self._sent_numbers.get(description)
        if number is None:
            # Both sides number descriptions in the order in which they come, and forget all of them at the same one.
            if len(self._sent_numbers) == _DESCRIPTIONS_KEPT:
                self._sent_numbers.clear()
            self._sent_numbers[description] = len(self._sent_numbers)
            self._sends[key] = self._send_bytes(_NEW, description.encode())
        else:
            header = (number, _INSIDE if fits else _APART)
            self._sends[key] = self._cpu_wire.send(pack(header, tensors if fits else ()), _FRAME)
        if number is None or not fits:
            self._sends[key] += self._send_tensors(key, tensors)

    def _send_tensors(self, key: Action, tensors: list[Tensor]) -> Pending:
        predicted = self._predicted(self._sent_layouts, key)
        layout = layout_of(tensors)
        self._sent_layouts.note(key, layout)
        if predicted in ((), layout):
            return self._send_apart(tensors)
        # The receiver has begun to receive other tensors: they are filled with anything, and those meant go by the CPU.
        filled = self._send_apart([self._wire.empty(meta) for meta in predicted])
        return filled + [each for tensor in tensors for each in self._cpu_wire.send(tensor, _BY_CPU)]

    def _send_apart(self, tensors: list[Tensor]) -> Pending:
        if len(tensors) > 1 and self.one_queue:  # in one piece, since each send is a kernel
            tensors = [pack(None, tensors, self._wire.device)]
        return [each for tensor in tensors for each in self._wire.send(tensor, _TENSOR)]

    def _send_bytes(self, number: int, data: bytes) -> Pending:
        header = self._cpu_wire.send(pack((number, len(data))), _FRAME)
        return header + self._cpu_wire.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), _TEXT)

    def sent(self, key: Action) -> None:
        """The receiver has used what was sent as `key`, if ranks keep to the plan: let go of it, or soon."""
        self._sends_to_end.append(key)
        while len(self._sends_to_end) > SENDS_KEPT:
            self._wait_sent(self._sends_to_end.popleft())

    def _wait_sent(self, key: Action) -> None:
        with self._named_in_errors(key):
            wait(self._sends.pop(key, []))

    # --- Receiving ---

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
        expected.layout = self._predicted(self._received_layouts, key)
        if expected.layout:
            expected.tensors, expected.pending = self._receive_apart(expected.layout)
        else:
            self._read_messages(key)

    def take(self, key: Action) -> Incoming:
        """Wait for `key`, which was expected, and return it."""
        with self._named_in_errors(key):
            self._read_messages(key)
            arriving = self._arriving.pop(key)
            wait(arriving.pending)
        tensors = [tensor.to(self._device) for tensor in arriving.tensors]
        return Incoming(*rebuild(arriving.description, tensors))

    def _read_messages(self, until: Action) -> None:
        """Read the headers of what is expected, in order up to `until`, and start to receive the tensors."""
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
                # Not what was predicted: what was begun is over as well before its memory is let go.
                apart = _receive(self._cpu_wire, layout, _BY_CPU) if expected.layout else self._receive_apart(layout)
                tensors, others = apart
                pending = pending + others
            self._arriving[expected.key] = _Arriving(description, tensors, pending)

    def _read_text(self, number: int, size: int) -> str:
        """The text that follows a header: a description that is new, or the reason of a failure, which is raised."""
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

    def finish(self) -> None:
        """The end of a step: wait until everything sent has been received."""
        for key in list(self._sends):
            self._wait_sent(key)
        self._sends_to_end.clear()
        self._sent_frames.next_step()
        self._received_frames.next_step()

    @contextlib.contextmanager
    def _named_in_errors(self, key: Action) -> Iterator[None]:
        """Name the transfer in the error, where the backend only says that something went wrong."""
        try:
            yield
        except RuntimeError as error:
            raise ScheduleError(
                f"the transfer {key} with rank {self._peer} did not end: {error}", code="C043"
            ) from error

    # --- After a failure: `fail`, the rest of the program by `skip_send` and `skip_receive`, `wait_for_peer`, `end_failure` ---

    def fail(self, text: str, no_batch: bool, rank: int | None = None) -> None:
        """Start to tell the peer, in place of the next message, that this rank has failed, or that `rank` has.

        Then this rank goes through the rest of its program with `skip_send` and `skip_receive`, and so does the peer once it
        knows. The peer has one message more from this rank than its program has; `wait_for_peer` takes the one that is too many.
        """
        self._patience = None if no_batch else _FAILURE_TIMEOUT  # every rank comes to a step, sooner or later
        with contextlib.suppress(RuntimeError):
            data = f"{'' if rank is None else rank}\n{text}".encode()[:_TEXT_SENT]
            self._failure = self._send_bytes(_NO_BATCH if no_batch else _FAILED, data)

    def skip_send(self, key: Action) -> None:
        """Send nothing as `key`, and anything where the peer has begun to receive tensors."""
        self._skipped = True
        self._failure += self._cpu_wire.send(pack((_SKIPPED, _APART)), _FRAME)
        self._send_apart([self._wire.empty(meta) for meta in self._predicted(self._sent_layouts, key)])

    def skip_receive(self, key: Action) -> None:
        """Receive what the peer still sends as `key`, and drop it."""
        with contextlib.suppress(PeerFailed):
            self._expect(key)
        self._drop_expected()

    def wait_for_peer(self) -> bool:
        """Receive all that the peer still sends; returns whether both sides know of the failure, so that nothing is under way.

        The peer learns of it in this step if this rank had a message to send in place of which it was told, or if the peer has
        failed as well. Then the peer says so in one message more than its program has.
        """
        self._drop_expected()
        if self._skipped or self._peer_failed:
            self.skip_receive(_ANY)
        return self._skipped or self._peer_failed

    def end_failure(self) -> None:
        """After `wait_for_peer` on all links: wait until the peer has received the reason of this rank too."""
        wait(self._failure, self._patience)
        self._failure, self._peer_failed, self._skipped, self._patience = [], False, False, None

    def _drop_expected(self) -> None:
        for expected in tuple(self._expected):
            with contextlib.suppress(PeerFailed):
                self._read_messages(expected.key)
        # Gloo fills the memory until the work is over; torch itself keeps memory that NCCL still fills.
        for arriving in self._arriving.values():
            wait(arriving.pending if not self.one_queue else [], self._patience)
        self._arriving.clear()


def _receive(wire: Wire, layout: tuple[Meta, ...], tag: int) -> tuple[list[Tensor], Pending]:
    received = [wire.receive(meta, tag) for meta in layout]
    return [tensor for tensor, _ in received], [each for _, pending in received for each in pending]
