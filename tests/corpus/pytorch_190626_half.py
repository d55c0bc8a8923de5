"""pytorch #190626: the sum over the tensor ranks ran in bf16, though a reduction in fp32 had been asked for.

Shows as: gradients of replicated parameters are rounded to three digits.
"""

import torch

from colonnade import ParallelMode
from tests.corpus.runner import PARTIAL_NORM, Bug, Run, sum_over

BUG = Bug(
    "pytorch #190626",
    "partial results are all-reduced over the tensor ranks in bf16",
    "rounded",
    layout={"tensor": 2},
    kind=PARTIAL_NORM,
)


def plant(run: Run) -> None:
    def reduce(name, gradient, context):
        if name.startswith("norm"):
            short = gradient.to(torch.bfloat16)
            sum_over(short, ParallelMode.TENSOR, context)
            gradient.copy_(short)

    run.reduce_by(reduce)
