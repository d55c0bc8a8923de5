"""Joining and leaving a world, and the agreements that are made when it has just come up."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import queue
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from colonnade.comm.messages import gather_numbers, is_same_everywhere, share_texts
from colonnade.comm.torch_versions import DEFAULT_TIMEOUT, HashStore, PrefixStore, TCPStore, default_store
from colonnade.context.layout import Layout
from colonnade.errors import LaunchError, LayoutError, listed

_launches = itertools.count()

_LEAVE_SECONDS = 3.0
_QUIET_SECONDS = 3.0


def join_world(
    rank: int,
    world_size: int,
    backend: str | None,
    host: str | None,
    port: int | None,
    timeout: float | None,
) -> bool:
    """Initialise torch.distributed unless it is; returns whether it was us, and so is ours to destroy."""
    atexit.unregister(_wait_for_threads)  # once, however often the process launches
    atexit.register(_wait_for_threads)
    if dist.is_initialized():
        there = (dist.get_rank(), dist.get_world_size())
        if there != (rank, world_size):
            raise LaunchError(
                f"torch.distributed is already initialised as rank {there[0]} of {there[1]}, but launch was "
                f"asked for rank {rank} of {world_size}. Leave rank and world_size out, or destroy that group first."
            )
        return False
    limit = timedelta(seconds=timeout) if timeout else DEFAULT_TIMEOUT
    store = _store(rank, world_size, host, port, limit)
    try:
        dist.init_process_group(
            backend or default_backend(), store=store, rank=rank, world_size=world_size, timeout=limit
        )
    except Exception as error:
        raise LaunchError(
            f"rank {rank} of {world_size} could not join the world at {host}:{port} with backend "
            f"{backend or default_backend()!r}: {error}"
        ) from error
    return True


def leave_world() -> None:
    """Destroy every process group of torch.distributed; rank 0, which serves the store, leaves last.

    So a rank that launches again at once cannot reach the store of the world that is going away.
    """
    if not dist.is_initialized():
        return
    rank, world_size = dist.get_rank(), dist.get_world_size()
    store = default_store()
    with contextlib.suppress(RuntimeError):  # the store is gone where rank 0 has died
        left = store.add("colonnade/left", 1)
        until = time.monotonic() + _LEAVE_SECONDS
        while rank == 0 and left < world_size and time.monotonic() < until:
            time.sleep(0.002)
            left = store.add("colonnade/left", 0)
    dist.destroy_process_group()


def _wait_for_threads() -> None:
    """Before Python ends: let torch's threads finish what they are at, so that the exit status is not lost.

    A thread of gloo may be the last to hold a tensor of a collective that is over, and needs Python to let go of it.
    One that comes too late, when Python has begun to end, aborts the process: "terminate called without an active
    exception". This thread sleeps and leaves Python to them; a thread that sleeps then too has nothing left to do, or
    waits for another rank, which is not waited for here.
    """
    until = time.monotonic() + _QUIET_SECONDS
    quiet = 0
    while quiet < 2 and time.monotonic() < until:
        time.sleep(0.001)
        quiet = 0 if any(_is_busy(task) for task in Path("/proc/self/task").glob("*")) else quiet + 1


def _is_busy(task: Path) -> bool:
    """Whether it is a thread of torch's that runs or could run. Without /proc none is seen."""
    try:
        # "<id> (<name>) <state> ...", with state S for one that sleeps
        name, state = (task / "stat").read_text().split("(", 1)[1].rsplit(") ", 1)
    except (OSError, IndexError, ValueError):  # it is gone
        return False
    return name.startswith("pt_") and not state.startswith("S")


def default_backend() -> str:
    """nccl where there is CUDA, gloo elsewhere."""
    return "nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"


def agree_on_layout(layout: Layout, device: torch.device) -> None:
    """Refuse, on every rank, a layout that is not the same everywhere. Collective over the world."""
    digest = layout.digest()
    if is_same_everywhere(digest, device):
        return
    # Tables of the world travel only now, from one rank of each opinion, to name what differs.
    digests = gather_numbers(digest, device)
    speakers = sorted({digests.index(other) for other in digests})
    mine = json.dumps({mode.value: list(layout.groups(mode)) for mode in layout.modes})
    tables = {rank: json.loads(text) for rank, text in share_texts("layout", mine, speakers).items()}
    modes = sorted({mode for table in tables.values() for mode in _differing_modes(tables[0], table)})
    if not modes:
        return
    differing = [rank for rank, other in enumerate(digests) if tables[digests.index(other)] != tables[0]]
    there = tables[digests.index(digests[differing[0]])]
    raise LayoutError(
        f"the ranks do not agree on the groups of mode {listed(repr(mode) for mode in modes)}: rank 0 says "
        f"{tables[0].get(modes[0])}, rank {differing[0]} says {there.get(modes[0])} "
        f"(differing from rank 0: {listed(differing)}). An initializer must return the groups of the whole world, "
        f"the same on every rank; it must not depend on its own rank."
    )


def _store(rank: int, world_size: int, host: str | None, port: int | None, limit: timedelta) -> Any:
    """The key-value store of the rendezvous, under a prefix of its own for every launch and restart."""
    if world_size == 1 and port is None:
        return HashStore()
    if host is None or port is None:
        raise LaunchError(
            f"a world of {world_size} ranks needs the address of rank 0: pass host= and port=, set MASTER_ADDR and "
            f"MASTER_PORT, or start the script with `colonnade run --nproc {world_size} script.py`"
        )
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves = rank == 0 and not agent
    try:
        base = _within(limit, lambda: _connect(host, port, world_size, serves, limit))
    except (dist.DistNetworkError, dist.DistStoreError, RuntimeError, ValueError, TimeoutError) as error:
        raise LaunchError(_connection_help(rank, host, port, error)) from error
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"colonnade/{attempt}/{next(_launches)}", base)


def _connect(host: str, port: int, world_size: int, serves: bool, limit: timedelta) -> TCPStore:
    # multi_tenant: a store of this process that is still going away on the same port is shared, not an error.
    return TCPStore(host, port, world_size, serves, limit, wait_for_workers=False, multi_tenant=True)


def _within(limit: timedelta, connect: Callable[[], Any]) -> Any:
    """Run `connect` with a deadline of our own.

    A TCPStore client that reaches a stranger's open port waits for ever for the answer, whatever its timeout.
    """
    found: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()

    def attempt() -> None:
        try:
            found.put((connect(), None))
        except Exception as error:
            found.put((None, error))

    threading.Thread(target=attempt, daemon=True, name="colonnade-rendezvous").start()
    try:
        store, error = found.get(timeout=limit.total_seconds() + 1)
    except queue.Empty:
        raise TimeoutError(f"something listens there but gave no answer in {limit.total_seconds():.0f} s") from None
    if error is not None:
        raise error
    return store


def _connection_help(rank: int, host: str, port: int, error: Exception) -> str:
    if "EADDRINUSE" in str(error) or "in use" in str(error):
        return (
            f"port {port} on {host} is in use, so rank 0 cannot listen there. Choose another port "
            f"(`colonnade run` finds a free one by itself), or end the process that holds it."
        )
    return (
        f"rank {rank} could not reach rank 0 at {host}:{port}: {error}. Is rank 0 running, and is the address "
        f"reachable from here?"
    )


def _differing_modes(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return [mode for mode in {**one, **other} if one.get(mode) != other.get(mode)]
