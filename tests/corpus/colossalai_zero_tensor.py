"""Colossal-AI v0.1.8: a gradient that ZeRO and tensor parallelism both cut was summed over the tensor ranks only.

Shows as: the norm lacks the slices of the other data ranks.
"""

import torch.distributed as dist

from colonnade import ParallelMode
from tests.corpus.norms import whole
from tests.corpus.runner import NORM, TENSOR, Bug, Run, is_split, squares

BUG = Bug(
    "Colossal-AI v0.1.8, ZeRO and tensor",
    "slices of split gradients are not summed over the data ranks",
    "norm-misses-shards",
    ranks=4,
    layout={"tensor": 2},
    kind=TENSOR,
    settings={"clip_grad_norm": NORM},
)


def plant(run: Run) -> None:
    def norm(engine):
        at = engine.context.get_local_rank(ParallelMode.DATA)
        split = [p.grad.flatten() for p in engine.model.parameters() if is_split(p)]
        own = sum(part.tensor_split(2)[at].double().square().sum() for part in split)
        dist.all_reduce(own, group=engine.context.get_group(ParallelMode.TENSOR))
        return (own + squares(engine, whole)).sqrt()

    run.measure_by(norm)
