"""Communication of a comparison: records are sent to rank 0, and its result or its error to all ranks.

Values are sent as JSON and the bytes of tensors, never as pickles, so that reading them runs no code. An object is a
dataclass or a named tuple whose class the receiver has loaded already, and its fields are set without calling its
constructor.
"""

from __future__ import annotations

import dataclasses
import json
import math
import numbers
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from colonnade.checkpoint.tensor_files import raw_bytes
from colonnade.comm.groups import own_gloo
from colonnade.comm.messages import gather_from_all, message_device
from colonnade.context.parallel_context import ParallelContext
from colonnade.context.parallel_mode import ParallelMode
from colonnade.errors import ParityError


def packed(value: Any, what: str = "the value for another rank") -> bytearray:
    """Serialize a value: the length of a JSON text, the text, and the bytes of the tensors one after another.

    `what` names the value in error messages.
    """
    writer = _Writer()
    tree = writer.tree(value, what)
    metas = [[str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for tensor in writer.tensors]
    text = json.dumps([tree, metas], separators=(",", ":")).encode()
    whole = bytearray(len(text).to_bytes(8, "little") + text)
    for tensor in writer.tensors:
        whole += raw_bytes(tensor)
    return whole


def unpacked(content: bytearray) -> Any:
    """Rebuild the value from the bytes that `packed` returned, without running code that the bytes name."""
    end = 8 + int.from_bytes(content[:8], "little")
    tree, metas = json.loads(bytes(content[8:end]))
    tensors = []
    for name, shape in metas:
        dtype = _dtype(name)
        size = math.prod(shape) * dtype.itemsize
        tensor = torch.empty(shape, dtype=dtype)
        if size:
            tensor.reshape(-1).view(torch.uint8).copy_(
                torch.frombuffer(content, dtype=torch.uint8, count=size, offset=end)
            )
        tensors.append(tensor)
        end += size
    return _read(tree, tensors)


class _Writer:
    """Turns a value into JSON: strings, integers, booleans and None are unchanged; every other value becomes a list that starts
    with its kind.
    """

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self._numbers: dict[int, int] = {}
        self._kept: list[Tensor] = []

    def tree(self, value: Any, what: str) -> Any:
        if value is None or type(value) in (bool, int, str):
            return value
        if isinstance(value, numbers.Real) and not isinstance(value, numbers.Integral):  # numpy's too
            value = float(value)
            return ["float", value if math.isfinite(value) else str(value)]
        if isinstance(value, Tensor):
            # A tensor that occurs several times is sent once. It is kept, so that no other tensor gets its id.
            if id(value) not in self._numbers:
                self._numbers[id(value)] = len(self.tensors)
                self._kept.append(value)
                self.tensors.append(value if value.layout is torch.strided else value.to_dense())
            return ["tensor", self._numbers[id(value)]]
        if isinstance(value, torch.dtype):
            return ["dtype", str(value).removeprefix("torch.")]
        if isinstance(value, ParallelMode):
            return ["mode", value.name, value.value, value.data]
        if isinstance(value, dict):
            return [
                "dict",
                [[self.tree(key, what), self.tree(item, f"{what}[{key!r}]")] for key, item in value.items()],
            ]
        if isinstance(value, tuple) and hasattr(type(value), "_fields"):
            return ["named", *_name_of(value), [self.tree(item, what) for item in value]]
        for kind, known in (
            ("list", list),
            ("size", torch.Size),
            ("tuple", tuple),
            ("set", set),
            ("frozenset", frozenset),
        ):
            if isinstance(value, known):
                return [kind, [self.tree(item, f"{what}[{at}]") for at, item in enumerate(value)]]
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            there = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
            fields = [[name, self.tree(getattr(value, name), f"{what}.{name}")] for name in there]
            return ["object", *_name_of(value), fields]
        if isinstance(value, (str, numbers.Integral)):  # a subclass: an enumeration, a number of numpy
            return str(value) if isinstance(value, str) else int(value)
        raise ParityError(
            f"{what} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be sent to another rank. "
            "Values are sent as JSON and tensors, never as pickles. Use tensors, numbers, strings, and tuples, "
            "lists, dicts and dataclasses of these types.",
            code="C116",
        )


def _read(tree: Any, tensors: list[Tensor]) -> Any:
    if not isinstance(tree, list):
        return tree
    kind, *content = tree
    if kind == "float":
        return float(content[0])
    if kind == "tensor":
        return tensors[content[0]]
    if kind == "dtype":
        return _dtype(content[0])
    if kind == "mode":
        return ParallelMode.register(*content)
    if kind == "dict":
        return {_read(key, tensors): _read(item, tensors) for key, item in content[0]}
    if kind == "named":
        module, name, items = content
        return tuple.__new__(
            _loaded(module, name, lambda known: issubclass(known, tuple)), [_read(item, tensors) for item in items]
        )
    if kind == "object":
        module, name, fields = content
        made = object.__new__(_loaded(module, name, dataclasses.is_dataclass))
        for field, item in fields:
            object.__setattr__(made, field, _read(item, tensors))
        return made
    make: dict[str, Callable[[Any], Any]] = {
        "list": list, "tuple": tuple, "size": torch.Size, "set": set, "frozenset": frozenset,
    }  # fmt: skip
    return make[kind]([_read(item, tensors) for item in content[0]])


def _name_of(value: Any) -> tuple[str, str]:
    return type(value).__module__, type(value).__qualname__


def _loaded(module: str, name: str, fits: Callable[[type], bool]) -> Any:
    """The class of that name, if this process has loaded it already; nothing is imported."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if not (isinstance(found, type) and fits(found)):
        raise ParityError(
            f"another rank sent a {module}.{name}, but this rank has no dataclass or named tuple of this name. "
            "Define the class at the top level of a module that all ranks import.",
            code="C116",
        )
    return found


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ParityError(
            f"another rank sent a tensor of dtype {name!r}, but torch on this rank does not have this dtype. Use the "
            "same version of torch on all ranks.",
            code="C116",
        )
    return found


def gather_to_first(value: Any, context: ParallelContext) -> list[Any] | None:
    """Return the values of all ranks on rank 0, and None on other ranks. Collective over the world.

    Every rank raises if the value of some rank cannot be sent.
    """
    if context.world_size == 1:
        return [value]
    rank = context.get_global_rank()
    content = attempt(lambda: packed(value, f"the record of rank {rank}")) if rank else None
    error = str(content) if isinstance(content, Exception) else ""
    problems = [text for text in gather_from_all(error, context) if text]
    if problems:
        raise content if isinstance(content, Exception) else ParityError(problems[0])
    # Records are large, and only rank 0 needs them: they are sent one after another, so that rank 0 receives one at a time and
    # no other rank receives any. gloo sends CPU tensors whatever the backend of the run is.
    wires = own_gloo()
    if rank:
        assert content is not None
        wires.send([torch.tensor([len(content)])], 0, 0).wait()
        wires.send([torch.frombuffer(content, dtype=torch.uint8)], 0, 1).wait()
        return None
    found = [value]
    for other in range(1, context.world_size):
        size = torch.zeros(1, dtype=torch.int64)
        wires.recv([size], other, 0).wait()
        memory = bytearray(int(size))
        wires.recv([torch.frombuffer(memory, dtype=torch.uint8)], other, 1).wait()
        found.append(unpacked(memory))
    return found


def attempt(function: Callable[[], Any]) -> Any:
    """Call a function and return its result, or the exception that it raised."""
    try:
        return function()
    except Exception as error:
        return error


def agreed(context: ParallelContext, found: Any) -> Any:
    """Return `found` on rank 0; if it is an exception, raise it on every rank. Collective over the world."""
    problem = found if isinstance(found, Exception) else None
    if context.world_size > 1:
        message = _from_first(context, f"{type(found).__name__}: {found}" if problem is not None else None)
        if message is not None and context.get_global_rank():
            raise ParityError(f"on rank 0: {message}", code="C100", ranks=[0])
    if problem is not None:
        raise problem
    return found


def shared(context: ParallelContext, make: Callable[[], Any]) -> Any:
    """Call `make` on rank 0 and return its result on every rank; an error is raised on every rank.

    Collective over the world.
    """
    found = agreed(context, attempt(make) if context.get_global_rank() == 0 else None)
    return _from_first(context, found) if context.world_size > 1 else found


def _from_first(context: ParallelContext, value: Any) -> Any:
    """Rank 0's value on every rank. Collective over the world."""
    where, first = message_device(context.device), context.get_global_rank() == 0
    content = packed(value) if first else bytearray()
    # The receivers do not know the size, so it is sent first.
    size = torch.tensor([len(content)], dtype=torch.int64, device=where)
    dist.broadcast(size, src=0)
    memory = (
        torch.frombuffer(content, dtype=torch.uint8).to(where)
        if first
        else torch.empty(int(size), dtype=torch.uint8, device=where)
    )
    dist.broadcast(memory, src=0)
    return value if first else unpacked(bytearray(raw_bytes(memory)))
