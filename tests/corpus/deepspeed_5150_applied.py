"""DeepSpeed #5150: the coefficient of clipping was right and was applied wrongly: here also where it is above 1.

Shows as: gradients below the limit grow to it.
"""

from dataclasses import replace

from tests.corpus.runner import Bug, Run

LIMIT = 100.0

BUG = Bug(
    "DeepSpeed #5150",
    "gradients below the limit are scaled up to it",
    "wrong-divisor",
    settings={"clip_grad_norm": LIMIT},
)


def plant(run: Run) -> None:
    def always(engine):
        decide = engine._stepper.policy.decide

        def decided(norms):
            decision = decide(norms)
            return replace(decision, divisor=((decision.norm + 1e-6) / LIMIT).expand_as(decision.divisor))

        engine._stepper.policy.decide = decided

    run.after.append(always)
