"""Colossal-AI's SEQUENCE_DP groups: with a pipeline and data parallelism they held ranks of several stages.

Shows as: a layer's gradient is the mean of its own and of another stage's layer.
"""

from colonnade import ParallelMode
from tests.corpus.runner import ALIKE, Bug, Run, mean_over

BUG = Bug(
    "Colossal-AI v0.1.8, SEQUENCE_DP",
    "gradients are averaged over ranks of two pipeline stages",
    "reduced-over-other-mode",
    ranks=4,
    layout={"pipeline": 2},
    kind=ALIKE,
    settings={"num_microbatches": 2},
)


def plant(run: Run) -> None:
    run.reduce_by(lambda name, gradient, context: mean_over(gradient, ParallelMode.PIPELINE, context))
