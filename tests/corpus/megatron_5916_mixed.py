"""Megatron-LM #5916, second case: with unlike tensor sizes of dense layers and experts, gradients of unrelated shards mix.

Shows as: a shard's gradient is the mean of its own and of another rank's shard.
"""

from colonnade import ParallelMode
from tests.corpus.runner import TENSOR, Bug, Run, mean_over

BUG = Bug(
    "Megatron-LM #5916 (mixed shards)",
    "shards are averaged over the tensor ranks, not over the data ranks",
    "reduced-over-other-mode",
    ranks=4,
    layout={"tensor": 2},
    kind=TENSOR,
)


def plant(run: Run) -> None:
    def reduce(name, gradient, context):
        mean_over(gradient, ParallelMode.TENSOR if name == "up.weight" else ParallelMode.DATA, context)

    run.reduce_by(reduce)
