"""Invented: the function that clips is called layer by layer, so each is clipped by its own norm.

Shows as: every layer is as long as the limit.
"""

from dataclasses import replace

import torch
from torch import nn

from tests.corpus.runner import NORM, Bug, Run

BUG = Bug(
    "invented: layer by layer",
    "each layer is clipped by its own norm",
    "norm-of-a-part",
    settings={"clip_grad_norm": NORM},
)


def plant(run: Run) -> None:
    def layers(engine):
        decide = engine._stepper.policy.decide

        def decided(norms):
            decision = decide(norms)
            for layer in (engine.model[0], engine.model[2]):
                nn.utils.clip_grad_norm_(list(layer.parameters()), NORM)
            return replace(decision, divisor=torch.ones_like(decision.divisor))

        engine._stepper.policy.decide = decided

    run.after.append(layers)
