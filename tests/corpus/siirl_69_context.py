"""siiRL #69: batches were sent to the pipeline's ranks and not to those of the context group.

Shows as: sequence ranks cut their tokens out of different batches.
"""

from colonnade import ParallelMode
from tests.corpus.runner import SEQUENCE, Bug, Run

BUG = Bug(
    "siiRL #69",
    "sequence ranks get different batches",
    "replicas-differ",
    layout={"sequence": 2},
    kind=SEQUENCE,
)


def plant(run: Run) -> None:
    right = run.batches

    def other(context, step):
        return right(context, step + 50 * context.get_local_rank(ParallelMode.SEQUENCE))

    run.batches = other
