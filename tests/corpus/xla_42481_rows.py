"""openxla/xla #42481: the gradient of a split table was cut to the shard before it was summed over the ranks.

Shows as: row i of one shard holds row i of the other shard, too.
"""

from colonnade import ParallelMode
from tests.corpus.runner import TENSOR, Bug, Run, sum_over

BUG = Bug(
    "openxla/xla #42481",
    "shards of different ranks are summed over these ranks",
    "reduced-over-other-mode",
    layout={"tensor": 2},
    kind=TENSOR,
)


def plant(run: Run) -> None:
    def reduce(name, gradient, context):
        if name == "up.weight":
            sum_over(gradient, ParallelMode.TENSOR, context)

    run.reduce_by(reduce)
