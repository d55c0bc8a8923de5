"""Small messages between ranks: texts, JSON values, and errors that all ranks raise together."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from colonnade.comm.torch_versions import all_gather_flat, default_store
from colonnade.errors import ColonnadeError, listed

_SHORT = 248
"""So many bytes of a text travel with its length."""


def message_device(device: torch.device) -> torch.device:
    """Where tensors of a message to the world must lie: on `device` with NCCL, else on the CPU."""
    return device if dist.get_backend() == "nccl" else torch.device("cpu")


def gather_texts(text: str, device: torch.device, group: Any = None) -> list[str]:
    """Every rank's text, in rank order. One collective over the group, two where a text is long; nothing is unpickled."""

    def gather(content: bytes) -> list[bytes]:
        mine = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(message_device(device))
        everyone = mine.new_empty(dist.get_world_size(group) * mine.numel())
        all_gather_flat(everyone, mine, group=group)
        return [bytes(row) for row in everyone.view(-1, mine.numel()).tolist()]

    return [content.decode() for content in gather_in_pieces(text.encode(), gather)]


def gather_in_pieces(content: bytes, gather: Callable[[bytes], list[bytes]]) -> list[bytes]:
    """Every rank's bytes by a `gather` that takes as many from each: the lengths with what is short, then the rest."""
    heads = gather((len(content).to_bytes(8, "little") + content[:_SHORT]).ljust(8 + _SHORT))
    sizes = [int.from_bytes(head[:8], "little") for head in heads]
    longest = max(sizes) - _SHORT
    rests = gather(content[_SHORT:].ljust(longest)) if longest > 0 else [b""] * len(heads)
    return [(head[8:] + rest)[:size] for head, rest, size in zip(heads, rests, sizes, strict=True)]


def gather_json(value: Any, device: torch.device, group: Any = None) -> list[Any]:
    """Every rank's value, in rank order, sent as JSON. One collective over the group, or two."""
    return [json.loads(text) for text in gather_texts(json.dumps(value), device, group)]


def gather_numbers(number: int, device: torch.device) -> list[int]:
    """Every rank's number (of 63 bits), in rank order. One collective over the world."""
    mine = torch.tensor([number], dtype=torch.int64, device=message_device(device))
    everyone = mine.new_empty(dist.get_world_size())
    all_gather_flat(everyone, mine)
    return everyone.tolist()


def is_same_everywhere(number: int, device: torch.device) -> bool:
    """Whether all ranks say the same number (of 62 bits), such as a digest. One collective, whatever the world's size."""
    both = torch.tensor([number, -number], dtype=torch.int64, device=message_device(device))
    dist.all_reduce(both, op=dist.ReduceOp.MIN)
    return bool(both[0] == -both[1])


def share_texts(key: str, text: str, senders: Iterable[int]) -> dict[int, str]:
    """The texts of `senders` (the same on all ranks), through the store of the world: only they send anything."""
    store = default_store()
    senders = list(senders)
    if dist.get_rank() in senders:
        store.set(f"colonnade/{key}/{dist.get_rank()}", text)
    return {sender: store.get(f"colonnade/{key}/{sender}").decode() for sender in senders}


@contextmanager
def agreed_errors(device: torch.device) -> Iterator[None]:
    """Run a start-up check that may fail on some ranks only; then raise on all of them, or on none.

    So no rank waits for one that has stopped. Collective over the world at the end of the block. The ranks
    whose own check passed raise the error of the first rank that failed, with its number.
    """
    mine: ColonnadeError | None = None
    try:
        yield
    except ColonnadeError as error:
        mine = error
    failed = torch.tensor([int(mine is not None)], device=message_device(device))
    dist.all_reduce(failed)
    if not failed.item():
        return
    note = f"{type(mine).__name__}\n{mine}" if mine is not None else ""
    notes = gather_texts(note, device)
    if mine is not None:
        raise mine
    ranks = [rank for rank, text in enumerate(notes) if text.strip()]
    kind, _, text = notes[ranks[0]].partition("\n")
    raise _class_of(kind)(f"on rank {listed(ranks)} (this rank is {dist.get_rank()}): {text}")


def _class_of(name: str) -> type[ColonnadeError]:
    return next((known for known in _subclasses(ColonnadeError) if known.__name__ == name), ColonnadeError)


def _subclasses(base: type[ColonnadeError]) -> Iterator[type[ColonnadeError]]:
    for known in base.__subclasses__():
        yield known
        yield from _subclasses(known)
