"""Invented, as with an empty last batch on some ranks: one rank's last micro-batch is lost.

Shows as: gradients lack the samples of one pass of one rank.
"""

from colonnade import ParallelMode
from tests.corpus.runner import Bug, Run, mean_over

BUG = Bug(
    "invented: a short rank (Megatron-Bridge #5527)",
    "the last micro-batch of the second rank is lost",
    "micro-batch-missing",
    settings={"gradient_accumulation": 3},
)


def plant(run: Run) -> None:
    kept = {}

    def remember(engine, number):
        kept.update((name, p.grad.clone()) for name, p in engine.model.named_parameters() if p.grad is not None)

    def forget(engine, number):
        if number == 2 and engine.context.get_local_rank(ParallelMode.DATA) == 1:
            for name, parameter in engine.model.named_parameters():
                parameter.grad.copy_(kept[name])

    run.around_backward(remember, forget)
    run.reduce_by(lambda name, gradient, context: mean_over(gradient, ParallelMode.DATA, context))
