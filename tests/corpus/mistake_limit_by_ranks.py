"""Invented: the limit of clipping is divided by the number of data ranks, as if gradients were sums.

Shows as: the norm is right, and gradients are clipped to a smaller one.
"""

from dataclasses import replace

from tests.corpus.runner import NORM, Bug, Run

BUG = Bug(
    "invented: limit of a rank",
    "the limit is divided by the number of data ranks",
    "wrong-divisor",
    settings={"clip_grad_norm": NORM},
)


def plant(run: Run) -> None:
    def tighter(engine):
        decide = engine._stepper.policy.decide

        def decided(norms):
            decision = decide(norms)
            return replace(decision, divisor=decision.divisor * engine.context.data_parallel_size)

        engine._stepper.policy.decide = decided

    run.after.append(tighter)
