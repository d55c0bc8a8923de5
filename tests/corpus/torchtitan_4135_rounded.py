"""torchtitan #4135, pytorch #194033: the norm was taken in the dtype of the gradients, and rounded with them.

Shows as: a norm with three digits, which changes with the number of stages.
"""

import torch

from tests.corpus.runner import NORM, Bug, Run, squares

BUG = Bug(
    "torchtitan #4135, pytorch #194033",
    "the norm is rounded to bf16",
    "rounded",
    settings={"clip_grad_norm": NORM},
)


def plant(run: Run) -> None:
    run.measure_by(lambda engine: squares(engine).sqrt().to(torch.bfloat16).double())
