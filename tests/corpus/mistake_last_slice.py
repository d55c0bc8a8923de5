"""Invented: each rank steps on its slice of the weights; what is left over by the division belongs to nobody.

Shows as: the last elements of each weight never move.
"""

import torch

from tests.corpus.runner import Bug, Run

BUG = Bug("invented: slices of a step", "the optimizer does not update the last element of each weight", "not-updated")


def plant(run: Run) -> None:
    def keep(engine):
        step = engine._stepper.step

        def stepped(outcome):
            before = [p.detach().flatten()[-1].clone() for p in engine.model.parameters()]
            step(outcome)
            with torch.no_grad():
                for parameter, value in zip(engine.model.parameters(), before, strict=True):
                    parameter.view(-1)[-1] = value

        engine._stepper.step = stepped

    run.after.append(keep)
