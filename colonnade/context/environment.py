"""Where rank, world size and address come from: arguments, else the launcher's environment, else a world of one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

from colonnade.errors import LaunchError


@dataclass(frozen=True)
class WorldAddress:
    """What a process must know to join its world, and who said so."""

    rank: int = 0
    world_size: int = 1
    local_rank: int | None = None
    host: str | None = None
    port: int | None = None
    source: str = "no launcher: a world of one"


@dataclass(frozen=True)
class Launcher:
    """The variables in which one launcher tells a process its rank, world size and local rank."""

    name: str
    rank: str
    world_size: str
    local_rank: str


TORCH = Launcher("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK")
SLURM = Launcher("SLURM", "SLURM_PROCID", "SLURM_NPROCS", "SLURM_LOCALID")
OPENMPI = Launcher("OpenMPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")


def detect(environ: Mapping[str, str] | None = None) -> WorldAddress:
    """Read the environment of whichever launcher started this process, or give a world of one.

    Only torchrun's variables are taken by themselves: a plain script inside a SLURM or MPI allocation has
    theirs set too, without being one of several ranks. Those are asked for by name.
    """
    environ = os.environ if environ is None else environ
    return read(TORCH, environ) if TORCH.rank in environ or TORCH.world_size in environ else WorldAddress()


def read(
    launcher: Launcher,
    environ: Mapping[str, str] | None = None,
    host: str | None = None,
    port: int | None = None,
) -> WorldAddress:
    """Read one launcher's variables; a missing or senseless one is an error that names it."""
    environ = os.environ if environ is None else environ
    local = environ.get(launcher.local_rank)
    port_text = environ.get("MASTER_PORT")
    address = WorldAddress(
        rank=_number(launcher, launcher.rank, environ),
        world_size=_number(launcher, launcher.world_size, environ),
        local_rank=int(local) if local is not None and local.isdigit() else None,
        host=host or environ.get("MASTER_ADDR"),
        port=port if port is not None else _port(port_text) if port_text else None,
        source=launcher.name,
    )
    _check(address)
    return address


def override(
    address: WorldAddress,
    rank: int | None = None,
    world_size: int | None = None,
    local_rank: int | None = None,
    host: str | None = None,
    port: int | None = None,
) -> WorldAddress:
    """`address` with the arguments that were given in place of what was detected."""
    given = {"rank": rank, "world_size": world_size, "local_rank": local_rank, "host": host, "port": port}
    changed = {name: value for name, value in given.items() if value is not None}
    if (rank is None) != (world_size is None) and address.world_size == 1:
        raise LaunchError(f"launch(rank={rank}, world_size={world_size}): give both or neither", code="C020")
    result = replace(address, **changed) if changed else address  # type: ignore[arg-type]
    _check(result)
    return result


def _number(launcher: Launcher, variable: str, environ: Mapping[str, str]) -> int:
    text = environ.get(variable)
    if text is None:
        left = [name for name in (launcher.rank, launcher.world_size) if name in environ]
        alone = f"unset {left[0]}, which is left over," if left else "call launch(config)"
        raise LaunchError(
            f"the environment variable {variable} is not set, so {launcher.name} did not start this process. Start it "
            f"with {launcher.name} or with `colonnade run --nproc N script.py`, or {alone} for a world of one.",
            code="C020",
        )
    if not text.isdigit():
        raise LaunchError(f"the environment variable {variable} is {text!r}; it must be a number", code="C020")
    return int(text)


def _port(text: str) -> int:
    if not text.isdigit() or not 0 < int(text) < 65536:
        raise LaunchError(f"MASTER_PORT is {text!r}; it must be a number from 1 to 65535", code="C020")
    return int(text)


def _check(address: WorldAddress) -> None:
    for name, value in (("rank", address.rank), ("world_size", address.world_size)):
        if not isinstance(value, int) or isinstance(value, bool):
            raise LaunchError(f"{name} must be an integer, not {value!r}", code="C020")
    if not 0 <= address.rank < address.world_size:
        raise LaunchError(
            f"rank {address.rank} of a world of {address.world_size} is impossible: ranks run from 0 to "
            f"world_size - 1 (from {address.source})",
            code="C020",
        )
    if address.port is not None and not (isinstance(address.port, int) and 0 < address.port < 65536):
        raise LaunchError(f"port must be a number from 1 to 65535, not {address.port!r}", code="C020")
