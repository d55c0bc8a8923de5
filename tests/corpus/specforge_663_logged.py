"""SpecForge #663: the norm was summed over the ranks after the step had clipped, for the log only.

Shows as: the norm that is told is right; each rank clips by that of its own part.
"""

from dataclasses import replace

from tests.corpus.norms import everything, taken_over
from tests.corpus.runner import NORM, TENSOR, Bug, Run

BUG = Bug(
    "SpecForge #663",
    "the logged norm is right, but each rank clips by its own norm",
    "norm-misses-shards",
    layout={"tensor": 2},
    kind=TENSOR,
    settings={"clip_grad_norm": NORM},
)


def plant(run: Run) -> None:
    own = taken_over(None, everything)

    def change(engine):
        decide = engine._stepper.policy.decide

        def decided(norms):
            decision = decide(norms)
            divisor = ((own(engine) + 1e-6) / NORM).clamp(min=1.0)
            return replace(decision, divisor=divisor.expand_as(decision.divisor).to(decision.divisor.dtype))

        engine._stepper.policy.decide = decided

    run.after.append(change)
