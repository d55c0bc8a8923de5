"""DeepSpeed #1252: parameters that pipeline stages replicate counted in the norm once for each.

Shows as: a norm that is too large, with data parallelism as without.
"""

import torch.distributed as dist

from colonnade import ParallelMode
from tests.corpus.runner import NORM, TIED, Bug, Run, squares

BUG = Bug(
    "DeepSpeed #1252",
    "parameters that are replicated over stages count in the norm once for each stage",
    "norm-counts-replicas",
    ranks=4,
    layout={"pipeline": 2},
    kind=TIED,
    settings={"num_microbatches": 2, "clip_grad_norm": NORM},
)


def norm(engine):
    total = squares(engine)
    dist.all_reduce(total, group=engine.context.get_group(ParallelMode.PIPELINE))
    return total.sqrt()


def plant(run: Run) -> None:
    run.measure_by(norm)
