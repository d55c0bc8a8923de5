"""pytorch #149768: the small number that keeps the coefficient finite was added once for each shard.

Shows as: coefficients that are a little too small where norms are tiny.
"""

from dataclasses import replace

from tests.corpus.runner import Bug, Run

BUG = Bug(
    "pytorch #149768",
    "1e-6 is added to the norm once for each rank",
    "wrong-divisor",
    settings={"clip_grad_norm": 1e-4},
)


def plant(run: Run) -> None:
    def once_for_each(engine):
        decide = engine._stepper.policy.decide

        def decided(norms):
            decision = decide(norms)
            divisor = (decision.norm + 2 * 1e-6) / 1e-4
            return replace(decision, divisor=divisor.clamp(min=1.0).expand_as(decision.divisor))

        engine._stepper.policy.decide = decided

    run.after.append(once_for_each)
