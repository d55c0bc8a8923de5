"""Two simulated hosts on one machine, for tests of multi-node jobs. Needs root and Linux.

Each host is a set of namespaces with its own address, name, processes and shared memory. Both hosts see the same files.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from colonnade.errors import LaunchError
from colonnade.launching.outcome import end_with_parent

NAMES = ("alpha", "beta")
DEVICE = "eth0"
_TOOLS = ("ip", "nsenter", "unshare", "mount", "hostname")
_LISTENS = "0A"


@functools.cache
def why_not() -> str:
    """Return the reason why this machine cannot run two hosts; empty if it can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "two hosts on one machine need Linux and root"
    lacking = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if lacking:
        return f"two hosts on one machine need the commands {', '.join(lacking)}"
    tried = subprocess.run(
        [*_UNSHARE, "sh", "-c", "mount -t tmpfs shm /dev/shm && hostname x"],
        capture_output=True,
        text=True,
        check=False,
    )
    return "" if tried.returncode == 0 else f"namespaces are not allowed here: {tried.stderr.strip()}"


_UNSHARE = ("unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")


class Host:
    """One simulated host, with the address 10.77.0.<number>. Its processes end with the block of `two_hosts`."""

    def __init__(self, number: int, name: str, hosts_file: Path) -> None:
        self.name, self.address = name, f"10.77.0.{number}"
        inner = (
            f"mount -t tmpfs -o size=1g shm /dev/shm && mount --bind {hosts_file} /etc/hosts && hostname {name} && "
            "ip link set lo up && echo up && exec sleep infinity"
        )
        self._outer = subprocess.Popen(
            [*_UNSHARE, "sh", "-c", inner],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=end_with_parent,  # nothing remains of the host if a test is killed
        )
        if self._outer.stdout is None or self._outer.stdout.readline() != b"up\n":
            raise LaunchError(f"the host {name} could not be created: {why_not() or 'a command failed'}", code="C101")
        children = Path(f"/proc/{self._outer.pid}/task/{self._outer.pid}/children").read_text().split()
        self.first = int(children[0])
        """The PID, on this machine, of process 1 of the host."""
        self._processes = os.readlink(f"/proc/{self.first}/ns/pid")
        self._started: list[subprocess.Popen[bytes]] = []

    def _command(self, command: Sequence[object]) -> list[str]:
        inside = ("nsenter", "-t", str(self.first), "-n", "-u", "-m", "-p", f"--wd={Path.cwd()}", "--")
        return [*inside, *map(str, command)]

    def start(
        self, command: Sequence[object], output: Path, env: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a command on the host; its output is appended to a file."""
        own = {"GLOO_SOCKET_IFNAME": DEVICE, "NCCL_SOCKET_IFNAME": DEVICE, "PYTHONUNBUFFERED": "1"}
        with output.open("ab") as log:
            started = subprocess.Popen(
                self._command(command),
                env={**os.environ, **own, **(env or {})},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._started.append(started)
        return started

    def output(self, *command: object) -> str:
        """Run a short command on the host and return its output."""
        return subprocess.run(self._command(command), capture_output=True, text=True, check=True).stdout

    def processes(self) -> list[int]:
        """Return the PIDs, as this machine sees them, of all processes of the host except the first."""
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and os.readlink(entry / "ns/pid") == self._processes:
                    found.append(int(entry.name))
        return [pid for pid in found if pid != self.first]

    def ranks(self) -> dict[int, int]:
        """Return {rank: PID} of the ranks on the host, without child processes of ranks."""
        found, here = {}, self.processes()
        for pid in here:
            with contextlib.suppress(OSError, ValueError, IndexError):
                parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
                rank = _environment(pid).get("RANK")
                if rank is not None and not (parent in here and "RANK" in _environment(parent)):
                    found[int(rank)] = pid
        return dict(sorted(found.items()))

    def listening(self) -> list[tuple[str, int]]:
        """Return (address, port) of every listening TCP socket on the host."""
        return listening(self.first)

    def end(self) -> None:
        """Kill the host and all its processes at once, as in a power failure."""
        for pid in (self.first, self._outer.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._outer.wait()
        for process in self._started:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()


def _environment(pid: int) -> dict[str, str]:
    text = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    return dict(entry.split("=", 1) for entry in text.split("\0") if "=" in entry)


def listening(pid: int | str = "self") -> list[tuple[str, int]]:
    """Return (address, port) of every listening TCP socket in the network namespace of a process."""
    found = []
    for kind, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        table = Path(f"/proc/{pid}/net/{kind}")
        for line in table.read_text().splitlines()[1:] if table.exists() else ():
            _, local, _, state, *_ = line.split()
            if state == _LISTENS:
                address, _, port = local.partition(":")
                words = [int(address[at : at + 8], 16) for at in range(0, len(address), 8)]
                packed = b"".join(struct.pack("=I", word) for word in words)
                found.append((socket.inet_ntop(family, packed), int(port, 16)))
    return sorted(found)


@contextlib.contextmanager
def two_hosts(names: Sequence[str] = NAMES) -> Iterator[tuple[Host, Host]]:
    """Start two hosts that can reach only each other, by name and by address; both end with the block."""
    if why_not():
        raise LaunchError(why_not(), code="C101")
    with tempfile.TemporaryDirectory(prefix="colonnade-hosts-") as folder, contextlib.ExitStack() as ends:
        file = Path(folder) / "hosts"
        lines = ["127.0.0.1 localhost", *(f"10.77.0.{number} {name}" for number, name in enumerate(names, 1))]
        file.write_text("\n".join(lines) + "\n")
        hosts = []
        for number, name in enumerate(names, 1):
            hosts.append(Host(number, name, file))
            ends.callback(hosts[-1].end)
        first, second = hosts
        _run("ip", "link", "add", DEVICE, "netns", first.first, "type", "veth", "peer", DEVICE, "netns", second.first)
        for host in hosts:
            _run("nsenter", "-t", host.first, "-n", "ip", "addr", "add", f"{host.address}/24", "dev", DEVICE)
            _run("nsenter", "-t", host.first, "-n", "ip", "link", "set", DEVICE, "up")
        yield first, second


def _run(*command: object) -> None:
    subprocess.run([*map(str, command)], check=True, capture_output=True)


def torchrun(*words: object, nproc: int = 2, restarts: int = 0, port: int = 29500, job: str = "job") -> list[object]:
    """Return the torchrun command for one of two hosts; the first host is the rendezvous endpoint."""
    rendezvous = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{NAMES[0]}:{port}", "--rdzv-id", job)
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", 2, "--nproc-per-node", nproc),
        *(*rendezvous, "--max-restarts", restarts, *words),
    ]


def colonnade_run(*words: object, nproc: int = 2, restarts: int = 0, port: int = 29500, job: str = "") -> list[object]:
    """Return the `colonnade run` command for one of two hosts; the first host is the rendezvous endpoint."""
    return [
        *(sys.executable, "-m", "colonnade.cli", "run", "--nnodes", 2, "--nproc", nproc),
        *("--rdzv-endpoint", f"{NAMES[0]}:{port}", "--max-restarts", restarts, *words),
    ]


def wait_until(condition: Callable[[], Any], seconds: float) -> Any:
    """Call `condition()` until its value is true or the time is over; returns its last value."""
    until = time.monotonic() + seconds
    while not (value := condition()) and time.monotonic() < until:
        time.sleep(0.05)
    return value
