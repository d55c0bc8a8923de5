"""DeepSpeed #7188, #7171: a norm that is not a number was written as -1, and two groups of them were joined to 1.4142.

Shows as: a plausible norm, while a gradient is not finite.
"""

from dataclasses import replace

import torch

from tests.corpus.runner import NORM, Bug, Run

BUG = Bug(
    "DeepSpeed #7188, #7171",
    "the norm of a non-finite gradient is reported as 1.4142",
    "not-finite",
    settings={"clip_grad_norm": NORM},
)


def plant(run: Run) -> None:
    def spoil(name, gradient, context):
        if name == "2.weight":
            gradient[0, 0] = float("nan")

    def tell(engine):
        decide = engine._stepper.policy.decide

        def decided(norms):
            decision = decide(norms)
            joined = torch.full_like(decision.norm, -1.0).square().mul(2).sqrt()
            clean = torch.zeros_like(decision.found_inf)
            return replace(decision, norm=joined, found_inf=clean, divisor=(joined / NORM).expand_as(decision.divisor))

        engine._stepper.policy.decide = decided

    run.after_sums(spoil)
    run.after.append(tell)
