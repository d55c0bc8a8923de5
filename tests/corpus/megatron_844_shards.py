"""Megatron-LM #844 (TTrace): tied weights were summed over the stages after each stage had scattered its buffer over the data ranks.

Shows as: the copies lie in different parts of the buffers, so a reduced part is added to one that is not.
"""

from colonnade import ParallelMode
from tests.corpus.runner import TIED, Bug, Run, mean_over, sum_over

BUG = Bug(
    "Megatron-LM #844 (TTrace)",
    "a tied weight is all-reduced over stages before one copy is reduced over the data ranks",
    "not-reduced",
    ranks=4,
    layout={"pipeline": 2},
    kind=TIED,
    settings={"num_microbatches": 2},
)


def plant(run: Run) -> None:
    def reduce(name, gradient, context):
        if name not in ("table.weight", "head.weight"):
            mean_over(gradient, ParallelMode.DATA, context)
            return
        own = gradient.clone()
        mean_over(gradient, ParallelMode.DATA, context)
        owner = 1 if name == "table.weight" else 0
        if context.get_local_rank(ParallelMode.DATA) != owner:
            gradient.copy_(own)
        sum_over(gradient, ParallelMode.PIPELINE, context)

    run.reduce_by(reduce)
