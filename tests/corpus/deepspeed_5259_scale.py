"""DeepSpeed #5259 and #6546: the scale of experts' gradients did not fit their groups.

Shows as: experts' gradients are divided by the size of the expert group once more.
"""

from colonnade import ParallelMode
from tests.corpus.experts import is_expert, right
from tests.corpus.runner import EXPERTS, Bug, Run

BUG = Bug(
    "DeepSpeed #5259, #6546",
    "gradients of experts are divided by the number of all ranks, and again by their group",
    "wrong-divisor",
    ranks=4,
    layout={"expert": 2},
    kind=EXPERTS,
)


def plant(run: Run) -> None:
    def reduce(name, gradient, context):
        right(name, gradient, context)
        if is_expert(name):
            gradient /= context.get_world_size(ParallelMode.EXPERT)

    run.reduce_by(reduce)
