"""The time model of a machine, and the TOML files that describe machines.

If the file has the samples of a calibration sweep, kernels, the host and collectives take what was measured (`kernels.py`, `clocks.py`).
Otherwise an operator takes a latency plus the longer of two times: its matrix products at the reachable part of the peak, and its
memory traffic at the memory bandwidth. A collective takes a latency for each step of its algorithm plus its bytes over
the slowest link; an all-reduce takes the faster of a ring and a tree.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import MISSING, asdict, fields
from math import ceil, exp, inf, log2
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from colonnade.config.config import read_file
from colonnade.errors import ConfigError, did_you_mean, listed
from colonnade.paths import local_path
from colonnade.proof.planner.clocks import HostTimes
from colonnade.proof.planner.kernels import KernelTimes, Operator
from colonnade.proof.planner.plan_records import Hardware, Link
from colonnade.proof.planner.sweep import Sweep, collectives
from colonnade.testing import run_world

_FOLDER = Path(__file__).parent / "hardware_files"
_MAY_BE_ZERO = ("operator_latency", "node_latency", "network_latency", "overlap", "at_once")


def known_hardware() -> list[str]:
    """Return the names of the machines with a file in this package."""
    return sorted(path.stem for path in _FOLDER.glob("*.toml"))


def load_hardware(name: str) -> Hardware:
    """Load a machine by its name, or from the path of a TOML file with the same keys."""
    path = local_path(name, "--hardware") if name.endswith(".toml") else _FOLDER / f"{name}.toml"
    if not path.exists():
        raise ConfigError(
            f"--hardware {name!r}: known are {listed(known_hardware())}, or the path of a .toml file."
            f"{did_you_mean(name, known_hardware())} `colonnade plan --measure` writes one of this machine"
        )
    return _checked(read_file(path)[0], path)


def _checked(given: dict[str, Any], path: Path) -> Hardware:
    known = {each.name: each for each in fields(Hardware)}
    for key in given:
        if key not in known:
            raise ConfigError(f"{path}: unknown key {key!r}; allowed are {listed(known)}.{did_you_mean(key, known)}")
    missing = [
        name
        for name, each in known.items()
        if each.default is MISSING and each.default_factory is MISSING and name not in given
    ]
    if missing:
        raise ConfigError(f"{path}: {listed(missing)} missing; {_FOLDER / 'h100.toml'} is an example")
    flops = given["matmul_flops"]
    if not isinstance(flops, dict) or not flops:
        raise ConfigError(f"{path}: matmul_flops is a table of flop/s by dtype, such as bfloat16 = 989e12")
    numbers = {name: given[name] for name in given if known[name].type in ("int", "float")}
    numbers |= {f"matmul_flops.{key}": value for key, value in flops.items()}
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < inf:
            raise ConfigError(f"{path}: {name} = {value!r}: a number that is not negative, in bytes, seconds or flop/s")
        if value == 0 and name not in _MAY_BE_ZERO:
            raise ConfigError(f"{path}: {name} = {value!r}: a number above 0")
    for name in (name for name in given if known[name].type == "str"):
        if not isinstance(given[name], str):
            raise ConfigError(f"{path}: {name} = {given[name]!r}: a text, in quotes")
    if given.get("device", "cuda") not in ("cpu", "cuda"):
        raise ConfigError(f'{path}: device is {given["device"]!r}; it must be "cpu" or "cuda"')
    for table, rows in given.get("kernels", {}).items():
        if not all(
            isinstance(row, list) and len(row) > 1 and all(isinstance(each, (int, float)) for each in row)
            for row in rows
        ):
            raise ConfigError(f"{path}: kernels.{table}: a list of rows of numbers, (sizes ..., seconds)")
    if given.get("overlap", 1.0) > 1:
        raise ConfigError(f"{path}: overlap is {given['overlap']!r}; it must be a number from 0 to 1")
    return Hardware(**given)


class Clock:
    """Estimates the time of operators and collectives on one kind of machine. Ranks fill nodes in order."""

    def __init__(self, hardware: Hardware) -> None:
        self.hardware = hardware
        self.kernels = KernelTimes(hardware.kernels) if hardware.kernels else None
        self.host = HostTimes(hardware.kernels) if hardware.kernels else None
        self._links: dict[tuple[int, ...], tuple[Link, int]] = {}

    def operator(self, op: Operator) -> float:
        """Return the seconds that the device is busy with one call of an operator."""
        if self.kernels is not None:
            return self.hardware.operator_latency + self.kernels.seconds(op) * self.hardware.contention
        machine = self.hardware
        computed = op.flops / (self.peak(op.dtype) * machine.matmul_efficiency) if op.flops else 0.0
        return machine.operator_latency + max(computed, op.moved / machine.memory_bandwidth)

    def host_seconds(self, kind: str, forward: bool) -> float:
        """Return the seconds that the host takes to issue one operator; 0 if the hardware file has no samples of it."""
        return self.host.seconds(kind, forward) if self.host is not None else 0.0

    def peak(self, dtype: torch.dtype) -> float:
        """Return the peak flop/s of matrix products in a dtype.

        For a dtype that the machine's file lacks, this is the peak of the slowest dtype.
        """
        flops = self.hardware.matmul_flops
        return flops.get(str(dtype).removeprefix("torch."), min(flops.values()))

    def link(self, ranks: Sequence[int]) -> Link:
        """Return the slowest link between these ranks: "node" or "network"."""
        return self._link(tuple(ranks))[0]

    def collective(self, op: str, nbytes: int, ranks: Sequence[int]) -> float:
        """Return the seconds of one call over these ranks; `nbytes` is defined as in `plan_records.PlannedCollective`."""
        key = tuple(ranks)
        size = len(key)
        if size < 2:
            return 0.0
        measured = self.kernels.tables.get(f"collective {'send' if op == 'receive' else op}") if self.kernels else None
        if measured is not None:
            return exp(measured.log_seconds((max(nbytes, 1),)))
        link, inside = self._link(key)
        latency, bandwidth = self._speeds(link, inside)
        steps = ceil(log2(size))
        part = nbytes * (size - 1) / size / bandwidth
        if op == "all_reduce":
            ring, tree = 2 * (size - 1) * latency + 2 * part, 2 * steps * latency + 2 * nbytes / bandwidth
            return min(ring, tree)
        if op in ("all_gather", "reduce_scatter"):
            # By halves, which takes few steps; a ring is no faster on links that are alike.
            return steps * latency + part
        if op == "all_to_all":
            return self._all_to_all(nbytes, size, link, inside)
        if op in ("send", "receive"):
            return latency + nbytes / bandwidth
        return steps * latency + nbytes / bandwidth

    def _all_to_all(self, nbytes: int, size: int, link: Link, inside: int) -> float:
        """All messages at once: those to the own node by its links, the others by the network."""
        machine = self.hardware
        each = nbytes / size
        within = each * (inside - 1) / machine.node_bandwidth
        across = each * (size - inside) / machine.network_bandwidth
        latency = machine.network_latency if link == "network" else machine.node_latency
        return ceil(log2(size)) * latency + max(within, across)

    def _speeds(self, link: Link, inside: int) -> tuple[float, float]:
        """(latency, bandwidth); between nodes, the ranks of a group in one node use all their ports together."""
        machine = self.hardware
        if link == "node":
            return machine.node_latency, machine.node_bandwidth
        return machine.network_latency, min(machine.node_bandwidth, machine.network_bandwidth * inside)

    def _link(self, ranks: tuple[int, ...]) -> tuple[Link, int]:
        """The link, and how many of the ranks are in the first one's node."""
        if ranks not in self._links:
            nodes = self.hardware.devices_per_node
            inside = sum(rank // nodes == ranks[0] // nodes for rank in ranks)
            self._links[ranks] = ("node" if inside == len(ranks) else "network"), inside
        return self._links[ranks]


# --- This machine as a hardware file: its collectives and products, timed -------------------------


_BETWEEN_KERNELS = 1.5e-6
"""Seconds from the end of a kernel to the start of the next one that is already launched (H200: 1.0 to 1.6)."""
_CONTEXT = 1_500_000_000
"""Bytes of a GPU that a process needs for its context and its libraries (H200 with cuBLAS, cuDNN and NCCL: 1.41 GB)."""
SMALL, LARGE = 1 << 10, 1 << 24
"""Bytes of the two messages that a link is timed with."""
_DTYPES = {"cpu": ("float32", "float64", "bfloat16"), "cuda": ("bfloat16", "float16", "float32")}


def measure_machine(nproc: int) -> Hardware:
    """Measure matrix products, memory and collectives with `nproc` processes on this machine.

    The backend is gloo on CPUs and NCCL on GPUs.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # More than there are would take turns, and a message wait for its turn: plans know of turns by themselves.
    ranks = min(nproc, torch.cuda.device_count() if device == "cuda" else len(os.sched_getaffinity(0)))
    backend, env = (
        "nccl" if device == "cuda" else "gloo",
        {"TORCH_DISTRIBUTED_DEBUG": "OFF"},
    )  # a debug mode is no link's fault
    found = run_world(max(1, ranks), measured, device, backend=backend, env=env, timeout=400)
    return Hardware(**found.values[0])


def measured(device: str) -> dict[str, Any]:
    """Measure on one rank; returns the values of the hardware file. All ranks of the world must call."""
    size = dist.get_world_size()
    latency, bandwidth = _link(device) if size > 1 else (0.0, 1e12)
    flops = {name: _products(getattr(torch, name), device) for name in _DTYPES[device]}
    on_gpu = device == "cuda"
    kernels = _swept() if on_gpu else {}
    if on_gpu and size > 1:
        kernels |= collectives()
    memory = torch.cuda.get_device_properties(0).total_memory if on_gpu else _host_memory() // size
    return dict(
        name=torch.cuda.get_device_name(0) if on_gpu else "this machine's CPU",
        source=f"measured between {size} processes",
        devices_per_node=max(size, torch.cuda.device_count()) if on_gpu else 1 << 20,
        memory=memory - _CONTEXT if on_gpu else int(memory * 0.94),
        matmul_flops=flops,
        matmul_efficiency=1.0,
        memory_bandwidth=_bandwidth(device),
        operator_latency=_BETWEEN_KERNELS if on_gpu else _operator(device),
        node_bandwidth=bandwidth,
        node_latency=latency,
        network_bandwidth=bandwidth,
        network_latency=latency,
        overlap=0.9 if on_gpu else 0.0,
        at_once=0 if on_gpu else len(os.sched_getaffinity(0)),
        backend=dist.get_backend(),
        device=device,
        kernels=kernels,
    )


def _swept() -> dict[str, list[list[float]]]:
    """The calibration sweep of rank 0 while the others wait."""
    found = Sweep().run() if dist.get_rank() == 0 else {}
    dist.barrier()
    return {table: rows for table, rows in found.items() if not table.startswith("check")}


def to_toml(machine: Hardware) -> str:
    """Return the text of the file that `load_hardware` reads."""
    lines = ["# Measured by `colonnade plan --measure`. Bytes and seconds."]
    for key, value in asdict(machine).items():
        if key not in ("matmul_flops", "kernels"):
            lines.append(f'{key} = "{value}"' if isinstance(value, str) else f"{key} = {value!r}")
    lines += ["", "[matmul_flops]", *(f"{key} = {value!r}" for key, value in machine.matmul_flops.items())]
    if machine.kernels:
        lines += ["", "[kernels]  # rows of (sizes ..., seconds); see docs/reference/plan.md"]
        lines += [f'"{table}" = {_rows(rows)}' for table, rows in machine.kernels.items()]
    return "\n".join(lines) + "\n"


def _rows(rows: Sequence[Sequence[float]]) -> str:
    """Samples as text, with four digits."""
    return (
        "["
        + ", ".join(f"[{', '.join(f'{value:.4g}' if value < 1 else f'{value:.0f}' for value in row)}]" for row in rows)
        + "]"
    )


def _link(device: str) -> tuple[float, float]:
    """(latency of a step, bytes/s) of an all-reduce, as the ring's formula has them."""
    size = dist.get_world_size()
    small, large = (torch.zeros(count // 4, device=device) for count in (SMALL, LARGE))
    first = _seconds(lambda: dist.all_reduce(small), device, 30)
    second = _seconds(lambda: dist.all_reduce(large), device, 5)
    steps = 2 * (size - 1)
    return first / steps, 2 * (LARGE - SMALL) * (size - 1) / size / max(second - first, 1e-9)


def _products(dtype: torch.dtype, device: str) -> float:
    """Flop/s of a product that is large for the device, on one rank at a time."""
    edge = 8192 if device == "cuda" else 512
    one = torch.ones(edge, edge, device=device, dtype=dtype)
    return _alone(lambda: 2 * edge**3 / _seconds(lambda: one @ one, device, 5))


def _bandwidth(device: str) -> float:
    one = torch.ones(1 << (28 if device == "cuda" else 20), device=device)
    return _alone(lambda: 2 * one.nbytes / _seconds(lambda: one * 2.0, device, 10))


def _operator(device: str) -> float:
    one = torch.ones(16, device=device, requires_grad=True)
    return _alone(lambda: _seconds(lambda: [one * 2.0 for _ in range(100)], device, 10) / 100)


def _alone(find: Callable[[], float]) -> float:
    """What rank 0 finds while the others wait."""
    if dist.get_rank() == 0:
        find()
        found = find()
    dist.barrier()
    return found if dist.get_rank() == 0 else 0.0


def _seconds(call: Callable[[], Any], device: str, times: int) -> float:
    found = []
    for _ in range(times + 2):
        start = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - start)
    return median(found[2:])


def _host_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
