"""torchtitan #1793: SimpleFSDP had no divisor of its own for modules that are under FSDP and expert parallelism.

Shows as: experts' gradients are too large by the size of the expert group.
"""

from tests.corpus.experts import average_experts_over_their_twins
from tests.corpus.runner import EXPERTS, Bug, Run

BUG = Bug(
    "torchtitan #1793",
    "experts are divided by the size of the group that communicates",
    "wrong-divisor",
    ranks=4,
    layout={"expert": 4},
    kind=EXPERTS,
)


def plant(run: Run) -> None:
    run.reduce_by(average_experts_over_their_twins)
