"""The rendezvous of torchrun's elastic agents, one on each machine, and the store that they serve to the ranks of each start.

Torch lets a store listen on all interfaces. Here it listens on the loopback interface where the job has one machine,
and else on the address by which the other machines know this one. The launcher itself serves the ranks' store, on
a port that the kernel gives it: so nobody can take the port between the choice and the start. Every start gets a store
of its own, because in a store that outlived the ranks gloo finds the addresses of dead ones.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend, create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from colonnade.comm.torch_versions import TCPStore
from colonnade.context.rendezvous import launchers_met, listening_at

BACKEND = "colonnade"
STATIC_BACKEND = "colonnade-placed"
"""Where each machine was given its place by --node-rank."""
_SECONDS = 60


class AgentRendezvous(RendezvousHandler):
    """Torch's rendezvous, which also agrees on a store for this start and on how many starts there were before."""

    def __init__(self, inner: Any, one_host: bool) -> None:
        self._inner, self._one_host = inner, one_host
        self._served: Any = None
        self._starts = 0
        self.restarts = 0
        """How often all ranks were started before this start: the same on every machine."""

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the launchers of the other machines; the first of them serves the ranks."""
        met = self._inner.next_rendezvous()
        if met.rank == 0:
            host = "127.0.0.1" if self._one_host else met.bootstrap_store_info.master_addr
            self._served = serve_store(host, 0, self._one_host)
            met.store.set("colonnade/ranks meet", f"{host} {self._served.port} {self._starts}")
        host, port, starts = met.store.get("colonnade/ranks meet").decode().split()
        self.restarts, self._starts = int(starts), self._starts + 1
        return RendezvousInfo(met.store, met.rank, met.world_size, RendezvousStoreInfo(host, int(port)))

    @property
    def use_agent_store(self) -> bool:
        """No rank serves the store."""
        return True

    def get_backend(self) -> str:
        """The name in torch's registry."""
        return BACKEND

    def is_closed(self) -> bool:
        """As torch's."""
        return bool(self._inner.is_closed())

    def set_closed(self) -> None:
        """As torch's."""
        self._inner.set_closed()

    def num_nodes_waiting(self) -> int:
        """As torch's."""
        return int(self._inner.num_nodes_waiting())

    def get_run_id(self) -> str:
        """As torch's."""
        return str(self._inner.get_run_id())

    def shutdown(self) -> bool:
        """As torch's."""
        return bool(self._inner.shutdown())


class StaticAgentRendezvous(StaticTCPRendezvous):
    """Torch's rendezvous of machines with given places, at one store for the whole job, which the first machine serves."""

    def next_rendezvous(self) -> RendezvousInfo:
        """The store and this machine's place."""
        if self._store is not None:
            return super().next_rendezvous()
        return launchers_met(f"{self.master_addr}:{self.master_port}", timedelta(seconds=_SECONDS), self._first)

    def _first(self) -> RendezvousInfo:
        if self.rank == 0:
            self._store = serve_store(self.master_addr, self.master_port, False)
        return super().next_rendezvous()

    def get_backend(self) -> str:
        """The name in torch's registry."""
        return STATIC_BACKEND


def serve_store(host: str, port: int, one_host: bool) -> TCPStore:
    """A store that is served here, at this address alone where that can be; port 0 is any that is free."""
    try:
        held = listening_at(host, port, one_host)
    except OSError:  # the port is in use, which torch says; or the address leads here by way of another machine
        held = None
    return _served(host, held.getsockname()[1] if held is not None else port, held, multi_tenant=port != 0)


def _served(host: str, port: int, held: socket.socket | None, multi_tenant: bool) -> TCPStore:
    return TCPStore(
        host,
        port,
        is_master=True,
        timeout=timedelta(seconds=_SECONDS),
        wait_for_workers=False,
        multi_tenant=multi_tenant,
        master_listen_fd=held.detach() if held is not None else None,
    )


handlers: list[AgentRendezvous] = []
"""Of this process, the last one last."""


def make_handler(params: RendezvousParameters) -> AgentRendezvous:
    one_host = params.get("store_type") == "file"
    if one_host:
        # The agent of a single machine meets itself in a file: nothing listens.
        backend, store = create_backend(params)
    else:
        # The machine whose address the endpoint is serves the store of all agents, at that address alone.
        host, _, port = params.endpoint.rpartition(":")
        try:
            held = listening_at(host, int(port), False)
        except OSError:  # another machine is the host, or another launcher on this one
            held = None
        if held is None:
            limit = timedelta(seconds=_SECONDS)
            backend, store = launchers_met(params.endpoint, limit, lambda: create_backend(params))
        else:
            store = _served(host, int(port), held, multi_tenant=True)
            backend = C10dRendezvousBackend(store, params.run_id)
    handlers[:] = [AgentRendezvous(create_handler(store, backend, params), one_host)]
    return handlers[-1]


def make_static_handler(params: RendezvousParameters) -> StaticAgentRendezvous:
    handlers.clear()
    host, _, port = params.endpoint.rpartition(":")
    return StaticAgentRendezvous(host, int(port), int(params.config["rank"]), params.max_nodes, params.run_id, _SECONDS)


rendezvous_handler_registry.register(BACKEND, make_handler)
rendezvous_handler_registry.register(STATIC_BACKEND, make_static_handler)
