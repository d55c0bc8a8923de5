"""Megatron-LM #950: forward began before the all-gather of the stepped weights had come, with those of the step before.

Shows as: a rank that does not own a weight goes on with the old one.
"""

import torch

from tests.corpus.runner import Bug, Run

BUG = Bug("Megatron-LM #950", "a rank keeps the weight of the previous step", "not-updated")


def plant(run: Run) -> None:
    def stay(engine):
        step = engine._stepper.step

        def stepped(outcome):
            weight = engine.model[2].weight
            before = weight.detach().clone()
            step(outcome)
            if engine.context.get_global_rank() == 1:
                with torch.no_grad():
                    weight.copy_(before)

        engine._stepper.step = stepped

    run.after.append(stay)
