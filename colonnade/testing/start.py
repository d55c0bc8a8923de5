"""What a world needs before its first process: a packed call, a start method, a folder, a port, settings."""

from __future__ import annotations

import contextlib
import inspect
import multiprocessing
import os
import pickle
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import forkserver
from multiprocessing.context import ForkContext, ForkServerContext
from pathlib import Path
from typing import Any

import torch

from colonnade.errors import LaunchError

# Imported once by the fork server instead of by every rank. On 2 cores with torch 2.13, `torch._dynamo` costs
# 1 s here and saves each world of 4 about 2.2 s at its first DDP or functional collective; the other two of torch
# cost 0.2 s each and save 0.1 s. The library itself costs 0.4 s and saves each world of 4 as much.
_PRELOAD = (
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.pipelining",
    "colonnade._launch",
    "colonnade.checkpoint.manager",
    "colonnade.engine.build",
    "colonnade.testing.rank",
    "colonnade.testing.truth",
    "colonnade.trainer",
)
_PRELOAD_UNDER_PYTEST = ("pytest", "hypothesis")


def start_server() -> ForkServerContext:
    """Start the fork server if it does not run yet, without waiting for its imports; return its context."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_PRELOAD, *(_PRELOAD_UNDER_PYTEST if "pytest" in sys.modules else ())])
    forkserver.ensure_running()
    return context


def context_for(fn: Callable[..., Any]) -> ForkContext | ForkServerContext:
    """Return the start method for `fn`: the fork server, or plain fork for a function typed at a prompt.

    Such a function exists in this process only, in a `__main__` that no other process could import.
    """
    source = getattr(sys.modules["__main__"], "__file__", None)
    typed_in = fn.__module__ == "__main__" if source is None else not Path(source).exists()
    if typed_in and torch.cuda.is_initialized():
        raise LaunchError(
            "this process has used CUDA, so it cannot be copied for the ranks: start anew, and use the GPU only inside "
            "the function that the ranks run",
            code="C101",
        )
    return multiprocessing.get_context("fork") if typed_in else start_server()


def check_keywords(fn: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse `init=`, as `backend=` was called once, unless the function names such a parameter: it would be passed on to it."""
    if "init" not in kwargs:
        return
    with contextlib.suppress(TypeError, ValueError):  # some callables have no signature
        if "init" in inspect.signature(fn).parameters:
            return
    raise LaunchError(
        f"run_world has no keyword init (it got init={kwargs['init']!r}): it is called backend now. Pass backend={kwargs['init']!r}, "
        f"or give {getattr(fn, '__qualname__', fn)} a parameter init if it is meant for that function.",
        code="C115",
    )


def packed(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """Return the call as bytes, or say what cannot travel and what to do.

    Plain pickle on purpose: multiprocessing's own would share the memory of tensors between the ranks.
    """
    name = getattr(fn, "__qualname__", repr(fn))
    if "<lambda>" in name or "<locals>" in name:
        raise LaunchError(
            f"run_world cannot send {name} to other processes: it is a lambda or defined inside a function. "
            "Move it to module level and pass what it needs as arguments.",
            code="C101",
        )
    for what, thing in (
        (name, fn),
        *((f"argument {i} of {name}", arg) for i, arg in enumerate(args)),
        *((f"argument {key!r} of {name}", arg) for key, arg in kwargs.items()),
    ):
        try:
            pickle.dumps(thing)
        except Exception as error:
            raise LaunchError(
                f"run_world cannot send {what} to other processes ({type(error).__name__}: {error}). "
                "Pass a module-level function and plain data or tensors; build the rest inside the function.",
                code="C101",
            ) from error
    return pickle.dumps((fn, args, kwargs))


@contextlib.contextmanager
def private_folder() -> Iterator[Path]:
    """Make a folder only this user can read, with the ranks' TMPDIR `tmp` in it; remove it at the end."""
    folder = Path(tempfile.mkdtemp(prefix="colonnade-world-"))
    (folder / "tmp").mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def loopback_socket(listening: bool) -> Iterator[socket.socket]:
    """Hold a free loopback port until the end of the world.

    Listening, it is handed to rank 0's store, so no port is ever chosen twice and nothing listens on other
    interfaces. Bound only, it reserves the port: a rank may listen there (both sides reuse the address),
    nobody else is given it.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        if listening:
            held.listen(socket.SOMAXCONN)
        yield held


def environments(n: int, folder: Path, port: int, env: Mapping[str, str | None] | None) -> tuple[dict[str, str], ...]:
    """Return each rank's environment: this process's, over it our defaults, over them `env` (None removes)."""
    shared = {
        **{name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")},
        "WORLD_SIZE": str(n),
        "LOCAL_WORLD_SIZE": str(n),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "TORCH_DISTRIBUTED_DEBUG": os.environ.get("TORCH_DISTRIBUTED_DEBUG", "DETAIL"),
        "TMPDIR": str(folder / "tmp"),
    }
    if sys.platform == "linux":
        shared.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return tuple(
        {
            name: value
            for name, value in {**shared, **nccl, **(env or {}), "RANK": str(rank), "LOCAL_RANK": str(rank)}.items()
            if value is not None
        }
        for rank, nccl in enumerate(nccl_environments(n))
    )


def check_backend(backend: str | None) -> None:
    """Refuse nccl where there is no GPU, before a process is started."""
    if backend is not None and "nccl" in backend and not torch.cuda.device_count():
        raise LaunchError(f"backend={backend!r} needs a GPU and torch finds none. Give backend='gloo'.", code="C024")


def nccl_environments(n: int) -> list[dict[str, str]]:
    """Return, for each of `n` ranks, what NCCL needs where they share GPUs; empty where none is shared.

    NCCL refuses two ranks on one device of one host. So each rank names a host of its own, and they talk over
    loopback sockets, as hosts without a faster network would.
    """
    if not 0 < torch.cuda.device_count() < n:
        return [{}] * n
    sockets = {"NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    return [{"NCCL_HOSTID": f"colonnade-rank-{rank}", **sockets} for rank in range(n)]
