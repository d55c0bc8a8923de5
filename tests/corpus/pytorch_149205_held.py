"""pytorch #149205: the optimizer held other parameters than those that the model trained with.

Shows as: gradients are right, and a weight never moves.
"""

import torch

from tests.corpus.runner import Bug, Run

BUG = Bug("pytorch #149205", "the optimizer updates a stale copy of one weight", "not-updated")


def plant(run: Run) -> None:
    def hold(engine):
        step, weight = engine._stepper.step, engine.model[0].weight

        def stepped(outcome):
            before = weight.detach().clone()
            step(outcome)
            with torch.no_grad():
                weight.copy_(before)  # what moved was the optimizer's own

        engine._stepper.step = stepped

    run.after.append(hold)
