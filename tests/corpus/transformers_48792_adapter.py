"""transformers #48792: an adapter that came after the sharding was known to nothing that sums.

Shows as: each rank trains an adapter of its own.
"""

from tests.corpus.experts import right
from tests.corpus.runner import EXPERTS, Bug, Run

BUG = Bug(
    "transformers #48792",
    "a layer added after the sharding is not averaged",
    "not-reduced",
    layout={"expert": 2},
    kind=EXPERTS,
)


def plant(run: Run) -> None:
    def reduce(name, gradient, context):
        if not name.startswith("enter"):
            right(name, gradient, context)

    run.reduce_by(reduce)
