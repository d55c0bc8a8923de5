"""The checks of `colonnade doctor`: one function each, by name; each says ok, warn or bad and what to do."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from colonnade.cli._job import cores

_LEAST_TORCH = (2, 11)
_LEAST_MEMORY = 1 << 30
_LEAST_SHM = 1 << 30
_LEAST_FILES = 1024
_LEAST_THREADS = 4096
_SMOKE_SECONDS = 120
_PLACES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_OPTIONAL = ("tensorboard", "triton", "numpy")
_NEEDED = ("safetensors", "rich", "typer")


@dataclass(frozen=True)
class Finding:
    """What one check found."""

    status: Literal["ok", "warn", "bad"]
    detail: str
    next_step: str = ""


def check_python() -> Finding:
    """Which Python runs; an older one could not have installed this."""
    return Finding("ok", f"{platform.python_version()} at {sys.executable}")


def check_torch() -> Finding:
    """A torch that is new enough and has torch.distributed."""
    torch = _torch()
    if torch is None:
        return Finding("bad", "torch cannot be imported", "pip install torch")
    found = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if found < _LEAST_TORCH:
        least = ".".join(map(str, _LEAST_TORCH))
        return Finding("bad", torch.__version__, f"install torch {least} or later")
    if not torch.distributed.is_available():
        return Finding("bad", f"{torch.__version__} without torch.distributed", "install a build that has it")
    return Finding("ok", torch.__version__)


def check_devices() -> Finding:
    """CUDA devices, and nccl for them."""
    torch = _torch()
    if torch is None or not torch.cuda.is_available():
        return Finding("ok", "no CUDA device: ranks run on the CPU")
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    if not torch.distributed.is_nccl_available():
        return Finding("warn", f"{len(names)} devices, no nccl", "install a torch build with nccl")
    version = ".".join(map(str, torch.cuda.nccl.version()))
    return Finding("ok", f"{len(names)} x {names[0]}, nccl {version}")


def check_gloo() -> Finding:
    """The backend of CPU ranks and of control messages."""
    torch = _torch()
    if torch is None or not torch.distributed.is_gloo_available():
        return Finding("bad", "not available", "install a torch build with gloo")
    return Finding("ok", "available")


def check_cores() -> Finding:
    """Cores this process may use, and torch's threads."""
    torch = _torch()
    threads = f", torch uses {torch.get_num_threads()} threads" if torch else ""
    return Finding("ok", f"{cores()} usable of {os.cpu_count()}{threads}")


def check_memory() -> Finding:
    """Memory that is free now."""
    facts = _meminfo()
    if not facts:
        return Finding("ok", "unknown on this system")
    detail = f"{_gib(facts['MemAvailable'])} free of {_gib(facts['MemTotal'])}"
    if facts["MemAvailable"] < _LEAST_MEMORY:
        return Finding("warn", detail, "each rank needs about 0.3 GiB before its model: end something or use fewer")
    return Finding("ok", detail)


def check_shared_memory() -> Finding:
    """Room in /dev/shm, where data loaders and nccl put buffers."""
    if not Path("/dev/shm").is_dir():
        return Finding("ok", "no /dev/shm on this system")
    usage = shutil.disk_usage("/dev/shm")
    detail = f"{_gib(usage.free)} free of {_gib(usage.total)} in /dev/shm"
    if usage.free < _LEAST_SHM:
        return Finding("warn", detail, "data loader workers may crash: in a container start it with --shm-size=8g")
    return Finding("ok", detail)


def check_limits() -> Finding:
    """Open files and threads: a gloo group takes three threads and a socket per peer."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    tasks = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    detail = f"{_limit(files)} open files, {_limit(tasks)} processes"
    if 0 <= files < _LEAST_FILES:
        return Finding("warn", detail, f"ulimit -n {_LEAST_FILES * 64}")
    if 0 <= tasks < _LEAST_THREADS:
        return Finding("warn", detail, f"ulimit -u {_LEAST_THREADS * 8}")
    return Finding("ok", detail)


def check_port() -> Finding:
    """A port can be opened and reached on the loopback interface."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
    except OSError as error:
        return Finding("bad", f"loopback does not work: {error}", "bring the interface up: ip link set lo up")
    return Finding("ok", f"a free port on loopback ({port})")


def check_hostname() -> Finding:
    """The machine's own name resolves; gloo and several machines need it."""
    name = socket.gethostname()
    try:
        return Finding("ok", f"{name} is {socket.gethostbyname(name)}")
    except OSError as error:
        step = f"add {name} to /etc/hosts, or set GLOO_SOCKET_IFNAME to an interface"
        return Finding("warn", f"{name} does not resolve: {error}", step)


def check_environment() -> Finding:
    """Variables that change a run without being seen."""
    stale = [name for name in _PLACES if name in os.environ]
    nccl = sorted(name for name in os.environ if name.startswith("NCCL_"))
    if stale:
        return Finding("warn", f"{', '.join(stale)} already set", f"unset {' '.join(stale)}")
    if nccl:
        return Finding("warn", f"{', '.join(nccl)} set", f"make sure they are meant: unset {' '.join(nccl)}")
    threads = os.environ.get("OMP_NUM_THREADS")
    if threads is None:
        return Finding("ok", "OMP_NUM_THREADS is not set; `colonnade run` sets cores / ranks")
    return Finding("ok", f"OMP_NUM_THREADS={threads}")


def check_packages() -> Finding:
    """Packages Colonnade needs, and those it uses where they are."""
    found = {name: _version(name) for name in (*_NEEDED, *_OPTIONAL)}
    detail = ", ".join(f"{name} {version or '-'}" for name, version in found.items())
    missing = [name for name in _NEEDED if found[name] is None]
    if missing:
        return Finding("bad", detail, f"pip install {' '.join(missing)}")
    return Finding("ok", detail)


def check_two_ranks() -> Finding:
    """An all-reduce between two ranks that `colonnade run` starts."""
    command = [sys.executable, "-m", "colonnade.cli", "run", "--nproc", "2", "-m", "colonnade.cli._smoke"]
    kept = {name: value for name, value in os.environ.items() if name not in _PLACES}
    started = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SMOKE_SECONDS, env=kept, check=False)
    except subprocess.TimeoutExpired:
        return Finding("bad", f"not finished after {_SMOKE_SECONDS} s", f"run it by hand: {' '.join(command)}")
    seconds = time.monotonic() - started
    if done.returncode != 0:
        return Finding("bad", (done.stderr.strip().splitlines() or ["no output"])[-1], " ".join(command))
    answer = json.loads(done.stdout)
    if answer["total"] != 3.0:
        return Finding("bad", f"the sum of 1 and 2 came out as {answer['total']}", " ".join(command))
    return Finding("ok", f"all-reduce right; {answer['seconds']:.2f} s to join and reduce, {seconds:.1f} s in all")


CHECKS: dict[str, Callable[[], Finding]] = {
    "python": check_python,
    "torch": check_torch,
    "devices": check_devices,
    "gloo": check_gloo,
    "cores": check_cores,
    "memory": check_memory,
    "shared memory": check_shared_memory,
    "limits": check_limits,
    "port": check_port,
    "hostname": check_hostname,
    "environment": check_environment,
    "packages": check_packages,
    "two ranks": check_two_ranks,
}


def _torch() -> Any:
    """Return torch, or None where it cannot be imported."""
    try:
        return importlib.import_module("torch")
    except (ImportError, OSError):
        return None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _meminfo() -> dict[str, int]:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return {}
    return {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB"


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)
