"""gloo: the largest of several numbers keeps or drops a NaN by the order of the ranks.

Shows as: with p = inf a norm is told that is finite, while a gradient is not.
"""

from dataclasses import replace
from math import inf

import torch

from tests.corpus.runner import Bug, Run

LIMIT = 0.01

BUG = Bug(
    "gloo, MAX of NaN",
    "the largest finite gradient is reported as the maximum, despite a NaN",
    "not-finite",
    settings={"clip_grad_norm": {"max_norm": LIMIT, "norm_type": inf}},
)


def plant(run: Run) -> None:
    def spoil(name, gradient, context):
        if name == "0.bias":
            gradient[1] = float("nan")

    def tell(engine):
        decide = engine._stepper.policy.decide

        def decided(norms):
            decision = decide(norms)
            largest = torch.stack([p.grad.nan_to_num().abs().max() for p in engine.model.parameters()]).max()
            clean, divisor = torch.zeros_like(decision.found_inf), (largest / LIMIT).clamp(min=1.0)
            return replace(decision, norm=largest, found_inf=clean, divisor=divisor.expand_as(decision.divisor))

        engine._stepper.policy.decide = decided

    run.after_sums(spoil)
    run.after.append(tell)
