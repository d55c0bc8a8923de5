"""Invented: the norms of the stages are joined by their maximum.

Shows as: a norm that is too small; every rank has the same.
"""

import torch.distributed as dist

from tests.corpus.runner import ALIKE, NORM, Bug, Run, squares

BUG = Bug(
    "invented: largest of the norms",
    "the largest norm of a stage is used for all stages",
    "norm-misses-shards",
    layout={"pipeline": 2},
    kind=ALIKE,
    settings={"clip_grad_norm": NORM, "num_microbatches": 2},
)


def plant(run: Run) -> None:
    def norm(engine):
        own = squares(engine).sqrt()
        dist.all_reduce(own, dist.ReduceOp.MAX)
        return own

    run.measure_by(norm)
