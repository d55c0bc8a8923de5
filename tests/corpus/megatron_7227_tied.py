"""Megatron-LM #7227, #7228: the norm counted the tied output weight of the last stage again.

Shows as: a norm that is too large; the gradients are right.
"""

import torch.distributed as dist

from tests.corpus.runner import NORM, TIED, Bug, Run, squares

BUG = Bug(
    "Megatron-LM #7227, #7228",
    "a tied weight counts in the norm once for each of its stages",
    "norm-counts-replicas",
    layout={"pipeline": 2},
    kind=TIED,
    settings={"num_microbatches": 2, "clip_grad_norm": NORM},
)


def norm(engine):
    total = squares(engine)
    dist.all_reduce(total)
    return total.sqrt()


def plant(run: Run) -> None:
    run.measure_by(norm)
