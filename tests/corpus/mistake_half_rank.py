"""Invented: autocast is on in one rank's environment, so its layers compute in 16 bits.

Shows as: one rank's outputs have three digits.
"""

import torch

from colonnade import ParallelMode
from tests.corpus.runner import TENSOR, Bug, Run

BUG = Bug("invented: a rank in bf16", "the second data rank rounds its activations", "rounded", kind=TENSOR)


def plant(run: Run) -> None:
    class Rounding(run.kind.model):
        def leave(self, y):
            own = super().leave(y)
            return own.to(torch.bfloat16).to(y.dtype) if self.context.get_local_rank(ParallelMode.DATA) == 1 else own

    run.model = Rounding
