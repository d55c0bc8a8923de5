"""What lies in which dtype on this rank, and how many bytes of it there are per parameter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from colonnade.optim.zero.fsdp import dtypes_of
from colonnade.optim.zero.inner import state_dtypes
from colonnade.parallel.dtensor import local_part
from colonnade.reduce.synchroniser import Synchroniser

WEIGHTS, COMPUTED, MASTERS = "weights", "computed with", "master copies"
GRADIENTS, REDUCED, STATE = "gradients", "reduced in", "optimizer state"


@dataclass(frozen=True)
class PrecisionRow:
    """One kind of tensors: their dtypes, and the bytes that this rank keeps of them per parameter (None: none of its own)."""

    what: str
    dtypes: tuple[str, ...]
    bytes: float | None = None


@dataclass(frozen=True)
class PrecisionTable:
    """The rows, and how many parameters of the model this rank holds or has a share in."""

    parameters: int
    rows: tuple[PrecisionRow, ...]

    @property
    def bytes_per_parameter(self) -> float:
        """What this rank keeps between steps, with the gradients at the end of a backward pass."""
        return sum(row.bytes or 0.0 for row in self.rows)

    def __getitem__(self, what: str) -> PrecisionRow:
        return next(row for row in self.rows if row.what == what)

    def __str__(self) -> str:
        lines = [f"{self.parameters:,} parameters, bytes of each on this rank:"]
        for row in self.rows:
            size = "" if row.bytes is None else f"{row.bytes:8.3f}"
            lines.append(f"  {row.what:16s}{size:8s}  {', '.join(row.dtypes) or 'none'}")
        return "\n".join([*lines, f"  {'in all':16s}{self.bytes_per_parameter:8.3f}"])


def precision_table(
    model: nn.Module, optimizer: Any, synchroniser: Synchroniser, autocast: torch.dtype | None
) -> PrecisionTable:
    """From the tensors that there are.

    State comes with the first step. Before it, that of torch's own optimizers is known from a trial on a small matrix;
    others may talk to other ranks in theirs, and are not tried.
    """
    parameters = list(model.parameters())
    count = sum(parameter.numel() for parameter in parameters) or 1
    computed: list[torch.dtype] = []
    reduced: list[torch.dtype] = []
    gradients: Counter[torch.dtype] = Counter()
    for bucket in synchroniser.layout:
        dtype, reduced_in = bucket.layout.dtype, bucket.transport.reduced_in
        if bucket.keeps_gradients:
            gradients[dtype] += bucket.numel * dtype.itemsize
        if bucket.shard is not None and not (bucket.keeps_gradients and bucket.shard.flat.dtype is dtype):
            gradients[bucket.shard.flat.dtype] += bucket.shard.flat.nbytes
        reduced += [reduced_in] if reduced_in is not None else []
    for parameter in parameters:
        gathered, summed = dtypes_of(parameter)
        own = gathered or parameter.dtype
        computed.append(autocast if autocast is not None and own is not torch.float64 else own)
        if id(parameter) not in synchroniser.parameters and parameter.requires_grad:
            gradients[parameter.dtype] += local_part(parameter).nbytes
            reduced += [summed] if summed is not None else []
    return PrecisionTable(
        count,
        (
            _row(WEIGHTS, _sizes(map(local_part, parameters)), count),
            PrecisionRow(COMPUTED, _names(computed)),
            _row(MASTERS, _sizes(getattr(optimizer, "masters", ())), count),
            _row(GRADIENTS, gradients, count),
            PrecisionRow(REDUCED, _names(reduced)),
            _row(STATE, _state(optimizer), count),
        ),
    )


def _state(optimizer: Any) -> Counter[torch.dtype]:
    """Bytes of the optimizer's state by dtype; without single numbers, such as counts of steps."""
    stepped = getattr(optimizer, "stepped", optimizer)
    if not isinstance(stepped, Optimizer):
        return Counter()
    held = [value for state in stepped.state.values() for value in state.values() if isinstance(value, Tensor)]
    if held:
        return _sizes(local_part(value) for value in held if value.dim() > 0)
    sizes: Counter[torch.dtype] = Counter()
    if not type(stepped).__module__.startswith("torch.optim"):
        return sizes
    known: dict[torch.dtype, tuple[torch.dtype, ...]] = {}
    for group in stepped.param_groups:
        # Slices take no gradient from autograd; all of them are stepped on.
        for parameter in [p for p in group["params"] if p.requires_grad or stepped is not optimizer]:
            if parameter.dtype not in known:
                known[parameter.dtype] = state_dtypes(stepped, parameter.dtype)
            for dtype in known[parameter.dtype]:
                sizes[dtype] += local_part(parameter).numel() * dtype.itemsize
    return sizes


def _sizes(tensors: Iterable[Tensor]) -> Counter[torch.dtype]:
    found: Counter[torch.dtype] = Counter()
    for tensor in tensors:
        found[tensor.dtype] += tensor.nbytes
    return found


def _row(what: str, sizes: Counter[torch.dtype], count: int) -> PrecisionRow:
    return PrecisionRow(what, _names(sizes), sum(sizes.values()) / count)


def _names(dtypes: Iterable[torch.dtype]) -> tuple[str, ...]:
    return tuple(sorted({str(dtype).removeprefix("torch.") for dtype in dtypes}))
