"""Values between stages: nested containers of tensors and plain values, as a description and a frame.

A description is JSON: it can be read by anyone, compared, cached and sent, and reading it runs no code.
Tensors are named in it by dtype, shape and whether they need a gradient; their bytes travel apart, or in a frame:
one piece of memory with a header of two integers and then the tensors, each on a multiple of 64 bytes, so that it
can be used where it lies.
"""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from colonnade.errors import ScheduleError

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


# -- frames -----------------------------------------------------------------------------------------------

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
