"""torchtitan #1551: where every rank holds its own experts, FSDP2 divided their gradients by the one rank it sharded them over.

Shows as: experts' gradients are too large by the number of ranks that sent tokens.
"""

from tests.corpus.experts import average_experts_over_their_twins
from tests.corpus.runner import EXPERTS, Bug, Run

BUG = Bug(
    "torchtitan #1551",
    "experts that only one rank stores are not divided",
    "wrong-divisor",
    layout={"expert": 2},
    kind=EXPERTS,
)


def plant(run: Run) -> None:
    run.reduce_by(average_experts_over_their_twins)
