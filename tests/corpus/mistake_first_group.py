"""Invented: only the first group of the optimizer is handed to the function that clips.

Shows as: weights are clipped and biases are not.
"""

from dataclasses import replace

from tests.corpus.runner import Bug, Run

LIMIT = 0.01

BUG = Bug(
    "invented: the first group",
    "biases, in a group of their own, are not clipped",
    "not-clipped",
    settings={"clip_grad_norm": {"max_norm": LIMIT, "groups": {"vectors": {"params": "*.bias", "max_norm": LIMIT}}}},
)


def plant(run: Run) -> None:
    def leave(engine):
        decide, slot = engine._stepper.policy.decide, engine._stepper._slots.names.index("vectors")

        def decided(norms):
            decision = decide(norms)
            divisor = decision.divisor.clone()
            divisor[slot] = 1.0
            return replace(decision, divisor=divisor)

        engine._stepper.policy.decide = decided

    run.after.append(leave)
