"""This machine as a hardware file: its collectives and products, timed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import asdict
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from colonnade.planner.records import Hardware
from colonnade.testing import run_world

SMALL, LARGE = 1 << 10, 1 << 24
"""Bytes of the two messages that a link is timed with."""
_DTYPES = {"cpu": ("float32", "float64", "bfloat16"), "cuda": ("bfloat16", "float16", "float32")}


def measure_machine(nproc: int) -> Hardware:
    """Time products, memory and collectives between `nproc` processes of this machine: gloo on CPUs, NCCL on GPUs."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # More than there are would take turns, and a message wait for its turn: plans know of turns by themselves.
    ranks = min(nproc, torch.cuda.device_count() if device == "cuda" else len(os.sched_getaffinity(0)))
    backend, env = (
        "nccl" if device == "cuda" else "gloo",
        {"TORCH_DISTRIBUTED_DEBUG": "OFF"},
    )  # a debug mode is no link's fault
    found = run_world(max(1, ranks), measured, device, backend=backend, env=env, timeout=300)
    return Hardware(**found.values[0])


def measured(device: str) -> dict[str, Any]:
    """What one rank finds; on all ranks of a world alike."""
    size = dist.get_world_size()
    latency, bandwidth = _link(device) if size > 1 else (0.0, 1e12)
    flops = {name: _products(getattr(torch, name), device) for name in _DTYPES[device]}
    on_gpu = device == "cuda"
    memory = torch.cuda.get_device_properties(0).total_memory if on_gpu else _host_memory() // size
    return dict(
        name=torch.cuda.get_device_name(0) if on_gpu else "this machine's CPU",
        source=f"measured between {size} processes",
        devices_per_node=max(size, torch.cuda.device_count()) if on_gpu else 1 << 20,
        memory=int(memory * 0.94),
        matmul_flops=flops,
        matmul_efficiency=1.0,
        memory_bandwidth=_bandwidth(device),
        operator_latency=_operator(device),
        node_bandwidth=bandwidth,
        node_latency=latency,
        network_bandwidth=bandwidth,
        network_latency=latency,
        overlap=0.9 if on_gpu else 0.0,
        at_once=0 if on_gpu else len(os.sched_getaffinity(0)),
        backend=dist.get_backend(),
        device=device,
    )


def to_toml(machine: Hardware) -> str:
    """The file that `load_hardware` reads."""
    lines = ["# Measured by `colonnade plan --measure`. Bytes and seconds."]
    for key, value in asdict(machine).items():
        if key != "matmul_flops":
            lines.append(f'{key} = "{value}"' if isinstance(value, str) else f"{key} = {value!r}")
    lines += ["", "[matmul_flops]", *(f"{key} = {value!r}" for key, value in machine.matmul_flops.items())]
    return "\n".join(lines) + "\n"


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
