"""A tensor on its way into a file, its bytes, and what the format calls its type. Needs no safetensors."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from colonnade.checkpoint.format.manifest import WIDTHS, TensorRecord
from colonnade.errors import CheckpointError, listed

_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
}
_TYPES = {name: dtype for dtype, name in _NAMES.items()}


@dataclass(frozen=True)
class Entry:
    """A tensor to write: its place is known before its content, which is asked for when its turn comes."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], Tensor]

    @classmethod
    def of(cls, key: str, tensor: Tensor) -> Entry:
        """The entry of a tensor that is there already."""
        return cls(key, type_name(tensor, key), tuple(tensor.shape), lambda: tensor)

    @property
    def size(self) -> int:
        """Its bytes."""
        return prod(self.shape) * WIDTHS[self.dtype]


def type_name(tensor: Tensor, what: str) -> str:
    """The format's name for the tensor's type; refuses what the format cannot hold."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        raise CheckpointError(
            f"{what} is a {tensor.device.type} tensor of {tensor.layout}; only dense ones can be saved", code="C085"
        )
    return name_of(tensor.dtype, what)


def dtype_of(record: TensorRecord) -> torch.dtype:
    """Torch's type of a saved tensor."""
    return _TYPES[record.dtype]


def memory_for(shape: Sequence[int], dtype: torch.dtype, pinned: bool = False) -> Tensor:
    """Memory of the host for stored elements, of just this dtype: inside `in_double()`, torch would make it wider."""
    with torch._C.DisableTorchFunction():
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=pinned, device="cpu")


def dtype_named(name: str) -> torch.dtype:
    """Torch's type for the format's name."""
    return _TYPES[name]


def name_of(dtype: torch.dtype, what: str = "the dtype") -> str:
    """The format's name for a type."""
    if dtype not in _NAMES:
        known = listed(str(dtype).removeprefix("torch.") for dtype in _NAMES)
        raise CheckpointError(f"{what} is {dtype}, which a checkpoint cannot hold; allowed are {known}", code="C085")
    return _NAMES[dtype]


def in_file_order(entries: Iterable[Entry]) -> list[Entry]:
    """As they lie in a file, and are read for it: the largest elements first, so that all of them are aligned."""
    return sorted(entries, key=lambda entry: (-WIDTHS[entry.dtype], entry.key))


def raw_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor's elements in row order; a copy only where they are elsewhere or out of order."""
    plain = tensor.detach().cpu().contiguous().resolve_conj().resolve_neg()
    if not plain.numel():
        return memoryview(b"")
    # By address, because a view through numpy would make numpy a requirement.
    content = (ctypes.c_ubyte * (plain.numel() * plain.element_size())).from_address(plain.data_ptr())
    content.owner = plain  # type: ignore[attr-defined]  # the memory lives as long as the view
    return memoryview(content).cast("B")
