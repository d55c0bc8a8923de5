"""Invented: weights are gathered in 16 bits after the step, and nobody keeps the rest.

Shows as: weights that have three digits.
"""

import torch

from tests.corpus.runner import TENSOR, Bug, Run

BUG = Bug(
    "invented: rounded weights",
    "weights are rounded to bf16 after each step",
    "rounded",
    layout={"tensor": 2},
    kind=TENSOR,
)


def plant(run: Run) -> None:
    def shorten(engine):
        step = engine._stepper.step

        def stepped(outcome):
            step(outcome)
            with torch.no_grad():
                for parameter in engine.model.parameters():
                    parameter.copy_(parameter.to(torch.bfloat16))

        engine._stepper.step = stepped

    run.after.append(shorten)
