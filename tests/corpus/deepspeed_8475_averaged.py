"""DeepSpeed #8469, #8475: norms of ranks that own different experts were averaged (7.236 for 10.954).

Shows as: a norm that is too small; the other ranks' experts are not added.
"""

import torch.distributed as dist

from tests.corpus.norms import everything, taken_over
from tests.corpus.runner import EXPERTS, NORM, Bug, Run

BUG = Bug(
    "DeepSpeed #8469, #8475",
    "the ranks' norms are averaged, although each rank has different experts",
    "norms-averaged",
    layout={"expert": 2},
    kind=EXPERTS,
    settings={"clip_grad_norm": NORM},
)


def plant(run: Run) -> None:
    def norm(engine):
        own = taken_over(None, everything)(engine)
        dist.all_reduce(own)
        return own / 2

    run.measure_by(norm)
