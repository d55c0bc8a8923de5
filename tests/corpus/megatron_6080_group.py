"""Megatron-LM #6080: expert gradients were reduced over the wrong group.

Shows as: an expert's gradient is the mean of its own and another expert's.
"""

from colonnade import ParallelMode
from tests.corpus.experts import is_expert
from tests.corpus.runner import EXPERTS, Bug, Run, mean_over

BUG = Bug(
    "Megatron-LM #6080",
    "experts are reduced over ranks with other experts",
    "reduced-over-other-mode",
    ranks=4,
    layout={"expert": 2},
    kind=EXPERTS,
)


def plant(run: Run) -> None:
    def reduce(name, gradient, context):
        if is_expert(name):
            mean_over(gradient, ParallelMode.EXPERT, context)
            gradient /= 2
        else:
            mean_over(gradient, ParallelMode.DATA, context)

    run.reduce_by(reduce)
