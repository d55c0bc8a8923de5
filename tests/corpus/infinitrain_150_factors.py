"""InfiniTrain #150: the factor of an adapter that all tensor ranks hold was drawn on each of them.

Shows as: the tensor ranks begin with other values of that factor.
"""

import torch

from colonnade import ParallelMode
from tests.corpus.bridge_5634_detached import Adapted
from tests.corpus.runner import Bug, Kind, Run

BUG = Bug(
    "InfiniTrain #150",
    "each tensor rank initializes a replicated adapter factor differently",
    "weights-differ-at-start",
    ranks=4,
    layout={"tensor": 2},
    kind=Kind(Adapted),
)


def plant(run: Run) -> None:
    def draw(engine):
        generator = torch.Generator().manual_seed(engine.context.get_local_rank(ParallelMode.TENSOR))
        with torch.no_grad():
            weight = engine.model.small.weight
            weight.copy_(torch.randn(weight.shape, generator=generator))

    run.after.append(draw)
