"""Apex #1512: the norm was taken of gradients that still had the loss scale in them.

Shows as: a norm that is as many times too large as the loss scale, and everything is clipped away.
"""

from tests.corpus.runner import NORM, Bug, Run, squares

BUG = Bug(
    "Apex #1512",
    "the norm is computed from gradients that include the loss scale",
    "loss-scale-left",
    settings={"clip_grad_norm": NORM},
)


def plant(run: Run) -> None:
    run.measure_by(lambda engine: 4096 * squares(engine).sqrt())
