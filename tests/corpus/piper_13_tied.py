"""Piper #13 (also pytorch #51931, PiPPy #32): a weight that two stages share is not kept equal.

Shows as: each stage steps with its own part of the gradient.
"""

from tests.corpus.runner import TIED, Bug, Run

BUG = Bug(
    "Piper #13",
    "tied weights are not all-reduced over their stages",
    "tied-copy-missed",
    layout={"pipeline": 2},
    kind=TIED,
    settings={"num_microbatches": 2},
)


def plant(run: Run) -> None:
    run.reduce_by(lambda name, gradient, context: None)
