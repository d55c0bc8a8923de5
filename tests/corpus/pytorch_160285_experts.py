"""pytorch #160285: with expert parallelism the experts' gradients came out exactly twice too large at EP=2.

Shows as: an expert's gradient holds the tokens of all ranks of its group, but is divided by the ranks that replicate it only.
"""

from tests.corpus.experts import average_experts_over_their_twins
from tests.corpus.runner import EXPERTS, Bug, Run

BUG = Bug(
    "pytorch #160285",
    "experts are divided by the number of their replicas, not by the number of ranks that sent tokens",
    "wrong-divisor",
    ranks=4,
    layout={"expert": 2},
    kind=EXPERTS,
)


def plant(run: Run) -> None:
    run.reduce_by(average_experts_over_their_twins)
