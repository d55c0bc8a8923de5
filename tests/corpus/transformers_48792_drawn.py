"""transformers #48792: an adapter that came after the sharding was drawn by each rank from its own generator.

Shows as: the data ranks begin with other weights of one layer.
"""

import torch

from colonnade import ParallelMode
from tests.corpus.runner import EXPERTS, Bug, Run

BUG = Bug(
    "transformers #48792",
    "each data rank initializes a layer that was added late differently",
    "weights-differ-at-start",
    ranks=4,
    layout={"expert": 2},
    kind=EXPERTS,
)


def plant(run: Run) -> None:
    def draw(engine):
        generator = torch.Generator().manual_seed(engine.context.get_local_rank(ParallelMode.DATA))
        with torch.no_grad():
            weight = engine.model.enter.weight
            weight.copy_(torch.randn(weight.shape, generator=generator))

    run.after.append(draw)
