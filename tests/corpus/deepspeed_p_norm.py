"""DeepSpeed's norms for p other than 2: squares are summed, and the root of order p is taken.

Shows as: with norm_type = 3 a norm that is none.
"""

from dataclasses import replace

from tests.corpus.runner import NORM, Bug, Run, squares

BUG = Bug(
    "DeepSpeed, get_grad_norm with p = 3",
    "the norm is the third root of a sum of squares",
    "norm-type-differs",
    settings={"clip_grad_norm": {"max_norm": NORM, "norm_type": 3.0}},
)


def plant(run: Run) -> None:
    def measure(engine):
        decide = engine._stepper.policy.decide

        def decided(norms):
            decision, norm = decide(norms), squares(engine).pow(1 / 3)
            return replace(decision, norm=norm, divisor=(norm / NORM).clamp(min=1.0).expand_as(decision.divisor))

        engine._stepper.policy.decide = decided

    run.after.append(measure)
