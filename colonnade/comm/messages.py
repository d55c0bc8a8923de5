"""Small messages between ranks outside the training step: gathered values, comparisons, and errors that either all ranks raise or
no rank.

Most callers have a ParallelContext and communicate with all of its ranks:

- `with agree(context):` raises an error of one rank on all ranks;
- `gather_from_all(value, context)` returns the JSON values of all ranks.

Before `launch`, and in a world of one rank, neither communicates. Both are based on functions for a device and a process group
(`agreed_errors`, `gather_json`, `gather_numbers`, `gather_bytes`). There are also comparisons by one small all-reduce
(`is_same_everywhere`) and a broadcast of texts through the store (`share_texts`). Values are sent as JSON; nothing is unpickled.

`HostCopy` brings the numbers that ranks decide by from a device to the host, without making the host wait for them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from colonnade.comm.torch_versions import default_store, gather_rows
from colonnade.errors import ColonnadeError, ConfigError, listed, with_users_line
from colonnade.texts import digest_of

_NOBODY = torch.iinfo(torch.int64).max
_DIFFERENCES_SHOWN = 8
_SHORT = 248
"""Bytes of a text that are sent together with its length."""


class World(Protocol):
    """The attributes of a ParallelContext that the functions of this file use."""

    @property
    def device(self) -> torch.device: ...

    @property
    def is_launched(self) -> bool: ...

    @property
    def world_size(self) -> int: ...


def is_alone(world: World) -> bool:
    """Whether there are no other ranks."""
    return not world.is_launched or world.world_size == 1


def agree(world: World) -> AbstractContextManager[Any]:
    """`agreed_errors` for all ranks: an error in the block on one rank is raised on all. Collective over the world at its end."""
    return nullcontext() if is_alone(world) else agreed_errors(world.device)


def gather_from_all(value: Any, world: World) -> list[Any]:
    """Every rank's JSON value, in rank order. Collective over the world."""
    return [json.loads(json.dumps(value))] if is_alone(world) else gather_json(value, world.device)


# --------------------------------------------------------------------------------------------------
# Values of all ranks of a process group.
# --------------------------------------------------------------------------------------------------


def message_device(device: torch.device) -> torch.device:
    """The device for tensors of a message: `device` with NCCL, else the CPU."""
    return device if dist.get_backend() == "nccl" else torch.device("cpu")


def gather_json(value: Any, device: torch.device, group: Any = None) -> list[Any]:
    """Every rank's value, in rank order, sent as JSON. One or two collectives over the group."""
    return [json.loads(content) for content in gather_bytes(json.dumps(value).encode(), device, group)]


def gather_texts(text: str, device: torch.device, group: Any = None) -> list[str]:
    """Every rank's text, in rank order. One collective over the group, two if a text is long."""
    return [content.decode() for content in gather_bytes(text.encode(), device, group)]


def gather_bytes(content: bytes, device: torch.device, group: Any = None) -> list[bytes]:
    """Every rank's bytes, in rank order. One collective over the group, two if some are long."""

    def gather_equal_sizes(piece: bytes) -> list[bytes]:
        own = torch.frombuffer(bytearray(piece), dtype=torch.uint8).to(message_device(device))
        return [bytes(row) for row in gather_rows(own, group).tolist()]

    return gather_in_pieces(content, gather_equal_sizes)


def gather_in_pieces(content: bytes, gather_equal_sizes: Callable[[bytes], list[bytes]]) -> list[bytes]:
    """Gather bytes of different lengths with a function that gathers equal lengths.

    The first call gathers the lengths and short contents, a second call the rest of long contents.
    """
    heads = gather_equal_sizes((len(content).to_bytes(8, "little") + content[:_SHORT]).ljust(8 + _SHORT))
    sizes = [int.from_bytes(head[:8], "little") for head in heads]
    longest = max(sizes) - _SHORT
    rests = gather_equal_sizes(content[_SHORT:].ljust(longest)) if longest > 0 else [b""] * len(heads)
    return [(head[8:] + rest)[:size] for head, rest, size in zip(heads, rests, sizes, strict=True)]


def gather_numbers(numbers: Sequence[int], device: torch.device, group: Any = None) -> list[list[int]]:
    """Every rank's numbers (of up to 63 bits; equally many on each), in rank order. One collective over the group."""
    own = torch.tensor([*numbers], dtype=torch.int64, device=message_device(device))
    return gather_rows(own, group).tolist()


def share_texts(key: str, text: str, senders: Iterable[int]) -> dict[int, str]:
    """Broadcast the texts of the ranks `senders` through the store of the world.

    Returns the texts by sender; `senders` must be equal on all ranks.
    """
    store = default_store()
    senders = list(senders)
    if dist.get_rank() in senders:
        store.set(f"colonnade/{key}/{dist.get_rank()}", text)
    return {sender: store.get(f"colonnade/{key}/{sender}").decode() for sender in senders}


# --------------------------------------------------------------------------------------------------
# Whether all ranks have equal values.
# --------------------------------------------------------------------------------------------------


def is_same_everywhere(number: int, device: torch.device, group: Any = None) -> bool:
    """Whether all ranks have the same number (of up to 62 bits), such as a digest. One all-reduce over the group."""
    (same,) = are_same_everywhere([number], device, group)
    return same


def are_same_everywhere(numbers: Sequence[int], device: torch.device, group: Any = None) -> list[bool]:
    """For each number (equally many on every rank), whether all ranks have the same. One all-reduce over the group."""
    # One MIN gives the minimum and, from the negated numbers, the maximum. They are equal if all numbers are.
    both = torch.tensor([*numbers, *(-number for number in numbers)], dtype=torch.int64, device=message_device(device))
    dist.all_reduce(both, op=dist.ReduceOp.MIN, group=group)
    lowest, highest = both.view(2, -1).tolist()
    return [low == -high for low, high in zip(lowest, highest, strict=True)]


# --------------------------------------------------------------------------------------------------
# Errors that all ranks raise, or none.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MustMatch:
    """A table of named texts that must be equal, in the same order, on all ranks with the same value of `part`.

    Attributes:
        what: The noun in the error "the ranks do not agree on `what` 'name'".
        items: The texts by name.
        advice: The next step for the user, the last sentence of the error.
        error: The class of the error.
        part: The number of the subset of ranks that are compared with each other, such as the pipeline stage.
        shown: If the texts in `items` are digests of long texts: a function that returns the long texts, for the error.
    """

    what: str
    items: Mapping[str, str]
    advice: str
    error: type[ColonnadeError] = ConfigError
    part: int = 0
    shown: Callable[[], Mapping[str, str]] | None = None


@dataclass
class Agreement:
    """The tables that a block of `agreed_errors` compares between ranks at its end.

    Attributes:
        parts: For each table that the block will require, the number of subsets of ranks (`MustMatch.part`). Given in advance,
            because ranks that fail before they have made their tables need these numbers, too.
        tables: The tables, from `require`.
        sizes: After the block, for each table the number of items in each subset of ranks.
    """

    parts: Sequence[int] = ()
    tables: list[MustMatch] = field(default_factory=list)
    sizes: list[list[int]] = field(default_factory=list)

    def require(self, *tables: MustMatch) -> None:
        """Register tables for comparison at the end of the block, where every rank raises if a table differs between ranks."""
        self.tables += tables


@contextmanager
def agreed_errors(device: torch.device, parts: Sequence[int] = (), group: Any = None) -> Iterator[Agreement]:
    """Run start-up checks that may fail on some ranks only; then raise on all ranks or on none, so that no rank waits in vain.

    Collective over the world (or `group`) at the end of the block, which also compares the tables that the block requires. Ranks
    whose own checks passed raise the error of the first failed rank, with its number. The block should not communicate: a rank
    that fails inside it proceeds directly to its end.

    Args:
        device: The device of this rank.
        parts: For each table that the block requires, the number of parts of the ranks (`Agreement.parts`).
        group: The process group; by default the world.
    """
    agreement = Agreement(parts)
    failure: Exception | None = None
    try:
        yield agreement
    except Exception as error:
        failure = error

    # One MIN over all ranks: the first row is -1 if any rank failed, and each part of each table has a row with the digest, its
    # negative and the number of items. The digests are equal if the minimum of the digests is their maximum. A rank leaves the
    # rows of other parts, and of tables that it did not get to, at the largest number.
    rows = [[-int(failure is not None)] + [_NOBODY] * 2, *([_NOBODY] * 3 for _ in range(sum(agreement.parts)))]
    start = 1
    for table, count in zip(agreement.tables, agreement.parts, strict=failure is None):
        digest = digest_of(json.dumps([*table.items.items()]))
        rows[start + table.part] = [digest, -digest, len(table.items)]
        start += count
    try:
        least = torch.tensor(rows, dtype=torch.int64, device=message_device(device))
        dist.all_reduce(least, op=dist.ReduceOp.MIN, group=group)
        (any_failed, *_), *found = least.tolist()
    except RuntimeError:
        if failure is not None:  # a rank has exited, but the error of this rank is the more useful one
            raise failure from None
        raise
    counts = iter([count for *_, count in found])
    agreement.sizes = [[*islice(counts, count)] for count in agreement.parts]

    # Texts are sent only after a failure or a difference, so a start without errors costs one small all-reduce.
    if any_failed < 0:
        notes = gather_texts(note_of(failure) if failure is not None else "", device, group)
        if failure is not None:
            raise failure
        everyone = dist.get_process_group_ranks(group)
        failures = [(rank, note) for rank, note in zip(everyone, notes, strict=True) if note.strip()]
        raise error_of(failures[0][1], [rank for rank, _ in failures], dist.get_rank())
    if all(low == -high or low == _NOBODY for low, high, _ in found):
        return

    # Of the ranks with equal tables only one sends them.
    tables = agreement.tables
    shown = [table.shown() if table.shown is not None else table.items for table in tables]
    own = json.dumps([[table.part, [*items.items()]] for table, items in zip(tables, shown, strict=True)])
    digests = [digest for (digest,) in gather_numbers([digest_of(own)], device, group)]
    everyone = dist.get_process_group_ranks(group)
    senders = {digest: everyone[digests.index(digest)] for digest in digests}
    texts = share_texts(f"alike/{digest_of(repr(digests))}", own, senders.values())
    variants = {digest: json.loads(texts[rank]) for digest, rank in senders.items()}
    for at, table in enumerate(tables):
        by_rank = [(rank, *variants[digest][at]) for rank, digest in zip(everyone, digests, strict=True)]
        for part in sorted({other for _, other, _ in by_rank}):
            problems = _differences(table.what, [(rank, items) for rank, other, items in by_rank if other == part])
            if problems:
                lines = "\n  ".join(problems[:_DIFFERENCES_SHOWN])
                raise table.error(f"the ranks do not agree on {lines}\n{table.advice}", code="C005")


def note_of(error: Exception) -> str:
    """Convert an error to text that is sent to other ranks, with the line of the user's code that caused the error."""
    return f"{type(error).__name__}\n{with_users_line(error)}"


def error_of(note: str, ranks: Iterable[int], here: int) -> ColonnadeError:
    """Convert a text from `note_of` to the error that rank `here` raises after `ranks` have failed."""
    kind, _, text = note.partition("\n")
    ranks = tuple(ranks)
    where = f"on rank {listed(ranks)} (this rank is {here})"
    known = next((known for known in _subclasses(ColonnadeError) if known.__name__ == kind), None)
    text_here = f"{where}: {text}" if known is not None else f"{where}: {kind}: {text}"
    kind_of = known or ColonnadeError
    error = kind_of.__new__(kind_of)
    ColonnadeError.__init__(error, text_here, ranks=ranks)  # directly, because subclasses may take other arguments
    return error


def _differences(what: str, tables: Sequence[tuple[int, list[tuple[str, str]]]]) -> list[str]:
    """A line for each name whose text differs from the text of the first rank; or, if only the order differs, a line for the
    first difference.
    """
    by_rank = [(rank, dict(items)) for rank, items in tables]
    rank, first = by_rank[0]
    found = []
    for name in dict.fromkeys(name for _, items in by_rank for name in items):
        text = first.get(name, "nothing")
        apart = [(other, items.get(name, "nothing")) for other, items in by_rank if items.get(name, "nothing") != text]
        if apart:
            ranks = listed([other for other, _ in apart[:16]] + ["..."] * (len(apart) > 16))
            found.append(
                f"{what} {name!r}: {text} on rank {rank}, {apart[0][1]} on rank {apart[0][0]} "
                f"(differing from rank {rank}: {ranks})"
            )
    if not found:
        for other, items in by_rank:
            moved = next((pair for pair in zip(first, items, strict=True) if pair[0] != pair[1]), None)
            if moved is not None:
                return [
                    f"the order: {what} {moved[0]!r} on rank {rank} is in the place of {moved[1]!r} on rank {other}"
                ]
    return found


def _subclasses(base: type[ColonnadeError]) -> Iterator[type[ColonnadeError]]:
    for known in base.__subclasses__():
        yield known
        yield from _subclasses(known)


HOST_COPY_DELAY = 2
"""Number of steps after which ranks read values that they all decide by. By then the copies have usually arrived, and the step is
the same on every rank, while `HostCopy.ready` may differ between ranks."""


class HostCopy:
    """A host copy of the current values of a small tensor. Reading waits only for device work enqueued before the copy."""

    def __init__(self, tensor: Tensor) -> None:
        self._done: torch.cuda.Event | None = None
        self._arrived = not tensor.is_cuda
        if tensor.is_cuda:
            self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True, device="cpu")
            self._copy.copy_(tensor.detach(), non_blocking=True)
            self._done = torch.cuda.Event()
            self._done.record()
        else:
            self._copy = tensor.detach().clone()

    @property
    def on_host(self) -> bool:
        """Whether the original tensor is on the host, so that no copy is needed."""
        return self._done is None

    def ready(self) -> bool:
        """Whether `read` returns without waiting."""
        if not self._arrived and self._done is not None:
            self._arrived = self._done.query()
        return self._arrived

    def read(self) -> Any:
        """The value as a number or a list."""
        if not self._arrived and self._done is not None:
            self._done.synchronize()
            self._arrived = True
        return self._copy.tolist()
