"""ROCm TransformerEngine #715: weights that tensor ranks replicate were marked as split, so the norm counted each copy.

Shows as: a norm 1.36 to 1.52 times too large at TP=8.
"""

from colonnade import ParallelMode
from tests.corpus.norms import split, taken_over, whole
from tests.corpus.runner import NORM, TENSOR, Bug, Run

BUG = Bug(
    "ROCm/TransformerEngine #715",
    "replicated weights of a linear layer count once for each tensor rank",
    "norm-counts-replicas",
    layout={"tensor": 2},
    kind=TENSOR,
    settings={"clip_grad_norm": NORM},
)


def plant(run: Run) -> None:
    def marked(name, parameter):
        return split(name, parameter) or name == "head.weight"

    run.measure_by(taken_over(ParallelMode.TENSOR, marked, lambda *one: whole(*one) and not marked(*one)))
