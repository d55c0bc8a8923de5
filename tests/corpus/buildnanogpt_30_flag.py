"""build-nanogpt #30: the flag that asks for the sums was set after the forward pass, which is too late.

Shows as: with accumulation every rank steps with its own gradient.
"""

from tests.corpus.runner import Bug, Run

BUG = Bug(
    "build-nanogpt #30",
    "with accumulation, gradients are never synchronized",
    "not-reduced",
    ranks=3,
    settings={"gradient_accumulation": 2},
)


def plant(run: Run) -> None:
    run.reduce_by(lambda name, gradient, context: None)
