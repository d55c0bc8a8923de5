"""How ranks talk beside training: values of all ranks, whether all have the same, and errors that all raise or none.

Most callers have a ParallelContext, and talk to its whole world:

- `with agree(context):` an error on one rank is raised on all of them;
- `gather_from_all(value, context)` gives everybody's JSON value.

Before `launch`, and in a world of one, both communicate nothing. Below them are the same for a device and a process group
(`agreed_errors`, `gather_json`, `gather_numbers`, `gather_bytes`), comparisons that cost one number for each rank
(`is_same_everywhere`), and a broadcast of texts through the store (`share_texts`). Values travel as JSON: nothing is unpickled.
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

from colonnade.comm.torch_versions import default_store, gather_rows
from colonnade.errors import ColonnadeError, ConfigError, listed, with_users_line
from colonnade.texts import digest_of

_NOBODY = torch.iinfo(torch.int64).max
_DIFFERENCES_SHOWN = 8
_SHORT = 248
"""So many bytes of a text travel with its length."""


class World(Protocol):
    """A ParallelContext, as far as messages need to know it."""

    @property
    def device(self) -> torch.device: ...

    @property
    def is_launched(self) -> bool: ...

    @property
    def world_size(self) -> int: ...


def is_alone(world: World) -> bool:
    """Whether there are no other ranks to talk to."""
    return not world.is_launched or world.world_size == 1


def agree(world: World) -> AbstractContextManager[Any]:
    """`agreed_errors` between all ranks: an error of the block on one rank is raised on all. Collective at its end."""
    return nullcontext() if is_alone(world) else agreed_errors(world.device)


def gather_from_all(value: Any, world: World) -> list[Any]:
    """Every rank's JSON value, in rank order. Collective over the world."""
    return [json.loads(json.dumps(value))] if is_alone(world) else gather_json(value, world.device)


# --------------------------------------------------------------------------------------------------
# Values of all ranks of a process group.
# --------------------------------------------------------------------------------------------------


def message_device(device: torch.device) -> torch.device:
    """Where tensors of a message to the world must lie: on `device` with NCCL, else on the CPU."""
    return device if dist.get_backend() == "nccl" else torch.device("cpu")


def gather_json(value: Any, device: torch.device, group: Any = None) -> list[Any]:
    """Every rank's value, in rank order, sent as JSON. One collective over the group, or two."""
    return [json.loads(content) for content in gather_bytes(json.dumps(value).encode(), device, group)]


def gather_texts(text: str, device: torch.device, group: Any = None) -> list[str]:
    """Every rank's text, in rank order. One collective over the group, two where a text is long."""
    return [content.decode() for content in gather_bytes(text.encode(), device, group)]


def gather_bytes(content: bytes, device: torch.device, group: Any = None) -> list[bytes]:
    """Every rank's bytes, in rank order. One collective over the group, two where some are long."""

    def gather_alike(piece: bytes) -> list[bytes]:
        mine = torch.frombuffer(bytearray(piece), dtype=torch.uint8).to(message_device(device))
        return [bytes(row) for row in gather_rows(mine, group).tolist()]

    return gather_in_pieces(content, gather_alike)


def gather_in_pieces(content: bytes, gather_alike: Callable[[bytes], list[bytes]]) -> list[bytes]:
    """Every rank's bytes by a `gather_alike` that takes as many from each: the lengths with what is short, then the rest."""
    heads = gather_alike((len(content).to_bytes(8, "little") + content[:_SHORT]).ljust(8 + _SHORT))
    sizes = [int.from_bytes(head[:8], "little") for head in heads]
    longest = max(sizes) - _SHORT
    rests = gather_alike(content[_SHORT:].ljust(longest)) if longest > 0 else [b""] * len(heads)
    return [(head[8:] + rest)[:size] for head, rest, size in zip(heads, rests, sizes, strict=True)]


def gather_numbers(numbers: Sequence[int], device: torch.device, group: Any = None) -> list[list[int]]:
    """Every rank's numbers (of 63 bits; as many on each), in rank order. One collective over the group."""
    mine = torch.tensor([*numbers], dtype=torch.int64, device=message_device(device))
    return gather_rows(mine, group).tolist()


def share_texts(key: str, text: str, senders: Iterable[int]) -> dict[int, str]:
    """The texts of `senders` (the same on all ranks), through the store of the world: only they send anything."""
    store = default_store()
    senders = list(senders)
    if dist.get_rank() in senders:
        store.set(f"colonnade/{key}/{dist.get_rank()}", text)
    return {sender: store.get(f"colonnade/{key}/{sender}").decode() for sender in senders}


# --------------------------------------------------------------------------------------------------
# Whether all ranks have the same.
# --------------------------------------------------------------------------------------------------


def is_same_everywhere(number: int, device: torch.device, group: Any = None) -> bool:
    """Whether all ranks say the same number (of 62 bits), such as a digest. One collective, whatever the group's size."""
    (same,) = are_same_everywhere([number], device, group)
    return same


def are_same_everywhere(numbers: Sequence[int], device: torch.device, group: Any = None) -> list[bool]:
    """For each number, as many on every rank, whether all ranks say the same. One collective."""
    # The least number and the least of the negatives, which is the greatest number, are equal where all numbers are.
    both = torch.tensor([*numbers, *(-number for number in numbers)], dtype=torch.int64, device=message_device(device))
    dist.all_reduce(both, op=dist.ReduceOp.MIN, group=group)
    lowest, highest = both.view(2, -1).tolist()
    return [low == -high for low, high in zip(lowest, highest, strict=True)]


# --------------------------------------------------------------------------------------------------
# Errors that all ranks raise, or none.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Alike:
    """Named texts that must be the same, in the same order, on all ranks that give the same `part`.

    The error says "the ranks do not agree on `what` 'name'", two of the texts with their ranks, and `advice`. Where
    the texts are long, `items` may hold short ones that stand for them; `shown` gives them when something differs.
    """

    what: str
    items: Mapping[str, str]
    advice: str
    error: type[ColonnadeError] = ConfigError
    part: int = 0
    shown: Callable[[], Mapping[str, str]] | None = None


@dataclass
class Agreement:
    """The tables that must be alike on all ranks, given before a block of `agreed_errors` ends.

    `parts` has an entry for each `Alike` that the block requires: into how many parts it divides the ranks. After the
    block, `sizes` tells for each how many items each part has.
    """

    parts: Sequence[int] = ()
    tables: list[Alike] = field(default_factory=list)
    sizes: list[list[int]] = field(default_factory=list)

    def require(self, *tables: Alike) -> None:
        """Raise on every rank, at the end of the block, where ranks differ in this."""
        self.tables += tables


@contextmanager
def agreed_errors(device: torch.device, parts: Sequence[int] = (), group: Any = None) -> Iterator[Agreement]:
    """Run start-up checks that may fail on some ranks only; then raise on all of them, or on none.

    So no rank waits for one that has stopped. One collective at the end of the block, over the world (or `group`); it
    also compares digests of what the block requires to be alike. The ranks whose own checks passed raise the error of
    the first rank that failed, with its number. The block itself should not communicate: a rank that fails in it goes
    straight to its end.
    """
    agreement = Agreement(parts)
    mine: Exception | None = None
    try:
        yield agreement
    except Exception as error:
        mine = error
    try:
        failed, differ = _compare(agreement, mine is not None, message_device(device), group)
    except RuntimeError:
        if mine is not None:  # a rank is gone, and what was wrong here matters more
            raise mine from None
        raise
    # Texts travel only now that something is wrong: a start without errors costs one small all-reduce.
    if failed:
        notes = gather_texts(note_of(mine) if mine is not None else "", device, group)
        if mine is not None:
            raise mine
        everyone = dist.get_process_group_ranks(group)
        failures = [(rank, note) for rank, note in zip(everyone, notes, strict=True) if note.strip()]
        raise error_of(failures[0][1], [rank for rank, _ in failures], dist.get_rank())
    if differ:
        _raise_difference(agreement.tables, device, group)


def _compare(agreement: Agreement, failed: bool, device: torch.device, group: Any) -> tuple[bool, bool]:
    """(Whether any rank failed, whether any differ), by one MIN over the ranks, of each digest and of its negative."""
    rows = [[-int(failed)] + [_NOBODY] * 2, *([_NOBODY] * 3 for _ in range(sum(agreement.parts)))]
    start = 1
    for table, parts in zip(agreement.tables, agreement.parts, strict=not failed):
        digest = digest_of(json.dumps([*table.items.items()]))
        rows[start + table.part] = [digest, -digest, len(table.items)]
        start += parts
    least = torch.tensor(rows, dtype=torch.int64, device=device)
    dist.all_reduce(least, op=dist.ReduceOp.MIN, group=group)
    (any_failed, *_), *found = least.tolist()
    counts = iter([count for *_, count in found])
    agreement.sizes = [[*islice(counts, parts)] for parts in agreement.parts]
    return any_failed < 0, any(low != -high and low != _NOBODY for low, high, _ in found)


def note_of(error: Exception) -> str:
    """An error as a text that other ranks are told, with the user's line that it began at."""
    return f"{type(error).__name__}\n{with_users_line(error)}"


def error_of(note: str, ranks: Iterable[int], here: int) -> ColonnadeError:
    """The error behind the note, as rank `here` raises it where `ranks` have failed."""
    kind, _, text = note.partition("\n")
    ranks = tuple(ranks)
    where = f"on rank {listed(ranks)} (this rank is {here})"
    known = _class_of(kind)
    text_here = f"{where}: {text}" if known is not None else f"{where}: {kind}: {text}"
    kind_of = known or ColonnadeError
    error = kind_of.__new__(kind_of)
    ColonnadeError.__init__(error, text_here, ranks=ranks)  # some classes are made of something else than a text
    return error


def _raise_difference(tables: Sequence[Alike], device: torch.device, group: Any) -> None:
    """Raise the same error on every rank. The texts travel only now, from one rank of each opinion."""
    shown = [table.shown() if table.shown is not None else table.items for table in tables]
    mine = json.dumps([[table.part, [*items.items()]] for table, items in zip(tables, shown, strict=True)])
    digests = [digest for (digest,) in gather_numbers([digest_of(mine)], device, group)]
    everyone = dist.get_process_group_ranks(group)
    speakers = {digest: everyone[digests.index(digest)] for digest in digests}
    told = share_texts(f"alike/{digest_of(repr(digests))}", mine, speakers.values())
    opinions = {digest: json.loads(told[rank]) for digest, rank in speakers.items()}
    for at, table in enumerate(tables):
        for part in sorted({opinion[at][0] for opinion in opinions.values()}):
            having = [(rank, opinions[digest][at]) for rank, digest in zip(everyone, digests, strict=True)]
            problems = _differences(table.what, [(rank, items) for rank, (theirs, items) in having if theirs == part])
            if problems:
                lines = "\n  ".join(problems[:_DIFFERENCES_SHOWN])
                raise table.error(f"the ranks do not agree on {lines}\n{table.advice}", code="C005")


def _differences(what: str, tables: Sequence[tuple[int, list[tuple[str, str]]]]) -> list[str]:
    """A line for each name whose text is another on some rank than on the first."""
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


def _class_of(name: str) -> type[ColonnadeError] | None:
    return next((known for known in _subclasses(ColonnadeError) if known.__name__ == name), None)


def _subclasses(base: type[ColonnadeError]) -> Iterator[type[ColonnadeError]]:
    for known in base.__subclasses__():
        yield known
        yield from _subclasses(known)
