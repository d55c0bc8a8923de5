"""Kill ranks of the second of two hosts, again and again, and see that the job comes back each time and ends with the bits of one undisturbed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from colonnade.testing.hosts import Host, colonnade_run, torchrun, two_hosts, wait_until

JOB = Path(__file__).with_name("job.py")
LAUNCHERS: dict[str, Callable[..., list[object]]] = {"torchrun": torchrun, "colonnade": colonnade_run}


@dataclass
class Job:
    """One job on two hosts, seen from outside."""

    hosts: tuple[Host, Host]
    folder: Path
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, launcher: str, restarts: int, steps: int) -> None:
        """Start the launcher on each host."""
        for host in self.hosts:
            command = LAUNCHERS[launcher](JOB, self.folder, steps, restarts=restarts)
            self.started.append(host.start(command, self.folder / f"{host.name}.log", {"OMP_NUM_THREADS": "1"}))

    def steps(self) -> int:
        """How many steps were noted so far, those that were made again too."""
        file = self.folder / "steps"
        return len(file.read_text().splitlines()) if file.exists() else 0

    def over(self) -> bool:
        return any(process.poll() is not None for process in self.started)

    def end(self, seconds: float) -> list[int | None]:
        """The exit statuses of both launchers."""
        wait_until(lambda: all(process.poll() is not None for process in self.started), seconds)
        return [process.poll() for process in self.started]

    def digests(self) -> list[Any]:
        """What each rank has left at its end."""
        return [json.loads((self.folder / f"rank{rank}.json").read_text()) for rank in range(4)]

    def logs(self) -> str:
        """The ends of what the launchers have printed."""
        return "\n".join(
            f"--- {host.name}\n{(self.folder / f'{host.name}.log').read_text()[-3000:]}" for host in self.hosts
        )


def undisturbed(folder: Path, steps: int) -> list[Any]:
    """The digests of a job without a kill."""
    folder.mkdir()
    with two_hosts() as hosts:
        job = Job(hosts, folder)
        job.start("torchrun", 0, steps)
        assert job.end(200) == [0, 0], job.logs()
        return job.digests()


def killed(folder: Path, launcher: str, kills: int, steps: int, wait: float = 120, seed: int = 1) -> tuple[int, Job]:
    """(After how many kills the job trained on, the job). Every fourth kill comes while the ranks are starting."""
    folder.mkdir()
    chance, back = random.Random(seed), 0
    with two_hosts() as hosts:
        job = Job(hosts, folder)
        job.start(launcher, kills + 5, steps)
        before = -1
        for number in range(kills):
            early = number % 4 == 3
            if early:
                wait_until(lambda: len(hosts[1].ranks()) == 2, wait)
                time.sleep(6 * chance.random())
            else:
                wait_until(lambda at=before: job.steps() > at + 1 or job.over(), wait)
                time.sleep(0.3 * chance.random())
            ranks = hosts[1].ranks()
            if job.over() or not ranks:
                break
            before = job.steps()
            rank = chance.choice([*ranks])
            os.kill(ranks[rank], signal.SIGKILL)
            began = time.monotonic()
            # Steps that were on the way may still be noted; those of the ranks' next start are what counts.
            came = wait_until(
                lambda gone=ranks[rank], at=before: (
                    job.over() or (gone not in hosts[1].ranks().values() and job.steps() > at + 2)
                ),
                wait,
            )
            if not came or (job.over() and job.end(20) != [0, 0]):
                print(f"kill {number + 1}: rank {rank} after {before} steps: NOT BACK\n{job.logs()}", flush=True)
                break
            back += 1
            print(
                f"kill {number + 1}{' (at the start)' if early else ''}: rank {rank} after {before} steps noted; "
                f"back after {time.monotonic() - began:.0f} s",
                flush=True,
            )
            before = job.steps()
        print(f"exit {job.end(wait)}", flush=True)
    return back, job


def counts(folder: Path, launcher: str, nproc: int = 2) -> list[dict[str, Any]]:
    """What each rank of `count_job.py` has left."""
    folder.mkdir()
    with two_hosts() as hosts:
        started = []
        for host in hosts:
            (folder / host.name).mkdir()
            command = LAUNCHERS[launcher](JOB.with_name("count_job.py"), folder, nproc=nproc)
            env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(JOB.parents[2])}
            started.append(host.start(command, folder / f"{host.name}.log", env))
        wait_until(lambda: all(process.poll() is not None for process in started), 200)
        assert [process.poll() for process in started] == [0, 0], Job(hosts, folder).logs()
    return [json.loads((folder / f"counts{rank}.json").read_text()) for rank in range(2 * nproc)]
