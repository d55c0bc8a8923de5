"""A script for two hosts: `count_job.py FOLDER` leaves, for each rank, its shard group, refused URLs and the keys that it asked the store for."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import colonnade
from colonnade.checkpoint import CheckpointManager
from colonnade.context import rendezvous
from colonnade.errors import ColonnadeError
from tests.hosts.counting import Counted

WAIT = 20.0
"""Seconds for which all ranks but the last wait for it."""


def main(folder: Path) -> None:
    """Hybrid sharding: replicas between hosts, shards inside."""
    stores: list[Any] = []
    connect: Any = rendezvous._connect
    rendezvous._connect = lambda *args: stores.append(Counted(connect(*args))) or stores[-1]  # type: ignore[assignment,func-returns-value,return-value]
    colonnade.ParallelMode.register("REPLICA", "replica", data="distinct")
    config = {"parallel": {"replica": {"size": 2}}, "zero": {"stage": 3, "replicate": "replica"}}
    gpc = colonnade.launch(config, verbose=False)
    found: dict[str, Any] = {"host": socket.gethostname(), "launch": stores[0].keys}
    engine = colonnade.initialize(
        nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 4)), lambda p: torch.optim.AdamW(p, lr=0.01), verbose=False
    )[0]
    engine.backward(engine(torch.ones(2, 16)).square().mean())
    engine.step()
    found["shards"] = gpc.get_ranks_in_group(colonnade.ParallelMode.DATA)
    found["replicas"] = gpc.get_ranks_in_group(colonnade.ParallelMode.REPLICA)  # type: ignore[attr-defined]
    os.chdir(folder / found["host"])
    try:
        CheckpointManager("s3://bucket/run", gpc)
    except ColonnadeError as error:
        found["refused"] = error.code
    found["left in the folder"] = sorted(os.listdir())
    dist.barrier()
    before, rank = stores[0].keys, gpc.get_global_rank()
    if rank == gpc.world_size - 1:
        time.sleep(WAIT)
    with gpc.waits.during("summing the gradients"):
        dist.barrier()
    found["wait"] = stores[0].keys - before
    (folder / f"counts{rank}.json").write_text(json.dumps(found))
    engine.close()
    gpc.destroy()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
