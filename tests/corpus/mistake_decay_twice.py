"""Invented, after timm #2750: weight decay is applied once more for each group of parameters that is split.

Shows as: split weights shrink twice as fast.
"""

import torch

from tests.corpus.runner import TENSOR, Bug, Run, is_split

BUG = Bug(
    "invented: weight decay (timm #2750)",
    "weight decay is applied to sharded weights twice",
    "optimizer-differs",
    layout={"tensor": 2},
    kind=TENSOR,
)


def plant(run: Run) -> None:
    def decay(engine):
        step = engine._stepper.step

        def stepped(outcome):
            step(outcome)
            with torch.no_grad():
                for parameter in engine.model.parameters():
                    if is_split(parameter):
                        parameter.mul_(1 - 0.1 * 0.01)

        engine._stepper.step = stepped

    run.after.append(decay)
