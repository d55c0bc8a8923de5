"""Colossal-AI's MoeGradientHandler: experts are averaged over the ranks that replicate them.

Shows as: experts' gradients are too large by the size of the expert group; later versions scale inside the experts instead.
"""

from tests.corpus.experts import average_experts_over_their_twins
from tests.corpus.runner import EXPERTS, Bug, Run

BUG = Bug(
    "Colossal-AI v0.1.8, MoeGradientHandler",
    "gradients of experts are averaged only over their replicas",
    "wrong-divisor",
    ranks=4,
    layout={"expert": 2},
    kind=EXPERTS,
)


def plant(run: Run) -> None:
    run.reduce_by(average_experts_over_their_twins)
