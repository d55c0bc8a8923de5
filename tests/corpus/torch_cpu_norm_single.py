"""torch on a CPU: the squares of a gradient are added up in single precision, one after another.

Shows as: a norm with seven digits, or fewer for large gradients.
"""

import torch

from tests.corpus.runner import NORM, Bug, Run

BUG = Bug(
    "torch CPU, norm in fp32",
    "squares are summed in single precision",
    "rounded",
    settings={"clip_grad_norm": NORM},
)


def plant(run: Run) -> None:
    def single(engine):
        everything = torch.cat([p.grad.float().flatten() for p in engine.model.parameters()])
        return everything.square().cumsum(0)[-1].sqrt().double()

    run.measure_by(single)
