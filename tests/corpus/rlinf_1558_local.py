"""RLinf #1558: the group to sum over was never found, so the norm was that of the own shard.

Shows as: a norm too small by about the root of the world's size.
"""

from colonnade import ParallelMode
from tests.corpus.runner import NORM, Bug, Run

BUG = Bug(
    "RLinf #1558",
    "each rank's norm contains only its own slice",
    "norm-misses-shards",
    settings={"clip_grad_norm": NORM},
)


def plant(run: Run) -> None:
    def norm(engine):
        at = engine.context.get_local_rank(ParallelMode.DATA)
        flat = [p.grad.flatten() for p in engine.model.parameters()]
        return sum(part.tensor_split(2)[at].double().square().sum() for part in flat).sqrt()

    run.measure_by(norm)
