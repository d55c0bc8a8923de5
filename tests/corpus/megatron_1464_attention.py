"""Megatron-LM #1464 (found by TTrace): wrong gradients of attention under context parallelism.

Shows as: forward is right; the gradients of keys miss what the other ranks' queries give them.
"""

from colonnade import ParallelMode
from colonnade.parallel.collectives import gather
from tests.corpus.runner import SEQUENCE, Bug, Run

BUG = Bug(
    "Megatron-LM #1464 (TTrace)",
    "keys receive only the gradient of their own rank's queries",
    "partial-gradient",
    layout={"sequence": 2},
    kind=SEQUENCE,
)


class OwnQueries(SEQUENCE.model):
    def keys(self, key):
        return gather(key, ParallelMode.SEQUENCE, 1, context=self.context)


def plant(run: Run) -> None:
    run.model = OwnQueries
