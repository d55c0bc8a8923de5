"""Automodel #3822: parameters that tensor ranks replicate were not made equal after the model was built.

Shows as: replicas begin with different weights.
"""

import torch

from colonnade import ParallelMode
from tests.corpus.runner import TENSOR, Bug, Run

BUG = Bug(
    "Automodel #3822",
    "a replicated layer starts with different weights on the tensor ranks",
    "weights-differ-at-start",
    layout={"tensor": 2},
    kind=TENSOR,
)


def plant(run: Run) -> None:
    def move(engine):
        with torch.no_grad():
            engine.model.head.weight += 0.1 * engine.context.get_local_rank(ParallelMode.TENSOR)

    run.after.append(move)
