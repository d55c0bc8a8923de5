"""The ranks that take part in a reduction, and the small messages between them.

Bulk data never passes here: only what ranks must agree on (are we at the same step, which gradients are
missing, does every rank see the same parameters). The messages are bytes in CPU memory whatever the device
of the gradients, so that agreeing never waits for an accelerator.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from colonnade.comm.messages import gather_in_pieces
from colonnade.comm.sockets import HostSockets, connect, host_identity
from colonnade.comm.torch_versions import (
    PrefixStore,
    all_gather_flat,
    default_store,
    gather_rows,
    gloo_all_gather,
    meeting_store,
    timeout_of,
)
from colonnade.errors import GradientError, listed

Gather = Callable[[Tensor, Tensor], Any]


class RankGroup:
    """The ranks of one group as this rank sees them. `ranks` is in group order, `index` is this rank's place."""

    def __init__(
        self, ranks: Sequence[int], group: dist.ProcessGroup | None, log: Callable[[str], None] = lambda text: None
    ) -> None:
        self.ranks = tuple(ranks) if group is None else tuple(dist.get_process_group_ranks(group))
        if set(self.ranks) != set(ranks) or (group is None and len(ranks) > 1):
            raise GradientError(f"a reduction over ranks {list(ranks)} was given the group of {list(self.ranks)}")
        self.group = group
        self.size = len(self.ranks)
        self.index = self.ranks.index(dist.get_rank()) if group is not None else 0
        self.sockets: HostSockets | None = None
        self._gather = _cpu_gather(group) if group is not None else _gather_alone
        self._answers: Callable[[], list[bytes]] | None = None
        self.under_way: deque[Any] = deque()
        """The sums over these ranks that were started and are waited for before their memory is used again."""
        self._log = log
        self._must_share = False

    @property
    def alone(self) -> bool:
        """Whether there is nobody to send to."""
        return self.size == 1

    def share_memory(self, must: bool) -> None:
        """Connect the ranks of one host, so that their memory can be shared. Collective.

        Where it cannot be done, it is logged, or an error if it `must`.
        """
        self._must_share = must
        problem = self._connect()
        if problem is not None:
            self.cannot_share(problem)

    def cannot_share(self, problem: str) -> None:
        """Say why memory is not shared; an error where it must be. On all ranks of the group alike."""
        if self._must_share:
            raise GradientError(f'shared_memory=True, but {problem}. Use "auto" to fall back by itself')
        self._log(f"gradients travel by the process group, not by shared memory: {problem}")

    def _connect(self) -> str | None:
        """Open direct sockets to all ranks, if all are on this host; else the reason why not. Collective."""
        hosts = self.gather_objects(host_identity())
        if None in hosts:
            return f"rank {self.ranks[hosts.index(None)]} runs on a system without anonymous shared memory"
        if len(set(hosts)) > 1:
            return f"ranks {listed(self.ranks)} are on {len(set(hosts))} hosts or network namespaces"
        sockets, problem = connect(self.index, self.size, timeout_of(self.group).total_seconds(), self.gather_objects)
        problems = self.gather_objects(problem)
        if any(problems):
            if sockets is not None:
                sockets.close()
            return next(text for text in problems if text)
        self.sockets = sockets
        return None

    def signal(self, payload: bytes) -> None:
        """Send `payload` (of the same length on every rank) to all; returns at once."""
        if self.sockets is None:
            self._answers = partial(self._rows, *self._begin(payload))
        else:
            self._over_sockets(lambda sockets: sockets.send(payload))
            self._answers = partial(self._over_sockets, lambda sockets: sockets.receive(payload))

    def collect(self) -> list[bytes]:
        """The payloads of all ranks in group order, after `signal`; waits for the slowest rank."""
        answers, self._answers = self._answers, None
        assert answers is not None, "collect() comes after signal()"
        return answers()

    def exchange(self, payload: bytes) -> list[bytes]:
        """Signal and collect at once."""
        self.signal(payload)
        return self.collect()

    def gather_bytes(self, payload: bytes) -> list[bytes]:
        """`payload` of every rank (same length), by the group: for what may be too long for `signal`."""
        return self._rows(*self._begin(payload))

    def gather_objects(self, value: Any) -> list[Any]:
        """One JSON value per rank, in group order. Collective, for start-up and rare events."""
        return [json.loads(text) for text in gather_in_pieces(json.dumps(value).encode(), self.gather_bytes)]

    def close(self) -> None:
        if self.sockets is not None:
            self.sockets.close()
            self.sockets = None

    def _begin(self, payload: bytes) -> tuple[Tensor, Any]:
        received = torch.empty(self.size * len(payload), dtype=torch.uint8, device="cpu")
        return received, self._gather(received, torch.frombuffer(bytearray(payload), dtype=torch.uint8))

    def _rows(self, received: Tensor, work: Any) -> list[bytes]:
        if work is not None:
            work.wait()
        return [bytes(row) for row in received.view(self.size, -1).tolist()]

    def _over_sockets(self, act: Callable[[HostSockets], Any]) -> Any:
        assert self.sockets is not None
        try:
            return act(self.sockets)
        except TimeoutError as error:
            index, seconds = error.args
            raise GradientError(
                f"rank {self.ranks[index]} did not come to the gradient synchronisation of ranks "
                f"{listed(self.ranks)} within {seconds} s (the group's timeout); see where it is",
                code="C043",
            ) from error
        except ConnectionError as error:
            raise GradientError(
                f"rank {self.ranks[error.args[0]]} left during the gradient synchronisation of ranks "
                f"{listed(self.ranks)}; look at its own output for the cause",
                code="C043",
            ) from error


def own_gloo(group: dist.ProcessGroup | None = None) -> Any:
    """Connections for CPU tensors, of their own, between the ranks of `group`, or of the world. Collective."""
    on_device = torch.cuda.is_available() and "cpu:" not in dist.get_backend_config(group)
    where = torch.device("cuda", torch.cuda.current_device()) if on_device else torch.device("cpu")
    tokens = gather_rows(torch.frombuffer(bytearray(os.urandom(8)), dtype=torch.uint8).to(where), group)
    store = meeting_store(PrefixStore(f"colonnade/{bytes(tokens[0].tolist()).hex()}", default_store()), len(tokens))
    gloo = dist.ProcessGroupGloo(store, dist.get_rank(group), len(tokens), timeout_of(group))
    store.forget()
    # A rank that let go of its connections now would break those that others are still opening.
    gloo_all_gather(
        gloo, torch.empty(len(tokens), dtype=torch.uint8, device="cpu"), torch.zeros(1, dtype=torch.uint8, device="cpu")
    ).wait()
    return gloo


def gloo_beside(group: dist.ProcessGroup) -> Gather:
    """A flat all-gather of CPU tensors, by connections of its own between the ranks of `group`. Collective."""
    gloo = own_gloo(group)
    return lambda received, own: gloo_all_gather(gloo, received, own)


def _cpu_gather(group: dist.ProcessGroup) -> Gather:
    """A flat all-gather of CPU tensors over the ranks of `group`, which may be one for accelerators alone."""
    if "cpu:" in dist.get_backend_config(group):
        return lambda received, own: all_gather_flat(received, own, group=group, async_op=True)
    return gloo_beside(group)


def _gather_alone(received: Tensor, own: Tensor) -> None:
    received.copy_(own)
