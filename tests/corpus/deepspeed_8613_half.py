"""DeepSpeed #8613: the experts' half of the norm was thrown away (6.0 for 10.0).

Shows as: the norm is that of the dense parameters.
"""

from tests.corpus.experts import is_expert
from tests.corpus.norms import taken_over
from tests.corpus.runner import EXPERTS, NORM, Bug, Run

BUG = Bug(
    "DeepSpeed #8613",
    "the norm contains only the dense parameters",
    "norm-of-a-part",
    layout={"expert": 2},
    kind=EXPERTS,
    settings={"clip_grad_norm": NORM},
)


def plant(run: Run) -> None:
    run.measure_by(taken_over(None, lambda name, _: not is_expert(name)))
