"""Colossal-AI #851: a plain model under tensor parallelism; its tensor ranks were taken for replicas, each with data of its own.

Shows as: ranks that should be the same see other samples and part.
"""

from colonnade import ParallelMode
from tests.corpus.runner import Bug, Run, numbers

BUG = Bug(
    "Colossal-AI #851",
    "tensor ranks get different batches",
    "replicas-differ",
    layout={"tensor": 2},
)


def plant(run: Run) -> None:
    def batches(context, step):
        return numbers(context, step + 10 * context.get_local_rank(ParallelMode.TENSOR))

    run.batches = batches
    run.loose["compare_batches"] = False
