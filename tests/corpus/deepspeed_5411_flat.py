"""DeepSpeed #5411: a flat buffer with split and whole parameters was taken for whole.

Shows as: the norm has this rank's shards only.
"""

from tests.corpus.norms import everything, taken_over
from tests.corpus.runner import NORM, TENSOR, Bug, Run

BUG = Bug(
    "DeepSpeed #5411",
    "shards of the other tensor ranks are not in the norm",
    "norm-misses-shards",
    layout={"tensor": 2},
    kind=TENSOR,
    settings={"clip_grad_norm": NORM},
)


def plant(run: Run) -> None:
    run.measure_by(taken_over(None, everything))
