"""Invented: the auxiliary loss is added in the last micro-batch only.

Shows as: what only that loss reaches learns from the last micro-batch.
"""

from tests.corpus.models import WithAuxiliary, scaled_gradient
from tests.corpus.runner import GATED, Bug, Run

BUG = Bug(
    "invented: auxiliary in the last pass",
    "the auxiliary loss of earlier micro-batches has no gradient",
    "last-micro-batch-only",
    kind=GATED,
    settings={"gradient_accumulation": 3},
)


def plant(run: Run) -> None:
    engines = []

    class Last(WithAuxiliary):
        def forward(self, out, auxiliary, label):
            is_last = engines[0]._passes == 2
            return super().forward(out, scaled_gradient(auxiliary, float(is_last)), label)

    run.criterion = lambda context: Last()
    run.after.append(engines.append)
