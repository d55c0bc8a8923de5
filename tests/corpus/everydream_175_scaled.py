"""EveryDream2trainer #175: clipping looked at gradients that still had the loss scale on them.

Shows as: the norm is the loss scale too large, and next to nothing is left of a step.
"""

from tests.corpus.runner import NORM, Bug, Run, squares

BUG = Bug(
    "EveryDream2trainer #175",
    "the norm includes the loss scale",
    "loss-scale-left",
    settings={"clip_grad_norm": NORM},
)


def plant(run: Run) -> None:
    run.measure_by(lambda engine: 1024.0 * squares(engine).sqrt())
