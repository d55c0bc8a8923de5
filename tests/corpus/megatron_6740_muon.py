"""Megatron-LM #6740: an optimizer that needs the whole matrix was fed other rows than the weight's own.

Shows as: gradients are right, updates are scaled by what each rank has.
"""

import torch

from tests.corpus.runner import TENSOR, Bug, Run

BUG = Bug(
    "Megatron-LM #6740",
    "an optimizer that needs full weights receives shards",
    "optimizer-differs",
    layout={"tensor": 2},
    kind=TENSOR,
)


class Normed(torch.optim.SGD):
    """Steps by gradients of length 1, as it is given them, and says that it knows how."""

    steps_on_parts = True

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter -= group["lr"] * parameter.grad / (parameter.grad.norm() + 1e-12)


def plant(run: Run) -> None:
    run.optimizer = lambda parameters: Normed(parameters, lr=0.1)
