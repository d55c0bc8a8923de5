"""Megatron-LM #3746, #4802: the norm was read from `.grad` while the gradients lay elsewhere.

Shows as: a norm of zero, and nothing is clipped.
"""

import torch

from tests.corpus.runner import NORM, Bug, Run

BUG = Bug(
    "Megatron-LM #3746, #4802",
    "the norm is computed from empty gradients",
    "norm-of-a-part",
    settings={"clip_grad_norm": NORM},
)


def plant(run: Run) -> None:
    run.measure_by(lambda engine: torch.zeros((), dtype=torch.float64))
