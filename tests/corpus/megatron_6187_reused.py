"""Megatron-LM #6187: the memory of a gradient was used again before its reduction had read it.

Shows as: one rank sends the gradient of another layer.
"""

from colonnade import ParallelMode
from tests.corpus.runner import ALIKE, Bug, Run, mean_over

BUG = Bug("Megatron-LM #6187", "the second rank sends the gradient of another layer", "gradients-exchanged", kind=ALIKE)


def plant(run: Run) -> None:
    def overwrite(engine, number):
        if engine.context.get_local_rank(ParallelMode.DATA) == 1:
            engine.model[2].weight.grad.copy_(engine.model[0].weight.grad)

    run.around_backward(lambda engine, number: None, overwrite)
    run.reduce_by(lambda name, gradient, context: mean_over(gradient, ParallelMode.DATA, context))
