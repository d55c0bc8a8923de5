"""Two hosts on one machine: namespaces with an address, a name, processes and shared memory of their own. Root only, Linux only.

For tests of jobs over several hosts: a launcher starts on each, a rank on one of them is killed, a host is looked at
from outside. Both hosts see the same files.
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
    """Why this machine cannot show two hosts; empty where it can."""
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
    """One of the hosts, with the address 10.77.0.<number>. What runs on it ends with the block of `two_hosts`."""

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
            preexec_fn=end_with_parent,  # so that nothing is left of the host when a test is killed
        )
        if self._outer.stdout is None or self._outer.stdout.readline() != b"up\n":
            raise LaunchError(f"the host {name} could not be made: {why_not() or 'a command failed'}", code="C101")
        children = Path(f"/proc/{self._outer.pid}/task/{self._outer.pid}/children").read_text().split()
        self.first = int(children[0])
        """The process of this machine that is number 1 on the host."""
        self._processes = os.readlink(f"/proc/{self.first}/ns/pid")
        self._started: list[subprocess.Popen[bytes]] = []

    def _command(self, command: Sequence[object]) -> list[str]:
        inside = ("nsenter", "-t", str(self.first), "-n", "-u", "-m", "-p", f"--wd={Path.cwd()}", "--")
        return [*inside, *map(str, command)]

    def start(
        self, command: Sequence[object], output: Path, env: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a command on the host; what it prints is appended to a file."""
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
        """What a short command prints on the host."""
        return subprocess.run(self._command(command), capture_output=True, text=True, check=True).stdout

    def processes(self) -> list[int]:
        """The processes of this machine that run on the host, its first one aside."""
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and os.readlink(entry / "ns/pid") == self._processes:
                    found.append(int(entry.name))
        return [pid for pid in found if pid != self.first]

    def ranks(self) -> dict[int, int]:
        """{rank: process} of the ranks that run on the host; processes that a rank has started are left out."""
        found, here = {}, self.processes()
        for pid in here:
            with contextlib.suppress(OSError, ValueError, IndexError):
                parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
                rank = _environment(pid).get("RANK")
                if rank is not None and not (parent in here and "RANK" in _environment(parent)):
                    found[int(rank)] = pid
        return dict(sorted(found.items()))

    def listening(self) -> list[tuple[str, int]]:
        """(Address, port) of every TCP socket that listens on the host."""
        return listening(self.first)

    def end(self) -> None:
        """End the host and all that runs on it at once, as when its power goes."""
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
    """(Address, port) of every TCP socket that listens where this process runs, as the kernel lists them."""
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
    """Two hosts that reach each other by name and by address, and nothing else; both end with the block."""
    if why_not():
        raise LaunchError(why_not(), code="C101")
    with tempfile.TemporaryDirectory(prefix="colonnade-hosts-") as folder, contextlib.ExitStack() as ends:
        file = Path(folder) / "hosts"
        lines = ["127.0.0.1 localhost", *(f"10.77.0.{number} {name}" for number, name in enumerate(names, 1))]
        file.write_text("\n".join(lines) + "\n")
        made = []
        for number, name in enumerate(names, 1):
            made.append(Host(number, name, file))
            ends.callback(made[-1].end)
        one, two = made
        _run("ip", "link", "add", DEVICE, "netns", one.first, "type", "veth", "peer", DEVICE, "netns", two.first)
        for host in made:
            _run("nsenter", "-t", host.first, "-n", "ip", "addr", "add", f"{host.address}/24", "dev", DEVICE)
            _run("nsenter", "-t", host.first, "-n", "ip", "link", "set", DEVICE, "up")
        yield one, two


def _run(*command: object) -> None:
    subprocess.run([*map(str, command)], check=True, capture_output=True)


def torchrun(*words: object, nproc: int = 2, restarts: int = 0, port: int = 29500, job: str = "job") -> list[object]:
    """The command that starts a script on one of two hosts by torchrun; the first host is where they meet."""
    meeting = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{NAMES[0]}:{port}", "--rdzv-id", job)
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", 2, "--nproc-per-node", nproc),
        *(*meeting, "--max-restarts", restarts, *words),
    ]


def colonnade_run(*words: object, nproc: int = 2, restarts: int = 0, port: int = 29500, job: str = "") -> list[object]:
    """The command that starts a script on one of two hosts by `colonnade run`; the first host is where they meet."""
    return [
        *(sys.executable, "-m", "colonnade.cli", "run", "--nnodes", 2, "--nproc", nproc),
        *("--rdzv-endpoint", f"{NAMES[0]}:{port}", "--max-restarts", restarts, *words),
    ]


def wait_until(come: Callable[[], Any], seconds: float) -> Any:
    """What `come` gives once it is true; its last value when the time is over."""
    until = time.monotonic() + seconds
    while not (value := come()) and time.monotonic() < until:
        time.sleep(0.05)
    return value
