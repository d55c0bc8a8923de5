"""The memory of this rank by use (parameters, gradients, state, ...): measured on the existing tensors, and computed from the
parallel layout."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from colonnade.engine.precision import GRADIENTS, MASTERS, STATE, WEIGHTS, PrecisionTable
from colonnade.gradients.synchroniser import Synchroniser
from colonnade.optim.engine_optimizer import EngineOptimizer
from colonnade.parallel.placement import local_part

_MB = 1 << 20


@dataclass(frozen=True)
class KindBytes:
    """Bytes of one kind of tensors, such as gradients: on the device, in host memory (offloaded), and expected from the layout."""

    device: int
    host: int
    formula: int


@dataclass(frozen=True)
class MemoryTable:
    """Bytes of this rank by use.

    `state` is the optimizer state with master weights. `other` is all other memory that is allocated now: buffers,
    memory of collectives and libraries, tensors of the user. `activations` is the peak minus everything that is allocated
    permanently: activations plus temporary buffers. `peak` is measured since the last reset of torch.cuda's peak statistics. On
    the CPU torch does not count allocations: there `other`, `activations` and `peak` are None.
    """

    device: str
    parameters: KindBytes
    gradients: KindBytes
    state: KindBytes
    other: int | None
    activations: int | None
    peak: int | None

    @property
    def held(self) -> KindBytes:
        """The sum of parameters, gradients and state."""
        kinds = (self.parameters, self.gradients, self.state)
        device, host = sum(kind.device for kind in kinds), sum(kind.host for kind in kinds)
        return KindBytes(device, host, sum(kind.formula for kind in kinds))

    def __str__(self) -> str:
        rows = {
            "parameters": self.parameters,
            "gradients": self.gradients,
            "optimizer state": self.state,
            "together": self.held,
        }
        more = {"other": self.other, "activations": self.activations, "peak": self.peak}
        return "\n".join(
            [
                f"{'MiB on ' + self.device:18s}{'here':>12s}{'on the host':>14s}{'formula':>12s}",
                *(
                    f"  {what:16s}{kind.device / _MB:12,.1f}{kind.host / _MB:14,.1f}{kind.formula / _MB:12,.1f}"
                    for what, kind in rows.items()
                ),
                *(f"  {what:16s}{value / _MB:12,.1f}" for what, value in more.items() if value is not None),
            ]
        )


def memory_table(
    model: nn.Module,
    optimizer: EngineOptimizer,
    synchroniser: Synchroniser,
    layout: PrecisionTable,
    device: torch.device,
    reset: bool,
) -> MemoryTable:
    """Measure the memory of this rank now; `layout` has the expected bytes of each kind."""
    parameters = list(model.parameters())
    known: set[int] = set()

    def measured(tensors: Iterable[Tensor], *formulas: str) -> KindBytes:
        by_layout = sum((layout[what].bytes or 0.0) * layout.parameters for what in formulas)
        return _held(tensors, device, known, round(by_layout))

    # In this order: `known` grows with each call, and a storage counts for the first kind that uses it.
    weights = measured(parameters, WEIGHTS)
    gradients = measured(_gradients(parameters, synchroniser), GRADIENTS)
    state = measured(_state(optimizer), STATE, MASTERS)
    other = activations = peak = None
    if device.type == "cuda":
        allocated, peak = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
        other = allocated - weights.device - gradients.device - state.device
        # Gradients that have been freed since were allocated at the peak.
        gone = max(gradients.formula - gradients.device - gradients.host, 0)
        activations = max(peak - allocated - gone, 0)
        if reset:
            torch.cuda.reset_peak_memory_stats(device)
    return MemoryTable(str(device), weights, gradients, state, other, activations, peak)


def _gradients(parameters: Iterable[nn.Parameter], synchroniser: Synchroniser) -> Iterable[Tensor]:
    """All gradient memory, except buffers that buckets share in turns."""
    yield from (parameter.grad for parameter in parameters if parameter.grad is not None)
    for bucket in synchroniser.layout:
        if bucket.keeps_gradients:
            yield from (buffer.flat for buffer in bucket.buffers)
        if bucket.shard is not None:
            yield bucket.shard.flat


def _state(optimizer: EngineOptimizer) -> Iterable[Tensor]:
    yield from optimizer.masters
    if isinstance(optimizer.stepped, Optimizer):
        for state in optimizer.stepped.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


def _held(tensors: Iterable[Tensor], device: torch.device, known: set[int], formula: int) -> KindBytes:
    """The memory of the tensors.

    Each storage counts once. Storages in `known` do not count, and the counted ones are added to it.
    """
    here = host = 0
    for tensor in tensors:
        local = local_part(tensor)
        storage = local.untyped_storage()
        if storage.data_ptr() in known:
            continue
        known.add(storage.data_ptr())
        if local.device.type == device.type:
            here += storage.nbytes()
        else:
            host += storage.nbytes()
    return KindBytes(here, host, formula)
