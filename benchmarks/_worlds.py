"""Ranks of one contestant, in processes of their own, that wait until it is their turn.

All worlds of a benchmark are alive at once and only one works at a time, so that drift of the machine hits all
alike and no contestant's memory or caches help or harm another's.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

_START_SECONDS = 180.0

Serve = Callable[..., Callable[[str], Any]]
"""On a rank, with the process group up: takes the contestant's arguments, returns what answers commands."""


class World:
    """Ranks of one contestant. `ask` sends a command to all of them and returns their answers."""

    def __init__(self, size: int, serve: Serve, *arguments: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo"])
        port = _free_port()
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_rank, args=(rank, size, port, theirs, serve, arguments), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def ready(self) -> World:
        """Wait until every rank has set up."""
        self._answers(_START_SECONDS)
        return self

    def ask(self, command: str, timeout: float = 120.0) -> list[Any]:
        """One answer per rank."""
        for pipe in self._pipes:
            pipe.send(command)
        return self._answers(timeout)

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(20)
            if process.is_alive():
                process.kill()

    def _answers(self, timeout: float) -> list[Any]:
        answers = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(timeout):
                raise TimeoutError(f"rank {rank} gave no answer within {timeout} s")
            answer = pipe.recv()
            if isinstance(answer, BaseException):
                raise answer
            answers.append(answer)
        return answers


def timer(work: Callable[[], None]) -> Callable[[str], float]:
    """Answers any command with the seconds of the work, which all ranks begin together."""
    import torch.distributed as dist

    def answer(command: str) -> float:
        dist.barrier()
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin

    return answer


def turn(world: World) -> Callable[[], float]:
    """One turn of a contest: the seconds of the slowest rank."""
    return lambda: max(world.ask("step"))


def _rank(rank: int, size: int, port: int, pipe: Connection, serve: Serve, arguments: Sequence[Any]) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
        answer = serve(*arguments)
        pipe.send("ready")
        while (command := pipe.recv()) is not None:
            pipe.send(answer(command))
    except Exception as error:
        pipe.send(RuntimeError(f"rank {rank}: {error!r}"))
    finally:
        # Leaving at once: peers may be waiting in destructors of their groups.
        os._exit(0)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
