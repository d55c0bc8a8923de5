"""Colossal-AI #3044: the gradient of the keys is summed over the sequence ranks and then divided by their number.

Shows as: the gradient of the key projection is too small by the number of sequence ranks.
"""

from colonnade import ParallelMode
from tests.corpus.models import Sequence, scaled_gradient
from tests.corpus.runner import SEQUENCE, Bug, Run

BUG = Bug(
    "Colossal-AI #3044",
    "the gradient of the keys is divided by the sequence size",
    "scaled-by-mode",
    layout={"sequence": 2},
    kind=SEQUENCE,
)


class Divided(Sequence):
    def keys(self, key):
        return scaled_gradient(super().keys(key), 1 / self.context.get_world_size(ParallelMode.SEQUENCE))


def plant(run: Run) -> None:
    run.model = Divided
