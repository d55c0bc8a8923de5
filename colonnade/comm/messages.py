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
"""Bytes that a message of any length sends at once."""


def message_device(device: torch.device) -> torch.device:
    """Where tensors of a message to the world must lie: on `device` with NCCL, else on the CPU."""
    return device if dist.get_backend() == "nccl" else torch.device("cpu")


def gather_any_length(payload: bytes, gather: Callable[[bytes], list[bytes]]) -> list[bytes]:
    """Every rank's payload by a `gather` of equal lengths: one call of it, and a second where a payload is long."""
    heard = gather(len(payload).to_bytes(8, "little") + payload[:_SHORT].ljust(_SHORT))
    sizes = [int.from_bytes(message[:8], "little") for message in heard]
    rest = [b""] * len(heard)
    if max(sizes) > _SHORT:
        rest = gather(payload[_SHORT:].ljust(max(sizes) - _SHORT))
    return [(first[8:] + more)[:size] for first, more, size in zip(heard, rest, sizes, strict=True)]


def gather_texts(text: str, device: torch.device, group: Any = None) -> list[str]:
    """Every rank's text, in rank order. Collective over the group; nothing is unpickled."""

    def gather(payload: bytes) -> list[bytes]:
        mine = torch.frombuffer(bytearray(payload), dtype=torch.uint8).to(message_device(device))
        everyone = mine.new_empty(dist.get_world_size(group) * len(payload))
        all_gather_flat(everyone, mine, group=group)
        return [bytes(row) for row in everyone.view(-1, len(payload)).tolist()]

    return [payload.decode() for payload in gather_any_length(text.encode(), gather)]


def gather_json(value: Any, device: torch.device, group: Any = None) -> list[Any]:
    """Every rank's value, in rank order, sent as JSON. Collective over the group."""
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
