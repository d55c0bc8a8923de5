"""The rendezvous of the elastic agents of torchrun, one per machine, and the store that they serve to the ranks.

A torch store listens on all interfaces. Here it listens only on the loopback interface for a job on one machine, else on the
address by which the other machines know this one. The launcher serves the store of the ranks itself, on a port chosen by the
kernel, so no other process can take the port before the ranks start. Every (re)start gets a new store, because gloo would find
the addresses of dead ranks in an old one.
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
"""The backend if every machine has a --node-rank."""
_SECONDS = 60


class AgentRendezvous(RendezvousHandler):
    """The rendezvous of torch, which additionally agrees on a store for this start and on the number of earlier starts."""

    def __init__(self, inner: Any, one_host: bool) -> None:
        self._inner, self._one_host = inner, one_host
        self._served: Any = None
        self._starts = 0
        self.restarts = 0
        """The number of starts before this one; equal on every machine."""

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the launchers of the other machines; the first one serves the store of the ranks."""
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
        """True: no rank serves the store."""
        return True

    def get_backend(self) -> str:
        """The name in the registry of torch."""
        return BACKEND

    def is_closed(self) -> bool:
        """As in torch."""
        return bool(self._inner.is_closed())

    def set_closed(self) -> None:
        """As in torch."""
        self._inner.set_closed()

    def num_nodes_waiting(self) -> int:
        """As in torch."""
        return int(self._inner.num_nodes_waiting())

    def get_run_id(self) -> str:
        """As in torch."""
        return str(self._inner.get_run_id())

    def shutdown(self) -> bool:
        """As in torch."""
        return bool(self._inner.shutdown())


class StaticAgentRendezvous(StaticTCPRendezvous):
    """The rendezvous of torch for machines with a given --node-rank; the first serves one store for the whole job."""

    def next_rendezvous(self) -> RendezvousInfo:
        """The store and the number of this machine."""
        if self._store is not None:
            return super().next_rendezvous()
        return launchers_met(f"{self.master_addr}:{self.master_port}", timedelta(seconds=_SECONDS), self._first)

    def _first(self) -> RendezvousInfo:
        if self.rank == 0:
            self._store = serve_store(self.master_addr, self.master_port, False)
        return super().next_rendezvous()

    def get_backend(self) -> str:
        """The name in the registry of torch."""
        return STATIC_BACKEND


def serve_store(host: str, port: int, one_host: bool) -> TCPStore:
    """Serve a store in this process, on this address only if possible; port 0: any free port."""
    try:
        listener = listening_at(host, port, one_host)
    except OSError:  # the port is in use (torch reports that), or the address is forwarded here by another machine
        listener = None
    return _served(host, listener.getsockname()[1] if listener is not None else port, listener, multi_tenant=port != 0)


def _served(host: str, port: int, listener: socket.socket | None, multi_tenant: bool) -> TCPStore:
    return TCPStore(
        host,
        port,
        is_master=True,
        timeout=timedelta(seconds=_SECONDS),
        wait_for_workers=False,
        multi_tenant=multi_tenant,
        master_listen_fd=listener.detach() if listener is not None else None,
    )


handlers: list[AgentRendezvous] = []
"""The handlers of this process, in order of creation."""


def make_handler(params: RendezvousParameters) -> AgentRendezvous:
    one_host = params.get("store_type") == "file"
    if one_host:
        # A single machine needs no socket; its agent uses a file.
        backend, store = create_backend(params)
    else:
        # The machine with the address of the endpoint serves the store of all agents, on that address only.
        host, _, port = params.endpoint.rpartition(":")
        try:
            listener = listening_at(host, int(port), False)
        except OSError:  # another machine has the address, or another launcher on this machine the port
            listener = None
        if listener is None:
            limit = timedelta(seconds=_SECONDS)
            backend, store = launchers_met(params.endpoint, limit, lambda: create_backend(params))
        else:
            store = _served(host, int(port), listener, multi_tenant=True)
            backend = C10dRendezvousBackend(store, params.run_id)
    handlers[:] = [AgentRendezvous(create_handler(store, backend, params), one_host)]
    return handlers[-1]


def make_static_handler(params: RendezvousParameters) -> StaticAgentRendezvous:
    handlers.clear()
    host, _, port = params.endpoint.rpartition(":")
    return StaticAgentRendezvous(host, int(port), int(params.config["rank"]), params.max_nodes, params.run_id, _SECONDS)


rendezvous_handler_registry.register(BACKEND, make_handler)
rendezvous_handler_registry.register(STATIC_BACKEND, make_static_handler)
