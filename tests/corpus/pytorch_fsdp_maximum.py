"""torch 2.13 FSDP1: the largest gradient was reduced into a number that is kept, so a large step is told of for ever.

Shows as: a norm that never falls.
"""

from dataclasses import replace
from math import inf

import torch

from tests.corpus.runner import MLP, Bug, Kind, Run, numbers

LIMIT = 0.01

BUG = Bug(
    "torch 2.13, FSDP1 with p = inf",
    "the largest norm of all steps so far is reported",
    "stale-gradient",
    kind=Kind(MLP.model, batches=lambda context, step: [(x / (1 + 9 * step), y) for x, y in numbers(context, step)]),
    settings={"clip_grad_norm": {"max_norm": LIMIT, "norm_type": inf}},
)


def plant(run: Run) -> None:
    def keep(engine):
        decide, kept = engine._stepper.policy.decide, []

        def decided(norms):
            decision = decide(norms)
            kept.append(decision.norm.clone())
            norm = torch.stack(kept).max()
            divisor = ((norm + 1e-6) / LIMIT).clamp(min=1.0)
            return replace(decision, norm=norm, divisor=divisor.expand_as(decision.divisor))

        engine._stepper.policy.decide = decided

    run.after.append(keep)
