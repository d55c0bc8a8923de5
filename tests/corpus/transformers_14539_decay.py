"""transformers #14539: weights were decayed after the step, by what they had become.

Shows as: weights are off by the decay of the last update.
"""

from functools import partial

import torch

from tests.corpus.runner import Bug, Run

BUG = Bug("transformers #14539", "weight decay uses the weights after the step", "optimizer-differs")


def plant(run: Run) -> None:
    def change(engine):
        step = engine._stepper.step

        def stepped(outcome):
            before = [parameter.detach().clone() for parameter in engine.model.parameters()]
            step(outcome)
            with torch.no_grad():
                for parameter, old in zip(engine.model.parameters(), before, strict=True):
                    parameter += 0.01 * 0.5 * old
                    parameter *= 1 - 0.01 * 0.5

        engine._stepper.step = stepped

    run.optimizer = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.5)
    run.after.append(change)
