"""Invented: what a stage hands on is detached, to save memory.

Shows as: the layers before it have no gradient.
"""

from tests.corpus.runner import TENSOR, Bug, Run


class Detached(TENSOR.model):
    def enter(self, x):
        return super().enter(x.detach())


BUG = Bug(
    "invented: detached",
    "the input of the sharded region is detached",
    "missing-gradient",
    layout={"tensor": 2},
    kind=TENSOR,
)


def plant(run: Run) -> None:
    run.model = Detached
