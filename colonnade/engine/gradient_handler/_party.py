"""The ranks that take part in a reduction, and the small messages between them.

Bulk data never passes here: only what ranks must agree on (are we at the same step, which gradients are
missing, does every rank see the same parameters). The messages are bytes in CPU memory whatever the device
of the gradients, so that agreeing never waits for an accelerator.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

from colonnade.engine.gradient_handler._peers import Peers, connect, host_identity
from colonnade.errors import GradientError, listed

all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""The flat all-gather under the name that this torch does not warn about."""

_Gather = Callable[[Tensor, Tensor], Any]


class Party:
    """The ranks of one group as this rank sees them. `ranks` is in group order, `index` is this rank's place."""

    def __init__(self, ranks: Sequence[int], group: dist.ProcessGroup | None) -> None:
        self.ranks = tuple(ranks) if group is None else tuple(dist.get_process_group_ranks(group))
        if set(self.ranks) != set(ranks) or (group is None and len(ranks) > 1):
            raise GradientError(f"a reduction over ranks {list(ranks)} was given the group of {list(self.ranks)}")
        self.group = group
        self.size = len(self.ranks)
        self.index = self.ranks.index(dist.get_rank()) if group is not None else 0
        self.peers: Peers | None = None
        self._gather = _cpu_gather(group, self.index, self.size) if group is not None else _gather_alone
        self._sent: tuple[bytes, Tensor, Any] | None = None

    def connect(self) -> str | None:
        """Open direct sockets to all ranks, if all are on this host; else the reason why not. Collective."""
        hosts = self.gather_objects(host_identity())
        if None in hosts:
            return f"rank {self.ranks[hosts.index(None)]} runs on a system without anonymous shared memory"
        if len(set(hosts)) > 1:
            return f"ranks {listed(self.ranks)} are on {len(set(hosts))} hosts or network namespaces"
        peers, problem = connect(self.index, self.size, _timeout(self.group), self.gather_objects)
        problems = self.gather_objects(problem)
        if any(problems):
            if peers is not None:
                peers.close()
            return next(text for text in problems if text)
        self.peers = peers
        return None

    def signal(self, payload: bytes) -> None:
        """Send `payload` (of the same length on every rank) to all; returns at once."""
        if self.peers is not None:
            self._sent = payload, torch.empty(0), None
            self._over_sockets(lambda peers: peers.send(payload))
            return
        received = torch.empty(self.size * len(payload), dtype=torch.uint8)
        own = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        self._sent = payload, received, self._gather(received, own)

    def collect(self) -> list[bytes]:
        """The payloads of all ranks in group order, after `signal`; waits for the slowest rank."""
        assert self._sent is not None, "collect() comes after signal()"
        (payload, received, work), self._sent = self._sent, None
        if self.peers is not None:
            return self._over_sockets(lambda peers: peers.receive(payload))
        if work is not None:
            work.wait()
        flat = bytes(received.tolist())
        return [flat[i * len(payload) : (i + 1) * len(payload)] for i in range(self.size)]

    def exchange(self, payload: bytes) -> list[bytes]:
        """Signal and collect at once."""
        self.signal(payload)
        return self.collect()

    def gather_bytes(self, payload: bytes) -> list[bytes]:
        """`payload` of every rank (same length), by the group: for what may be too long for `signal`."""
        received = torch.empty(self.size * len(payload), dtype=torch.uint8)
        work = self._gather(received, torch.frombuffer(bytearray(payload), dtype=torch.uint8))
        if work is not None:
            work.wait()
        return [bytes(row.tolist()) for row in received.view(self.size, -1)]

    def gather_objects(self, value: Any) -> list[Any]:
        """One JSON value per rank, in group order. Collective, for start-up and rare events."""
        text = json.dumps(value).encode()
        sizes = [int.from_bytes(size, "little") for size in self.gather_bytes(len(text).to_bytes(8, "little"))]
        padded = self.gather_bytes(text.ljust(max(sizes)))
        return [json.loads(data[:size]) for data, size in zip(padded, sizes, strict=True)]

    def close(self) -> None:
        if self.peers is not None:
            self.peers.close()
            self.peers = None

    def _over_sockets(self, act: Callable[[Peers], Any]) -> Any:
        assert self.peers is not None
        try:
            return act(self.peers)
        except TimeoutError as error:
            index, seconds = error.args
            raise GradientError(
                f"rank {self.ranks[index]} did not come to the gradient synchronisation of ranks "
                f"{listed(self.ranks)} within {seconds} s (the group's timeout); see where it is"
            ) from error
        except ConnectionError as error:
            raise GradientError(
                f"rank {self.ranks[error.args[0]]} left during the gradient synchronisation of ranks "
                f"{listed(self.ranks)}; look at its own output for the cause"
            ) from error


def _cpu_gather(group: dist.ProcessGroup, index: int, size: int) -> _Gather:
    """A flat all-gather of CPU tensors over the ranks of `group`, which may be one for accelerators alone."""
    if "cpu:" in dist.get_backend_config(group):
        return lambda received, own: all_gather_flat(received, own, group=group, async_op=True)
    tokens: list[Any] = [None] * size
    dist.all_gather_object(tokens, os.urandom(8).hex(), group=group)
    store = c10d.PrefixStore(f"colonnade/{tokens[0]}", c10d._get_default_store())
    gloo: Any = dist.ProcessGroupGloo(store, index, size, timedelta(seconds=_timeout(group)))
    return lambda received, own: gloo._allgather_base(received, own)


def _gather_alone(received: Tensor, own: Tensor) -> None:
    received.copy_(own)


def _timeout(group: dist.ProcessGroup | None) -> float:
    """How long the group waits, in seconds; torch's default where the group does not tell."""
    for device in getattr(group, "_device_types", ()):
        options = getattr(group._get_backend(device), "options", None) if group is not None else None
        if options is not None:
            return float(options._timeout.total_seconds())
    return 1800.0
