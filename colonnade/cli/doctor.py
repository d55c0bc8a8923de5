"""`colonnade doctor`: checks of this machine, each with its status and the next step.

`CHECKS` maps each name to one function that returns a `DoctorFinding`.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import ipaddress
import json
import os
import platform
import resource
import shutil
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from colonnade.errors import LaunchError
from colonnade.launching.launch_job import cores
from colonnade.version import __version__

_COLOURS = {"ok": "green", "warn": "yellow", "bad": "red"}
_LEAST_MEMORY = 1 << 30
_LEAST_SHM = 1 << 30
_LEAST_FILES = 1024
_LEAST_THREADS = 4096
_WORLD_SECONDS = 120
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_NO_TORCH = ("torch cannot be imported", "pip install torch")
_OPTIONAL = ("tensorboard", "triton", "numpy")
_REQUIRED = ("safetensors", "rich", "typer")


@dataclass(frozen=True)
class DoctorFinding:
    """The result of one check."""

    status: Literal["ok", "warn", "bad"]
    detail: str
    next_step: str = ""


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of lines.")] = False,
) -> None:
    """Check that this machine can train, and print what to fix.

    Each line is ok, warn or bad, with the next step. The exit code is 1 if a line is bad.
    """
    findings = {name: check() for name, check in CHECKS.items()}
    healthy = all(finding.status != "bad" for finding in findings.values())
    if as_json:
        checks = [{"name": name, **dataclasses.asdict(finding)} for name, finding in findings.items()]
        typer.echo(json.dumps({"colonnade": __version__, "ok": healthy, "checks": checks}, indent=2))
    else:
        _show(findings)
        typer.echo(f"\n{next_step(findings)}")
    raise typer.Exit(0 if healthy else 1)


def next_step(findings: dict[str, DoctorFinding]) -> str:
    """Return the recommended next step as one sentence."""
    bad = [name for name, finding in findings.items() if finding.status == "bad"]
    if bad:
        return f"Next: fix the items marked bad ({', '.join(bad)}), then run `colonnade doctor` again."
    warned = [name for name, finding in findings.items() if finding.status == "warn"]
    also = f" Check the warnings ({', '.join(warned)}) before a long run." if warned else ""
    torch = _torch()
    ranks = (torch.cuda.device_count() if torch is not None else 0) or min(4, cores())
    return (
        f"Next: `colonnade demo` trains a small model; `colonnade run --nproc {ranks} train.py` runs your script.{also}"
    )


def check_python() -> DoctorFinding:
    """Report the running Python version. Every version that can install the package is recent enough."""
    return DoctorFinding("ok", f"{platform.python_version()} at {sys.executable}")


def check_torch() -> DoctorFinding:
    """Check that torch is recent and has torch.distributed."""
    torch = _torch()
    if torch is None:
        return DoctorFinding("bad", *_NO_TORCH)
    from colonnade._launch import check_torch as check_version

    try:
        check_version(torch.__version__)
    except LaunchError as error:
        return DoctorFinding("bad", torch.__version__, str(error))
    if not torch.distributed.is_available():
        return DoctorFinding(
            "bad", f"{torch.__version__} without torch.distributed", "install a torch build with torch.distributed"
        )
    return DoctorFinding("ok", torch.__version__)


def check_devices() -> DoctorFinding:
    """Report the CUDA devices, and check NCCL."""
    torch = _torch()
    if torch is None or not torch.cuda.is_available():
        return DoctorFinding("ok", "no CUDA device: ranks run on the CPU")
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    if not torch.distributed.is_nccl_available():
        return DoctorFinding("warn", f"{len(names)} devices, no NCCL", "install a torch build with NCCL")
    version = ".".join(map(str, torch.cuda.nccl.version()))
    return DoctorFinding("ok", f"{len(names)} x {names[0]}, NCCL {version}")


def check_gloo() -> DoctorFinding:
    """Check gloo, the backend of CPU ranks and of control messages."""
    torch = _torch()
    if torch is None or not torch.distributed.is_gloo_available():
        return DoctorFinding("bad", "not available", "install a torch build with gloo")
    return DoctorFinding("ok", "available")


def check_cores() -> DoctorFinding:
    """Report the CPU cores and torch threads."""
    torch = _torch()
    threads = f", torch uses {torch.get_num_threads()} threads" if torch else ""
    return DoctorFinding("ok", f"{cores()} usable of {os.cpu_count()}{threads}")


def check_memory() -> DoctorFinding:
    """Check the free memory."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return DoctorFinding("ok", "unknown on this system")
    facts = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}
    detail = f"{_gib(facts['MemAvailable'])} free of {_gib(facts['MemTotal'])}"
    if facts["MemAvailable"] < _LEAST_MEMORY:
        return DoctorFinding(
            "warn", detail, "each rank needs about 0.3 GiB before its model: stop other programs or use fewer ranks"
        )
    return DoctorFinding("ok", detail)


def check_shared_memory() -> DoctorFinding:
    """Check the free space in /dev/shm, which data loaders and NCCL use for buffers."""
    if not Path("/dev/shm").is_dir():
        return DoctorFinding("ok", "no /dev/shm on this system")
    usage = shutil.disk_usage("/dev/shm")
    detail = f"{_gib(usage.free)} free of {_gib(usage.total)} in /dev/shm"
    if usage.free < _LEAST_SHM:
        return DoctorFinding("warn", detail, "data loader workers may crash; start a container with --shm-size=8g")
    return DoctorFinding("ok", detail)


def check_limits() -> DoctorFinding:
    """Check the limits of open files and threads: a gloo group uses three threads and one socket per peer."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    tasks = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    detail = f"{_limit(files)} open files, {_limit(tasks)} processes"
    if 0 <= files < _LEAST_FILES:
        return DoctorFinding("warn", detail, f"ulimit -n {_LEAST_FILES * 64}")
    if 0 <= tasks < _LEAST_THREADS:
        return DoctorFinding("warn", detail, f"ulimit -u {_LEAST_THREADS * 8}")
    return DoctorFinding("ok", detail)


def check_port() -> DoctorFinding:
    """Check that a port on the loopback interface can be opened and reached."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
    except OSError as error:
        return DoctorFinding("bad", f"loopback does not work: {error}", "bring the interface up: ip link set lo up")
    return DoctorFinding("ok", f"opened and reached port {port} on the loopback interface")


def check_hostname() -> DoctorFinding:
    """Check the address of the host name, which gloo announces to the other machines of a job."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        step = f"add {name} to /etc/hosts, or set GLOO_SOCKET_IFNAME to an interface of `ip link`"
        return DoctorFinding("warn", f"{name} does not resolve: {error}", step)
    if ipaddress.ip_address(address).is_loopback and "GLOO_SOCKET_IFNAME" not in os.environ:
        step = (
            f"fine on one machine; for several, map {name} to a network address in /etc/hosts, or set "
            f"GLOO_SOCKET_IFNAME to an interface of `ip link`"
        )
        return DoctorFinding("warn", f"{name} resolves to the loopback address {address}", step)
    return DoctorFinding("ok", f"{name} resolves to {address}")


def check_environment() -> DoctorFinding:
    """Report environment variables that silently change a run."""
    stale = [name for name in _RANK_VARIABLES if name in os.environ]
    nccl = sorted(name for name in os.environ if name.startswith("NCCL_"))
    if stale:
        return DoctorFinding("warn", f"{', '.join(stale)} already set", f"unset {' '.join(stale)}")
    if nccl:
        return DoctorFinding("warn", f"{', '.join(nccl)} set", f"if this is not intended: unset {' '.join(nccl)}")
    threads = os.environ.get("OMP_NUM_THREADS")
    if threads is None:
        return DoctorFinding("ok", "OMP_NUM_THREADS is not set; `colonnade run` sets it to cores / ranks")
    return DoctorFinding("ok", f"OMP_NUM_THREADS={threads}")


def check_packages() -> DoctorFinding:
    """Check the required packages, and report the optional ones."""
    found = {name: _version(name) for name in (*_REQUIRED, *_OPTIONAL)}
    detail = ", ".join(f"{name} {version or '-'}" for name, version in found.items())
    missing = [name for name in _REQUIRED if found[name] is None]
    if missing:
        return DoctorFinding("bad", detail, f"pip install {' '.join(missing)}")
    return DoctorFinding("ok", detail)


def check_two_ranks() -> DoctorFinding:
    """Run an all-reduce between two ranks."""
    if _torch() is None:
        return DoctorFinding("bad", *_NO_TORCH)
    from colonnade.testing import run_world

    result = run_world(2, _reduce_ones, timeout=_WORLD_SECONDS, check=False)
    if result.root_cause is not None:
        step = "read the lines above; GLOO_SOCKET_IFNAME, if set, must name an interface of `ip link`"
        return DoctorFinding("bad", result.root_cause.headline, step)
    totals, seconds = zip(*result.values, strict=True)
    if totals != (3.0, 3.0):
        return DoctorFinding("bad", f"the all-reduce of 1 and 2 gave {totals[0]} and {totals[1]}", "reinstall torch")
    return DoctorFinding(
        "ok",
        f"all-reduce correct: {max(seconds):.2f} s, {result.seconds:.1f} s with start-up (usual: below 0.5 and 10 s)",
    )


def _reduce_ones() -> tuple[float, float]:
    """On a rank: all-reduce rank + 1 over the world; returns the result and the seconds."""
    from torch import distributed, tensor

    started = time.monotonic()
    total = tensor([float(distributed.get_rank() + 1)])
    distributed.all_reduce(total)
    return total.item(), time.monotonic() - started


CHECKS: dict[str, Callable[[], DoctorFinding]] = {
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
    """torch, or None if it cannot be imported."""
    try:
        return importlib.import_module("torch")
    except (ImportError, OSError):
        return None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB"


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def _show(findings: dict[str, DoctorFinding]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    for name, finding in findings.items():
        table.add_row(Text(finding.status, style=_COLOURS[finding.status]), name, finding.detail)
        if finding.next_step:
            table.add_row("", "", Text(f"-> {finding.next_step}", style="bold"))
    Console().print(table)
