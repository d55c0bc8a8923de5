"""A world without processes in which ranks can talk: torch's fake process group, whose calls come back at once.

What a rank receives there is what it has sent, so values mean nothing. Shapes, dtypes and the calls themselves are those of a
real run, because the run's own code makes them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from colonnade.comm.groups import ProcessGroups
from colonnade.comm.torch_versions import apart_from_world
from colonnade.config import Config
from colonnade.context.parallel_context import ParallelContext


class FakeGroups(ProcessGroups):
    """The groups that one rank asks for, made when it does: of a large world these are few."""

    def group(self, ranks: Iterable[int]) -> Any:
        key = tuple(ranks)
        self.add(key, alone=True)
        return super().group(key)

    def second_group(self, ranks: Iterable[int], rank_sets: Iterable[Iterable[int]], backend: str) -> Any:
        """The fake backend moves every kind of memory, so the first group does."""
        return self.group(ranks)


@contextmanager
def fake_rank(config: Config, world_size: int, rank: int, context: ParallelContext) -> Iterator[FakeGroups]:
    """`context` is this rank of a world that is not there, but in which it can talk."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # the backend "fake" comes with it

    hook = sys.excepthook
    with apart_from_world():
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        sys.excepthook = hook  # no error is that of one rank
        try:
            groups = FakeGroups(rank)
            context.simulate(config, world_size, rank, groups)
            try:
                yield groups
            finally:
                context.destroy()
        finally:
            dist.destroy_process_group()
