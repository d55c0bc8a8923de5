"""Colossal-AI: naming one gradient handler switches off all automatic ones, that of tied modules too.

Shows as: tied weights miss the part of the other stage; data parallelism is right.
"""

from colonnade import ParallelMode
from tests.corpus.runner import TIED, Bug, Run, mean_over

BUG = Bug(
    "Colossal-AI v0.1.8, gradient_handler",
    "naming a data-parallel handler disables the handler of tied weights",
    "tied-copy-missed",
    ranks=4,
    layout={"pipeline": 2},
    kind=TIED,
    settings={"num_microbatches": 2},
)


def plant(run: Run) -> None:
    run.reduce_by(lambda name, gradient, context: mean_over(gradient, ParallelMode.DATA, context))
