"""How long things take on a machine, by a stated model; and the files that describe machines.

An operator takes a latency, and the longer of its products at the reached part of the peak and its memory at the bandwidth.
A collective takes a latency for each step of its algorithm and its bytes over the slowest link: the faster of a ring and a tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, fields
from math import ceil, inf, log2
from pathlib import Path
from typing import Any

import torch

from colonnade.config.files import read_file
from colonnade.errors import ConfigError, did_you_mean, listed
from colonnade.paths import local_path
from colonnade.planner.records import Hardware, Link

_FOLDER = Path(__file__).parent / "hardware"
_MAY_BE_ZERO = ("operator_latency", "node_latency", "network_latency", "overlap", "at_once")


def known_hardware() -> list[str]:
    """The machines that have a file here."""
    return sorted(path.stem for path in _FOLDER.glob("*.toml"))


def load_hardware(name: str) -> Hardware:
    """A machine by its name, or the path of a TOML file with the same keys."""
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
    missing = [name for name, each in known.items() if each.default is MISSING and name not in given]
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
        raise ConfigError(f'{path}: device = {given["device"]!r}: "cpu" or "cuda"')
    if given.get("overlap", 1.0) > 1:
        raise ConfigError(f"{path}: overlap = {given['overlap']!r}: a part of the time, from 0 to 1")
    return Hardware(**given)


class Clock:
    """Says how long things take on one kind of machine. Ranks fill nodes one after another."""

    def __init__(self, hardware: Hardware) -> None:
        self.hardware = hardware
        self._links: dict[tuple[int, ...], tuple[Link, int]] = {}

    def operator(self, flops: float, moved: float, dtype: torch.dtype) -> float:
        """An operator that does so many flops, in products, and reads and writes so many bytes."""
        machine = self.hardware
        computed = flops / (self.peak(dtype) * machine.matmul_efficiency) if flops else 0.0
        return machine.operator_latency + max(computed, moved / machine.memory_bandwidth)

    def peak(self, dtype: torch.dtype) -> float:
        """Flop/s of products of a dtype; of one that the machine's file does not name, of the slowest."""
        flops = self.hardware.matmul_flops
        return flops.get(str(dtype).removeprefix("torch."), min(flops.values()))

    def link(self, ranks: Sequence[int]) -> Link:
        """Where messages between these ranks go."""
        return self._link(tuple(ranks))[0]

    def collective(self, op: str, nbytes: int, ranks: Sequence[int]) -> float:
        """Seconds of one call over these ranks; `nbytes` as of `records.Collective`."""
        key = tuple(ranks)
        size = len(key)
        if size < 2:
            return 0.0
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
