"""Automodel #3530: stages of a pipeline were set up anew when the length changed, and that cleared what had been accumulated.

Shows as: only the last micro-batch trains the model; the loss is right.
"""

from tests.corpus.runner import TENSOR, Bug, Run, nothing

BUG = Bug(
    "Automodel #3530",
    "a second setup between micro-batches clears the gradients",
    "last-micro-batch-only",
    ranks=4,
    layout={"tensor": 2},
    kind=TENSOR,
    settings={"gradient_accumulation": 3},
)


def plant(run: Run) -> None:
    def clear(engine, number):
        for parameter in engine.model.parameters():
            if number and parameter.grad is not None:
                parameter.grad.zero_()

    run.around_backward(clear, nothing)
