"""Wires: one process group as a way for one kind of memory to one other rank."""

from __future__ import annotations

from datetime import timedelta
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from colonnade.engine.schedule.transfer.values import Meta
from colonnade.errors import ScheduleError, listed
from colonnade.parallel.collectives.wire import backends_of

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
