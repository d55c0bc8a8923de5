"""bytetriper/RAE #67: the training loop called zero_grad for every micro-batch.

Shows as: only the last micro-batch reaches the optimizer.
"""

from tests.corpus.runner import TENSOR, Bug, Run, nothing

BUG = Bug(
    "bytetriper/RAE #67",
    "zero_grad inside the loop over micro-batches",
    "last-micro-batch-only",
    layout={"tensor": 2},
    kind=TENSOR,
    settings={"gradient_accumulation": 2},
)


def plant(run: Run) -> None:
    run.around_backward(lambda engine, number: engine.optimizer.zero_grad(), nothing)
