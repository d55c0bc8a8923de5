"""CenterPoint #109: in distributed runs the weights of norms were given to no optimizer.

Shows as: they stay at ones and zeros.
"""

import torch

from tests.corpus.runner import TENSOR, Bug, Run

BUG = Bug(
    "CenterPoint #109",
    "normalization layers are in no group of the optimizer",
    "not-updated",
    layout={"tensor": 2},
    kind=TENSOR,
)


def plant(run: Run) -> None:
    def leave(engine):
        step, norms = engine._stepper.step, list(engine.model.norm.parameters())

        def stepped(outcome):
            before = [parameter.detach().clone() for parameter in norms]
            step(outcome)
            with torch.no_grad():
                for parameter, old in zip(norms, before, strict=True):
                    parameter.copy_(old)

        engine._stepper.step = stepped

    run.after.append(leave)
